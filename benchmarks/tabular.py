"""Redoes the textbook's figures with the tabular files of algos/: numbers, curves, plots, one table.

    python benchmarks/tabular.py                          # all of them: a few minutes of one core
    python benchmarks/tabular.py --only cliff windy       # some; the table keeps what is there of the others

Each figure writes `results/tabular/<figure>.json` (its numbers beside the textbook's, commit, versions, machine),
`.csv` (its curves) and `.png`; `README.md` there is the table of all. The textbook is Sutton & Barto (2018),
"Reinforcement Learning: An Introduction", 2nd edition. The updates are those of the files. Every figure has seed 1.
"""

import csv
import importlib.util
import io
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from records import ROOT, Parser, read_json, write_text

from cleanrl_zoo.data.episodes import EpisodeBatch, side_by_side
from cleanrl_zoo.envs import make_vec, run_episodes
from cleanrl_zoo.envs.tabular import (
    action_values,
    exact_model,
    named_policy,
    occupied,
    optimal_values,
    policy_values,
    world,
)
from cleanrl_zoo.run.arguments import usage_errors
from cleanrl_zoo.run.checkpoint import write_json
from cleanrl_zoo.run.provenance import git_commit, machine, versions

SEED = 1


class Number(NamedTuple):
    """One number of ours beside the textbook's."""

    what: str
    ours: str
    textbook: str


class Figure(NamedTuple):
    """What a figure's function gives: numbers, curves as rows (curve, x, y), how they are drawn, and what the numbers
    need to be read with, if anything."""

    numbers: list[Number]
    curves: list[tuple[str, float, float]]
    title: str
    axes: tuple[str, str]
    limits: tuple[float, float] | None = None
    log_x: bool = False
    note: str = ""


def algorithm(name: str) -> ModuleType:
    """The module algos/<name>.py."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, ROOT / "algos" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def start(module: ModuleType, env: str, runs: int, **flags: Any) -> tuple[Any, Any, Any]:
    """Flags, environments and a fresh state of a file, for `runs` runs."""
    args = module.Args(
        env=f"textbook/{env}-v0" if "/" not in env and "-v" not in env else env, num_envs=runs, seed=SEED, **flags
    )
    envs = make_vec(args.env, runs, SEED)
    return args, envs, module.TrainState.create(args, envs)


def play(module: ModuleType, env: str, runs: int, episodes: int, **flags: Any) -> tuple[np.ndarray, np.ndarray, Any]:
    """Returns and lengths [R, episodes] of a control file's first training episodes, and its state after them."""
    args, envs, state = start(module, env, runs, **flags)
    returns, lengths = np.zeros((runs, episodes)), np.zeros((runs, episodes), np.int64)
    count = np.zeros(runs, np.int64)
    while count.min() < episodes:
        step = module.collect(state, envs, args)
        module.update(state, step, args)
        counted = (count < episodes).nonzero()[0]
        returns[counted, count[counted]] += step.reward.numpy()[counted]
        lengths[counted, count[counted]] += 1
        count[counted] += step.done.numpy()[counted]
    return returns, lengths, state


# Random walks


def walks(env: str, runs: int, episodes: int) -> list[EpisodeBatch]:
    """The k-th episode of every run as one batch [L, R], for k < episodes."""
    td = algorithm("td_prediction")
    args, envs, state = start(td, env, runs)
    policy = torch.from_numpy(named_policy(envs, "random"))
    return side_by_side(lambda: td.collect(state, envs, policy), runs, episodes)


def rms_errors(batches: list[EpisodeBatch], alphas: list[float], **flags: Any) -> np.ndarray:
    """RMS error [alphas] over the states at the end of each walk, mean over walks and runs: figures 7.2, 12.3 and on.

    All step sizes are runs side by side, on the same walks.
    """
    td, runs = algorithm("td_prediction"), len(batches[0].runs)
    model = world("RandomWalk19").models[0]
    exact = torch.from_numpy(policy_values(model, np.full((21, 2), 0.5), 1.0))
    inside = torch.from_numpy(occupied(model))
    args, _, state = start(td, "RandomWalk19", runs * len(alphas), **flags)
    args.learning_rate = torch.tensor(alphas, dtype=torch.float64).repeat_interleave(runs)
    errors = []
    for batch in batches:
        tiled = [field.repeat(1, len(alphas)) for field in batch[1:]]
        td.update(state, EpisodeBatch(torch.arange(runs * len(alphas)), *tiled), args)
        errors.append((state.values - exact)[:, inside].square().mean(1).sqrt())
    return torch.stack(errors).mean(0).view(len(alphas), runs).mean(1).numpy()


