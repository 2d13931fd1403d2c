"""What a model of the world has learned: error, spread and calibration of what it imagines, and how it was trained.

    python benchmarks/world_model.py runs/pets/cartpole-SwingUp-v0/seed_1_20260101-120000

Reads the folder of a finished run of mbpo.py or pets.py: the model and the episodes of its last evaluation, which it
never learned from, and the log. Writes four figures and README.md into <run folder>/world_model (or `--out`).
docs/world_models.md says how to read them.

From many moments of those episodes the model imagines what the same actions lead to, on its own predictions alone (open
loop), by many particles, each of which keeps its member. Errors are in deviations of each observed number over the
episodes: 1 is what a guess of the mean costs.
"""

import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from records import Parser, read_metrics, read_run, write_text
from torch import Tensor

from cleanrl_zoo.envs.model_functions import features
from cleanrl_zoo.nn import GaussianEnsemble, load_model
from cleanrl_zoo.run.arguments import usage_errors

SHARES = (0.5, 0.9)  # of the truths that should lie in the intervals of these names
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito's
NAMES: dict[str, tuple[str, ...]] = {
    "cartpole/Balance-v0": ("cart (m)", "cart's velocity (m/s)", "angle (rad)", "angular velocity (rad/s)"),
    "cartpole/SwingUp-v0": ("cart (m)", "cart's velocity (m/s)", "sine of the angle", "tip's height (pole lengths)",
                            "angular velocity (rad/s)"),
    "Pendulum-v1": ("cosine of the angle", "sine of the angle", "angular velocity (rad/s)"),
    "InvertedPendulum-v4": ("cart (m)", "angle (rad)", "cart's velocity (m/s)", "angular velocity (rad/s)"),
    "Hopper-v4": ("height (m)", "torso (rad)", "thigh (rad)", "leg (rad)", "foot (rad)", "velocity forward (m/s)",
                  "velocity upward (m/s)", "torso (rad/s)", "thigh (rad/s)", "leg (rad/s)", "foot (rad/s)"),
}  # fmt: skip


class Imagined(NamedTuple):
    """What was really seen from W moments on, and what S particles of the model made of the same actions."""

    truth: Tensor  # [H + 1, W, D]
    particles: Tensor  # [H + 1, S, W, D]; the s-th belongs to elite s // (S / K)
    elites: int  # K


def windows(episodes: list[tuple[Tensor, Tensor]], horizon: int, count: int) -> tuple[Tensor, Tensor]:
    """Up to `count` windows of `horizon` steps, evenly spread over the episodes: obs [H + 1, W, D], actions [H, W, A].

    Raises:
        ValueError: if no episode is that long.
    """
    begins = [(i, t) for i, (obs, _) in enumerate(episodes) for t in range(len(obs) - horizon)]
    if not begins:
        longest = max((len(obs) for obs, _ in episodes), default=0)
        raise ValueError(f"--horizon {horizon}: the longest episode has {longest} steps; give at most {longest - 1}")
    chosen = [begins[i] for i in np.linspace(0, len(begins) - 1, min(count, len(begins))).round().astype(int)]
    obs = torch.stack([episodes[i][0][t : t + horizon + 1] for i, t in chosen], 1)
    return obs, torch.stack([episodes[i][1][t : t + horizon] for i, t in chosen], 1)


@torch.no_grad()
def imagine(
    model: GaussianEnsemble, env_id: str, obs: Tensor, actions: Tensor, particles: int, generator: torch.Generator
) -> Imagined:
    """Open loop from obs[0] [W, D] with `actions` [H, W, A]; `particles` for each elite, each with noise of its own."""
    see, elites, dims = features(env_id), len(model.elites), obs.shape[-1]
    state = obs[0].expand(elites * particles, -1, -1)  # [S, W, D]
    states = [state]
    for action in actions:
        inputs = torch.cat([see(state), action.expand(len(state), -1, -1)], -1)
        prediction = model.predict(inputs.view(elites, -1, inputs.shape[-1]), model.elites)
        change = prediction.sample(generator=generator)[..., -dims:]  # behind the reward, where that is predicted
        state = state + change.reshape(state.shape)
        states.append(state)
    return Imagined(obs, torch.stack(states), elites)