ALPHAS = [0.05, *(round(0.1 * k, 1) for k in range(1, 11))]


def best(found: dict[Any, np.ndarray], name: str) -> str:
    """The setting with the least error."""
    key = min(found, key=lambda k: np.nanmin(found[k]))
    return f"{np.nanmin(found[key]):.3f} at {name} = {key}, α = {ALPHAS[int(np.nanargmin(found[key]))]}"


def random_walk_n(runs: int = 100, episodes: int = 10) -> Figure:
    """Figure 7.2: n-step TD on the 19-state walk."""
    batches = walks("RandomWalk19", runs, episodes)
    found = {n: rms_errors(batches, ALPHAS, method="td", n=n) for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)}
    numbers = [
        Number(
            f"19-state walk, n-step TD: least RMS error over {episodes} episodes",
            best(found, "n"),
            "about 0.27 at n = 4, α = 0.4",
        ),
        Number("the same at n = 4, α = 0.4", f"{found[4][ALPHAS.index(0.4)]:.3f}", "about 0.27"),
    ]
    curves = [(f"n = {n}", a, float(e)) for n, row in found.items() for a, e in zip(ALPHAS, row, strict=True)]
    axes = ("α", f"RMS error, first {episodes} episodes")
    return Figure(numbers, curves, "n-step TD, 19-state walk", axes, (0.25, 0.55))


def random_walk_lambda(runs: int = 100, episodes: int = 10) -> Figure:
    """Figures 12.3, 12.6 and 12.8: the offline λ-return and TD(λ) on the 19-state walk."""
    batches = walks("RandomWalk19", runs, episodes)
    lambdas = (0.0, 0.4, 0.8, 0.9, 0.95, 0.975, 0.99, 1.0)
    numbers, curves = [], []
    for name, textbook, flags in (
        ("offline λ-return", "about 0.265 near λ = 0.8, α = 0.4", {"method": "lambda_return"}),
        ("TD(λ), accumulating", "slightly worse than offline", {"method": "td_lambda", "trace": "accumulating"}),
        ("TD(λ), replacing", "-", {"method": "td_lambda", "trace": "replacing"}),
        ("TD(λ), Dutch (true online)", "slightly better than offline", {"method": "td_lambda", "trace": "dutch"}),
    ):
        found = {lam: rms_errors(batches, ALPHAS, trace_decay=lam, **flags) for lam in lambdas}
        what = f"19-state walk, {name}: least RMS error over {episodes} episodes"
        numbers.append(Number(what, best(found, "λ"), textbook))
        if name.startswith("offline"):
            numbers.append(
                Number("the same at λ = 0.8, α = 0.4", f"{found[0.8][ALPHAS.index(0.4)]:.3f}", "about 0.265")
            )
        curves += [
            (f"{name}: λ = {lam}", a, float(e)) for lam, row in found.items() for a, e in zip(ALPHAS, row, strict=True)
        ]
    axes = ("α", f"RMS error, first {episodes} episodes")
    return Figure(numbers, curves, "λ-return and TD(λ), 19-state walk", axes, (0.25, 0.55))


# Control


CONTROL = {
    "SARSA": ("sarsa", {"method": "sarsa"}),
    "Q-learning": ("q_learning", {"method": "plain"}),
    "expected SARSA": ("sarsa", {"method": "expected_sarsa"}),
}


def greedy_length(q: torch.Tensor, name: str, limit: int = 1000) -> np.ndarray:
    """Steps [R] that the greedy policy of each table [R, S, A] needs in a deterministic world, at most `limit`."""
    envs = make_vec(f"textbook/{name}-v0", len(q), SEED, env_kwargs={"max_episode_steps": limit})
    runs = torch.arange(len(q))
    return run_episodes(envs, lambda obs: q[runs, torch.from_numpy(obs)].argmax(-1).numpy())[1]