class Errors(NamedTuple):
    """One row per step of the horizon, the first being step 1; in deviations of each observed number."""

    error: Tensor  # [H, D] root mean square of (mean of all particles − truth)
    spread: Tensor  # [H, D] root mean square of the particles' standard deviation
    members: Tensor  # [H, D] that of the members' means: how far they disagree
    still: Tensor  # [H, D] root mean square error of the guess that nothing changes
    inside: dict[float, Tensor]  # [H, D] share of truths in the central interval of each share of the particles


def measure(imagined: Imagined, scale: Tensor) -> Errors:
    """Errors and calibration; `scale` [D] is what each observed number is divided by."""
    truth, particles = imagined.truth[1:], imagined.particles[1:]

    def size(x: Tensor) -> Tensor:
        return x.square().mean(1).sqrt() / scale  # over the windows

    mean = particles.mean(1)  # [H, W, D]
    members = particles.unflatten(1, (imagined.elites, -1)).mean(2)  # [H, K, W, D]
    inside = {}
    for share in SHARES:
        low, high = torch.quantile(particles, torch.tensor([0.5 - share / 2, 0.5 + share / 2]), dim=1)
        inside[share] = ((truth >= low) & (truth <= high)).float().mean(1)
    return Errors(
        size(mean - truth), size(particles.std(1)), size(members.std(1, correction=0)),
        size(truth - imagined.truth[0]), inside,
    )  # fmt: skip


def total(x: Tensor) -> Tensor:
    """Root mean square over the observed numbers: [H, D] -> [H]."""
    return x.square().mean(-1).sqrt()


# Figures


def pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ValueError("figures need matplotlib: pip install -c constraints.txt -e '.[report]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def names_of(env_id: str, dims: int) -> tuple[str, ...]:
    """A name with its unit for each observed number."""
    return NAMES.get(env_id, tuple(f"observation {i}" for i in range(dims)))


def save(fig: Any, path: Path) -> None:
    temporary = path.with_name(f".writing-{path.name}")
    fig.savefig(temporary, dpi=120, format="png")
    temporary.replace(path)
    pyplot().close(fig)


def draw_errors(errors: Errors, path: Path) -> None:
    """Error, spread and disagreement over the horizon."""
    steps = range(1, len(errors.error) + 1)
    fig, axes = pyplot().subplots(figsize=(5.6, 3.6), layout="constrained")
    lines = (
        ("error of the mean", errors.error, "-"),
        ("spread of the particles", errors.spread, "--"),
        ("spread of the members' means", errors.members, ":"),
        ("error of “nothing changes”", errors.still, "-."),
    )
    for colour, (label, values, style) in zip(COLOURS, lines, strict=False):
        axes.plot(steps, total(values).numpy(), style, color=colour, label=label)
    axes.set(xlabel="steps imagined", ylabel="deviations of the observation", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save(fig, path)


def draw_calibration(errors: Errors, names: tuple[str, ...], path: Path) -> None:
    """Share of truths inside the intervals, over the horizon and by observed number."""
    fig, (left, right) = pyplot().subplots(
        1, 2, figsize=(9.0, 3.6), layout="constrained", sharey=True, width_ratios=[1.4, 1]
    )
    steps, places = range(1, len(errors.error) + 1), np.arange(len(names))
    for colour, offset, share in zip(COLOURS, (-0.2, 0.2), SHARES, strict=False):
        left.plot(steps, errors.inside[share].mean(-1).numpy(), color=colour, label=f"inside the {share:.0%} interval")
        right.bar(places + offset, errors.inside[share][0].numpy(), 0.4, color=colour)
        for axes in (left, right):
            axes.axhline(share, color=colour, linestyle="--", linewidth=1)
    left.set(xlabel="steps imagined", ylabel="share of the truths", ylim=(0, 1.02), title="all observed numbers")
    left.legend(fontsize=8, loc="lower right")
    left.grid(alpha=0.3)
    right.set(title="after one step", xticks=places)
    right.set_xticklabels([name.partition(" (")[0] for name in names], rotation=40, ha="right", fontsize=8)
    save(fig, path)


def draw_training(rows: list[dict[str, float]], path: Path) -> None:
    """Holdout error of each member, and where the run has them the critics' values and what they learned from."""
    fig, panels = pyplot().subplots(
        1, 3 if tagged(rows, "losses/qf_real") else 1, figsize=(11.0 if tagged(rows, "losses/qf_real") else 5.0, 3.4),
        layout="constrained", squeeze=False,
    )  # fmt: skip
    members = sorted({tag for row in rows for tag in row if tag.startswith("model/error_")}, key=lambda t: (len(t), t))
    styles = ("-", "--", ":", "-.")
    for index, tag in enumerate(members):
        colour, style = COLOURS[index % len(COLOURS)], styles[index // len(COLOURS) % len(styles)]
        panels[0, 0].plot(*tagged(rows, tag), style, color=colour, label=f"member {tag.rpartition('_')[2]}")
    panels[0, 0].set(ylabel="mean squared error on the holdout", yscale="log")
    if len(panels[0]) == 3:
        for colour, tag, label in zip(COLOURS, ("real", "model"), ("from the environment", "imagined"), strict=False):
            panels[0, 1].plot(*tagged(rows, f"losses/qf_{tag}"), color=colour, label=f"{label}")
        panels[0, 1].set(ylabel="mean action value (return)")
        for colour, tag, label in (
            (COLOURS[0], "charts/model_share", "imagined share of a batch"),
            (COLOURS[1], "charts/rollout_survival", "rollouts that were not ended"),
        ):
            panels[0, 2].plot(*tagged(rows, tag), color=colour, label=label)
        panels[0, 2].set(ylabel="share", ylim=(0, 1.05))
    for axes in panels[0]:
        axes.set(xlabel="environment steps")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    save(fig, path)


def tagged(rows: list[dict[str, float]], tag: str) -> tuple[list[float], list[float]] | tuple[()]:
    """Steps and values of a tag of the log; () where it never stands there."""
    found = [(row["global_step"], row[tag]) for row in rows if tag in row]
    return tuple(map(list, zip(*found, strict=True))) if found else ()


def draw_trajectories(imagined: Imagined, names: tuple[str, ...], path: Path, shown: int = 20) -> None:
    """The first window: the true trajectory and `shown` imagined ones, coloured by member."""
    dims = imagined.truth.shape[-1]
    columns = min(3, dims)
    fig, panels = pyplot().subplots(
        math.ceil(dims / columns), columns, figsize=(3.4 * columns, 2.3 * math.ceil(dims / columns)),
        layout="constrained", squeeze=False, sharex=True,
    )  # fmt: skip
    per_member = imagined.particles.shape[1] // imagined.elites
    drawn = min(per_member, max(1, shown // imagined.elites))
    for axes in panels.flat[dims:]:
        axes.set_axis_off()
    for dim, axes in enumerate(panels.flat[:dims]):
        for member in range(imagined.elites):
            colour = COLOURS[member % (len(COLOURS) - 1)]
            first = member * per_member
            axes.plot(
                imagined.particles[:, first : first + drawn, 0, dim].numpy(), color=colour, linewidth=0.8, alpha=0.7
            )
        truth = imagined.truth[:, 0, dim].numpy()
        axes.plot(truth, color="black", linewidth=2)
        # where a particle leaves the page, the truth stays readable
        room = 0.3 * max(float(truth.max() - truth.min()), 1e-3)
        axes.set_ylim(float(truth.min()) - room, float(truth.max()) + room)
        axes.set(title=names[dim])
        axes.title.set_fontsize(9)
        axes.grid(alpha=0.3)
    for axes in panels[-1]:
        axes.set(xlabel="steps imagined")
    fig.suptitle("black: what happened; colours: imagined, one per member", fontsize=9)
    save(fig, path)


# The text


def text(card: dict[str, Any], errors: Errors, imagined: Imagined, names: tuple[str, ...], rows: list[dict]) -> str:
    """The numbers behind the figures, as Markdown."""
    horizon, windows_count = len(errors.error), imagined.truth.shape[1]
    shown = [h for h in (1, 2, 3, 5, 10, 15, 20, 25, 50, 100) if h < horizon] + [horizon]
    spec = card["model"]
    lines = [
        f"# The model of {card['algorithm']} on {card['env']}, seed {card['seed']}",
        "",
        f"{spec['members']} members, {spec['elites']} of them predicted with, hidden layers "
        f"{' × '.join(map(str, spec['hidden']))}, after {card['global_step']:,} real steps. {windows_count} windows of "
        f"{horizon} steps from {card['episodes']} episodes that the model did not learn from, "
        f"{imagined.particles.shape[1]} particles each. docs/world_models.md says how to read this.",
        "",
        "![error over the horizon](error.png)",
        "",
        "Root mean squares over all observed numbers, in deviations of each over the episodes:",
        "",
        "| steps imagined | error | spread | spread of members' means | error of “nothing changes” "
        "| inside 50 % | inside 90 % |",
        "|---|---|---|---|---|---|---|",
    ]
    for h in shown:
        numbers = [f"{total(x)[h - 1]:.3g}" for x in (errors.error, errors.spread, errors.members, errors.still)]
        inside = [f"{errors.inside[share][h - 1].mean():.0%}" for share in SHARES]
        lines.append(f"| {h} | {' | '.join(numbers + inside)} |")
    lines += [
        "",
        "![calibration](calibration.png)",
        "",
        "After one step, by observed number, in its own deviations:",
        "",
        "| observed | error | spread | inside 50 % | inside 90 % |",
        "|---|---|---|---|---|",
    ]
    for dim, name in enumerate(names):
        inside = [f"{errors.inside[share][0, dim]:.0%}" for share in SHARES]
        lines.append(f"| {name} | {errors.error[0, dim]:.2g} | {errors.spread[0, dim]:.2g} | {' | '.join(inside)} |")
    lines += ["", "![a true trajectory and imagined ones](trajectories.png)", "", "![training](training.png)", ""]
    last = {tag: row[tag] for row in rows for tag in row}
    wanted = ("losses/model_nll", "losses/model_error", "charts/model_share", "losses/qf_real", "losses/qf_model")
    have = [tag for tag in wanted if tag in last]
    if have:
        lines += ["Last of the log:", "", "| metric | value |", "|---|---|"]
        lines += [f"| {tag} | {last[tag]:.4g} |" for tag in have]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="benchmarks/world_model.py", description="What a run's model of the world has learned.")
    parser.add_argument("run", type=Path, metavar="RUN_FOLDER", help="a finished run of mbpo.py or pets.py")
    parser.add_argument("--horizon", type=int, default=25, help="steps imagined; default 25")
    parser.add_argument("--windows", type=int, default=200, help="moments that are imagined from; default 200")
    parser.add_argument("--particles", type=int, default=20, help="of each elite; default 20")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder of the figures; default <RUN_FOLDER>/world_model")
    args = parser.parse_args(argv)
    with usage_errors():
        for name in ("horizon", "windows", "particles"):
            if getattr(args, name) < 1:
                raise ValueError(f"--{name} {getattr(args, name)}: must be at least 1")
        pyplot()
        read_run(args.run)
        model, episodes, card = load_model(args.run / "model")
        rows = read_metrics(args.run / "metrics.jsonl")
        obs, actions = windows(episodes, args.horizon, args.windows)
        torch.set_num_threads(1)
        generator = torch.Generator().manual_seed(args.seed)
        imagined = imagine(model, card["env"], obs, actions, args.particles, generator)
        scale = torch.cat([rows for rows, _ in episodes]).std(0)
        errors = measure(imagined, torch.where(scale > 0, scale, torch.ones_like(scale)))
        out, names = args.out or args.run / "world_model", names_of(card["env"], obs.shape[-1])
        out.mkdir(parents=True, exist_ok=True)
    draw_errors(errors, out / "error.png")
    draw_calibration(errors, names, out / "calibration.png")
    draw_training(rows, out / "training.png")
    draw_trajectories(imagined, names, out / "trajectories.png")
    write_text(out / "README.md", text(card, errors, imagined, names, rows))
    first, last = (f"{total(errors.error)[h]:.3g}" for h in (0, -1))
    print(f"{out}: error {first} after 1 step and {last} after {args.horizon}, in deviations of the observation")
    return 0


if __name__ == "__main__":
    sys.exit(main())