def cliff(runs: int = 100, episodes: int = 500) -> Figure:
    """Example 6.6: returns on the way while walking along the cliff."""
    numbers, curves = [], []
    textbook = {"SARSA": "about −25 to −30", "Q-learning": "about −45 to −50", "expected SARSA": "-"}
    for name, (file, flags) in CONTROL.items():
        flags = dict(learning_rate=0.5, epsilon=0.1, **flags)
        returns, _, state = play(algorithm(file), "CliffWalking", runs, episodes, **flags)
        first = episodes - episodes // 5  # the last fifth begins after it
        last = returns[:, first:].mean(1)
        numbers.append(
            Number(
                f"cliff walking, {name}: return of episodes {first + 1} to {episodes}, α = 0.5, ε = 0.1, {runs} runs",
                f"{last.mean():.1f} ± {last.std():.1f}",
                textbook[name],
            )
        )
        if name == "Q-learning":
            lengths = greedy_length(state.q, "CliffWalking")
            numbers.append(
                Number(
                    f"cliff walking, Q-learning's greedy path (−return), median of {runs} runs",
                    f"{np.median(lengths):.0f} ({(lengths == 13).mean():.0%} of runs at 13)",
                    "13, the optimum",
                )
            )
        curves += [(name, k + 1, float(value)) for k, value in enumerate(returns.mean(0))]
    return Figure(numbers, curves, "cliff walking", ("episode", "sum of rewards"), (-100, -10))


def cliff_alpha(repeats: int = 10, episodes: int = 500) -> Figure:
    """Figure 6.3: performance over the step size, at the beginning and later."""
    alphas, first = [round(0.1 * k, 1) for k in range(1, 11)], episodes // 5
    numbers, curves = [], []
    for name, (file, flags) in CONTROL.items():
        rates = torch.tensor(alphas, dtype=torch.float64).repeat_interleave(repeats)
        flags = dict(learning_rate=rates, epsilon=0.1, **flags)
        returns, _, _ = play(algorithm(file), "CliffWalking", len(rates), episodes, **flags)
        early = returns[:, :first].mean(1).reshape(len(alphas), repeats).mean(1)
        late = returns[:, first:].mean(1).reshape(len(alphas), repeats).mean(1)
        curves += [(f"{name}, episodes 1–{first}", a, float(y)) for a, y in zip(alphas, early, strict=True)]
        curves += [(f"{name}, episodes {first + 1}–{episodes}", a, float(y)) for a, y in zip(alphas, late, strict=True)]
        if name == "expected SARSA":
            best_alpha = alphas[int(early.argmax())]
            numbers.append(
                Number(
                    f"cliff walking, expected SARSA: best α over the first {first} episodes",
                    f"{best_alpha} ({early.max():.1f})",
                    "0.9 to 1 (about −45)",
                )
            )
    return Figure(numbers, curves, "cliff walking over α", ("α", "mean sum of rewards"), (-160, 0))


def windy(runs: int = 100, steps: int = 8000) -> Figure:
    """Example 6.5: SARSA in the windy gridworld, 8,000 steps."""
    sarsa, numbers, curves = algorithm("sarsa"), [], []
    settled = steps * 3 // 4
    for world_name, optimum in (("WindyGridworld", 15), ("WindyGridworldKings", 7)):
        args, envs, state = start(sarsa, world_name, runs, learning_rate=0.5, epsilon=0.1)
        ended, late = np.zeros(steps), np.zeros(runs)
        for step in range(steps):
            transition = sarsa.collect(state, envs, args)
            sarsa.update(state, transition, args)
            ended[step] = transition.done.sum()
            late += transition.done.numpy() * (step >= settled)
        per_run = ended.cumsum() / runs
        lengths = greedy_length(state.q, world_name)
        model = world(world_name).models[0]
        numbers += [
            Number(
                f"{world_name}, optimum by dynamic programming",
                f"{-optimal_values(model, 1.0) @ model.start:.0f} steps",
                f"{optimum} steps",
            ),
            Number(
                f"{world_name}, SARSA, {runs} runs: greedy path after {steps:,} steps, shortest and median",
                f"{lengths.min()} and {np.median(lengths):.0f} steps",
                f"{optimum} steps",
            ),
            Number(
                f"{world_name}, SARSA: steps per episode from step {settled:,} to {steps:,}, median; "
                f"episodes in {steps:,} steps",
                f"{(steps - settled) / np.median(late):.1f}; {per_run[-1]:.0f}",
                "about 17; about 170" if optimum == 15 else "-",
            ),
        ]
        curves += [(world_name, float(step + 1), float(per_run[step])) for step in range(0, steps, 50)]
    return Figure(numbers, curves, "windy gridworld, SARSA", ("steps", "episodes"))


def dyna_maze(runs: int = 30, episodes: int = 50) -> Figure:
    """Figure 8.2: Dyna-Q by planning steps."""
    dyna, numbers, curves = algorithm("dyna_q"), [], []
    for planning, textbook in ((0, "about 25"), (5, "about 5"), (50, "about 3")):
        flags = dict(planning_steps=planning, learning_rate=0.1, epsilon=0.1, gamma=0.95, method="dyna_q")
        _, lengths, _ = play(dyna, "DynaMaze", runs, episodes, **flags)
        mean = lengths.mean(0)
        what = f"first episode of at most {GOOD_PATH} steps (of at most {FAIR_PATH}), mean of {runs} runs"
        good, fair = ([*(mean <= steps).nonzero()[0] + 1, "none"][0] for steps in (GOOD_PATH, FAIR_PATH))
        numbers.append(Number(f"Dyna maze, {planning} planning steps: {what}", f"{good} ({fair})", textbook))
        curves += [(f"{planning} planning steps", k + 1, float(value)) for k, value in enumerate(mean)]
    axes = ("episode", "steps per episode")
    note = (
        "Dyna maze: the textbook says how many episodes a good path took, not which paths are good; the bound of "
        f"{GOOD_PATH} steps is ours, and one of {FAIR_PATH} in its place gives the numbers in brackets."
    )
    return Figure(numbers, curves, "Dyna maze", axes, (0, 800), note=note)


# steps of an ε-greedy walk whose greedy path has 14: what counts as a good path, and how much that matters
GOOD_PATH, FAIR_PATH = 20, 25


def changing_maze(name: str, runs: int, steps: int, textbook: str) -> Figure:
    """Cumulative reward of Dyna-Q and Dyna-Q+ in a maze that changes."""
    dyna, numbers, curves, change = algorithm("dyna_q"), [], [], min(steps, *world(name).changes)
    for method, title in (("dyna_q", "Dyna-Q"), ("dyna_q_plus", "Dyna-Q+")):
        flags = dict(planning_steps=10, learning_rate=1.0, epsilon=0.1, gamma=0.95, kappa=1e-3)
        args, envs, state = start(dyna, name, runs, method=method, **flags)
        reward = np.zeros(steps)
        for step in range(steps):
            transition = dyna.collect(state, envs, args)
            dyna.update(state, transition, args)
            reward[step] = transition.reward.mean()
        total = reward.cumsum()
        last = reward[-1000:].sum()
        numbers.append(
            Number(
                f"{name}, {title}: cumulative reward at step {change:,}, at {steps:,}; in the last 1,000 steps",
                f"{total[change - 1]:.0f}, {total[-1]:.0f}; {last:.0f}",
                textbook,
            )
        )
        curves += [(title, float(step + 1), float(total[step])) for step in range(0, steps, 25)]
    return Figure(numbers, curves, name, ("steps", "cumulative reward"))


def blocking_maze(runs: int = 30, steps: int = 3000) -> Figure:
    """Figure 8.4."""
    return changing_maze("BlockingMaze", runs, steps, "Dyna-Q+ ahead before and after the change")


def shortcut_maze(runs: int = 30, steps: int = 6000) -> Figure:
    """Figure 8.5."""
    return changing_maze("ShortcutMaze", runs, steps, "Dyna-Q+ finds the shortcut, Dyna-Q does not")


def blackjack(runs: int = 100, episodes: int = 10_000) -> Figure:
    """Examples 5.1 and 5.4: the value of one state, exact, on-policy and off-policy."""
    mc = algorithm("mc_prediction")
    deuce = world("BlackjackDeuce").models[0]
    place = int(deuce.start.argmax())
    args, envs, state = start(mc, "BlackjackDeuce", runs, policy="stick20")
    target = torch.from_numpy(named_policy(envs, "stick20"))
    exact = policy_values(deuce, target.numpy(), 1.0)[place]
    numbers = [
        Number(
            "blackjack, sum 13, usable ace, dealer's deuce; sticks on 20: exact", f"{exact:.5f}", "−0.27726 (sampled)"
        )
    ]
    count = np.zeros(runs, np.int64)
    while count.min() < episodes // 10:
        batch = mc.collect(state, envs, target)
        if batch is not None:
            mc.update(state, batch, target, args)
            count[batch.runs] += 1
    estimates, weight = state.values[:, place].numpy(), state.weights[:, place].numpy()
    error = estimates.std() / runs**0.5
    mean = (estimates * weight).sum() / weight.sum()
    numbers.append(
        Number(
            f"the same by first-visit Monte Carlo, {weight.sum():,.0f} episodes", f"{mean:.4f} ± {error:.4f}", "−0.2773"
        )
    )

    # figure 5.3: both kinds of importance sampling learn from the same episodes of the random policy
    behavior = torch.from_numpy(named_policy(envs, "random"))
    kinds = {}
    for kind in ("ordinary", "weighted"):
        kinds[kind] = start(mc, "BlackjackDeuce", runs, policy="stick20", importance=kind)
    _, envs, source = kinds["ordinary"]
    count = np.zeros(runs, np.int64)
    points = sorted({int(round(10 ** (k / 8))) for k in range(33)} & set(range(1, episodes + 1)))
    place_of = {point: column for column, point in enumerate(points)}
    squared = {kind: np.full((runs, len(points)), np.nan) for kind in kinds}
    while count.min() < episodes:
        batch = mc.collect(source, envs, behavior)
        if batch is None:
            continue
        count[batch.runs] += 1
        due = [(run, place_of[count[run]]) for run in batch.runs.tolist() if count[run] in place_of]
        for kind, (kind_args, _, kind_state) in kinds.items():
            mc.update(kind_state, batch, target, kind_args)
            for run, column in due:
                squared[kind][run, column] = (float(kind_state.values[run, place]) - exact) ** 2
    curves = []
    for kind, found in squared.items():
        mean = found.mean(0)
        decades = [point for point in (10, 100, 1000, 10_000) if point in place_of]
        shown = ", ".join(f"{mean[place_of[point]]:.2g}" for point in decades)
        textbook = (
            "starts high (about 1 to 2), slowly down" if kind == "ordinary" else "below ordinary, down to about 0"
        )
        numbers.append(
            Number(f"off-policy, {kind} importance sampling: mean squared error after "
                   f"{', '.join(f'{point:,}' for point in decades)} episodes", shown, textbook)
        )  # fmt: skip
        curves += [(kind, float(point), float(value)) for point, value in zip(points, mean, strict=True)]
    axes = ("episodes", "mean squared error")
    return Figure(numbers, curves, "off-policy blackjack", axes, (0.0, 5.0), log_x=True)


def blackjack_control(runs: int = 100, steps: int = 20_000) -> Figure:
    """Figure 5.2: the best policy at blackjack, by off-policy Monte Carlo control and by dynamic programming."""
    mc, model = algorithm("mc_control"), world("Blackjack").models[0]
    args, envs, state = start(mc, "Blackjack", runs, method="off_policy", epsilon=0.5)
    for _ in range(steps):
        batch = mc.collect(state, envs, args)
        if batch is not None:
            mc.update(state, batch, args)
    exact = action_values(model, optimal_values(model, 1.0), 1.0)  # [200, 2]
    # one table for all runs: as each run's values are, a mean by the weights of the returns
    found = ((state.q * state.weights).sum(0) / state.weights.sum(0).clamp(min=1e-300)).numpy()
    agrees, clear = found.argmax(1) == exact.argmax(1), np.abs(exact[:, 0] - exact[:, 1]) > CLEAR
    episodes = len(envs.pop_episodes())
    number = Number(
        f"blackjack, off-policy Monte Carlo control, {runs} runs together, {episodes:,} episodes: states with the best "
        f"action; of the {clear.sum()} whose actions' values differ by more than {CLEAR}",
        f"{agrees.mean():.1%}; {agrees[clear].mean():.1%}",
        "all of them (by eye)",
    )
    curves = []
    for ace, panel in enumerate(("no usable ace", "usable ace")):
        for name, q in (("Monte Carlo control", found), ("dynamic programming", exact)):
            hits = q.argmax(1).reshape(2, 10, 10)[ace].sum(0)  # sums from 12 on that hit, per card of the dealer
            curves += [(f"{panel}: {name}", card + 1, float(12 + count)) for card, count in enumerate(hits)]
    axes = ("dealer's card (1: ace)", "least sum that sticks")
    return Figure([number], curves, "blackjack", axes, (11, 22))


CLEAR = 0.1  # of the rewards −1, 0 and 1


def maximization_bias(runs: int = 2000, episodes: int = 300) -> Figure:
    """Figure 6.5: left actions from A."""
    q_learning, numbers, curves, last = algorithm("q_learning"), [], [], min(20, episodes)
    for method, title, textbook in (
        ("plain", "Q-learning", "far above 50 % at first, at 300 clearly above 5 %"),
        ("double", "double Q-learning", "never far above 50 %, at 300 near 5 %"),
    ):
        args, envs, state = start(
            q_learning, "MaximizationBias", runs, method=method, learning_rate=0.1, epsilon=0.1, gamma=1.0
        )
        left, count = np.zeros((runs, episodes), bool), np.zeros(runs, np.int64)
        while count.min() < episodes:
            step = q_learning.collect(state, envs, args)
            q_learning.update(state, step, args)
            first = ((step.obs == 0).numpy() & (count < episodes)).nonzero()[0]
            left[first, count[first]] = step.action.numpy()[first] == 0
            count[step.done.numpy()] += 1
        share = left.mean(0)
        numbers.append(
            Number(f"maximisation bias, {title}: left actions at their most, and over episodes "
                   f"{episodes - last + 1} to {episodes}; optimum 5 %",
                   f"{share.max():.0%}, {share[-last:].mean():.1%}", textbook)
        )  # fmt: skip
        curves += [(title, k + 1, float(value)) for k, value in enumerate(share)]
    return Figure(numbers, curves, "maximisation bias", ("episode", "left actions from A"), (0.0, 1.0))


def frozen_lake(runs: int = 50, steps: int = 40_000) -> Figure:
    """Not in the textbook: Gymnasium's FrozenLake 4 × 4, success of the greedy policy within its 100 steps, exactly."""
    q_learning, curves = algorithm("q_learning"), []
    flags = {**q_learning.PRESETS["frozen_lake"], "num_envs": runs}
    args, envs, state = start(q_learning, flags.pop("env"), flags.pop("num_envs"), **flags)
    model = exact_model(envs)
    optimal = policy_values(model, named_policy(envs, "optimal"), 1.0, horizon=100) @ model.start
    for step in range(1, steps + 1):
        q_learning.update(state, q_learning.collect(state, envs, args), args)
        if step % (steps // 20) == 0:
            greedy = np.eye(4)[state.q.argmax(-1).numpy()]
            success = np.array([policy_values(model, policy, 1.0, horizon=100) @ model.start for policy in greedy])
            curves.append((f"Q-learning, mean of {runs} runs", float(step), float(success.mean())))
    numbers = [
        Number(
            "FrozenLake 4 × 4: success of the optimal policy within 100 steps, exact", f"{optimal:.4f}", "0.74 (known)"
        ),
        Number(
            f"FrozenLake 4 × 4, Q-learning, {runs} runs of {steps:,} steps: exact success of the greedy policies",
            f"mean {success.mean():.3f}, median {np.median(success):.3f}",
            "0.74 (known)",
        ),
    ]
    return Figure(numbers, curves, "FrozenLake 4 × 4, greedy policy", ("steps", "success"), (0.0, 1.0))


FIGURES: dict[str, Callable[[], Figure]] = {
    figure.__name__: figure
    for figure in (
        random_walk_n, random_walk_lambda, cliff, cliff_alpha, windy, dyna_maze, blocking_maze, shortcut_maze,
        blackjack, blackjack_control, maximization_bias, frozen_lake,
    )
}  # fmt: skip


def draw(figure: Figure, path: Path) -> None:
    """The curves as a PNG."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("figures need matplotlib: pip install -c constraints.txt -e '.[report]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = list(dict.fromkeys(name for name, _, _ in figure.curves))
    panels = list(dict.fromkeys(name.rpartition(": ")[0] for name in names))
    fig, axes = plt.subplots(1, len(panels), figsize=(5.2 * len(panels), 3.8), layout="constrained", squeeze=False)
    for panel, axis in zip(panels, axes[0], strict=True):
        for name in names:
            if name.rpartition(": ")[0] == panel:
                points = [(x, y) for curve, x, y in figure.curves if curve == name]
                axis.plot(*zip(*points, strict=True), label=name.rpartition(": ")[2], linewidth=1)
        axis.set(xlabel=figure.axes[0], ylabel=figure.axes[1], title=panel or figure.title)
        if figure.limits is not None:
            axis.set_ylim(*figure.limits)
        if figure.log_x:
            axis.set_xscale("log")
        axis.legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=110)
    plt.close(fig)


def make(names: Iterable[str], folder: Path) -> None:
    """Computes the named figures and writes them and the table of all that are there."""
    commit, dirty = git_commit(ROOT)
    for name in names:
        began, began_processor = time.perf_counter(), time.process_time()
        figure = FIGURES[name]()
        seconds, processor_seconds = time.perf_counter() - began, time.process_time() - began_processor
        record = {
            "figure": name,
            "source": (FIGURES[name].__doc__ or "").strip().partition("\n")[0],
            "numbers": [number._asdict() for number in figure.numbers],
            "note": figure.note,
            "seed": SEED,
            "commit": commit,
            "dirty": dirty,
            "versions": versions(),
            "machine": machine(),
            "seconds": round(seconds, 1),
            "processor_seconds": round(processor_seconds, 1),
        }
        table = io.StringIO()
        csv.writer(table, lineterminator="\n").writerows(
            [("curve", "x", "y"), *((curve, x, f"{y:.6g}") for curve, x, y in figure.curves)]
        )
        draw(figure, folder / f"{name}.png")
        write_text(folder / f"{name}.csv", table.getvalue())
        write_json(folder / f"{name}.json", record)
        print(f"{name}: {seconds:.0f} s, {processor_seconds:.0f} s of them of the processor")
        for number in figure.numbers:
            print(f"  {number.what}: {number.ours}  (textbook: {number.textbook})")
    write_text(folder / "README.md", page(folder))


def page(folder: Path) -> str:
    """README.md: one table of all figures' numbers, the plots, and where each was made."""
    records = [
        read_json(folder / f"{name}.json", "numbers", "commit", "versions", "machine")
        for name in FIGURES
        if (folder / f"{name}.json").exists()
    ]
    lines = [
        "# The textbook's tabular figures\n",
        'Sutton & Barto (2018), "Reinforcement Learning: An Introduction", 2nd edition. It prints few numbers: '
        "those here are read from its figures and text.\n",
        "| number | ours | textbook |",
        "|---|---|---|",
    ]
    for record in records:
        lines += [f"| {n['what']} | {n['ours']} | {n['textbook']} |" for n in record["numbers"]]
    lines += ["", *(f"{record['note']}\n" for record in records if record.get("note"))]
    lines += ["Made by `python benchmarks/tabular.py`; one of them: `--only <figure>`.\n"]
    lines += [f"![{record['figure']}]({record['figure']}.png)" for record in records]
    lines += [
        "",
        "Seconds are by the clock, whatever else the machine did; the processor's own are beside them where noted.\n",
        "| figure | source | seconds | processor | commit | versions | machine |",
        "|---|---|---|---|---|---|---|",
    ]
    for record in records:
        commit = f"{(record['commit'] or 'none')[:12]}{' (modified)' if record['dirty'] else ''}"
        made_with = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
        where, seconds = record["machine"], f"{record['seconds']:.0f} | {record.get('processor_seconds', '-')}"
        lines.append(
            f"| {record['figure']} | {record['source']} | {seconds} | {commit} | {made_with} "
            f"| {where['cpu']}, {where['cores']} cores, {where['system']} |"
        )
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="benchmarks/tabular.py", description="The textbook's tabular figures.")
    parser.add_argument("--only", nargs="+", metavar="FIGURE", help=f"some of {', '.join(FIGURES)}; default all")
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="published results; default results/")
    args = parser.parse_args(argv)
    with usage_errors():
        names = args.only or list(FIGURES)
        for name in names:
            if name not in FIGURES:
                raise ValueError(f"--only {name}: there is {', '.join(FIGURES)}")
        torch.set_num_threads(1)
        make(names, args.results.resolve() / "tabular")
    return 0


if __name__ == "__main__":
    sys.exit(main())
