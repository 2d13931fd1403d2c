"""Trained policies: save, load, evaluate, record a video.

A policy is a folder of two files: `policy.safetensors` (weights and observation statistics) and `card.json` (how to
build it, where it comes from, what it scored). Nothing in them is ever executed: a card whose environment is of a
module of its own ("my_env:My-v0") is refused until you have imported that module yourself (`--import my_env`).

    python -m cleanrl_zoo.zoo list
    python -m cleanrl_zoo.zoo evaluate ppo_continuous/Hopper-v4 --episodes 10 --seed 0
    python -m cleanrl_zoo.zoo video ppo_continuous/Hopper-v4 --out hopper.mp4
"""

import argparse
import difflib
import hashlib
import importlib
import json
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import safetensors
import safetensors.torch
import torch
from gymnasium.envs.registration import load_env_creator
from torch import Tensor, nn

from cleanrl_zoo.core.distributions import SquashedGaussian
from cleanrl_zoo.envs import EVAL_STREAM, ObsNormalizer, VecEnv, make_vec, run_episodes
from cleanrl_zoo.envs.tabular import one_number
from cleanrl_zoo.envs.vec import env_seeds, quiet_mujoco
from cleanrl_zoo.nn.cnn import nature_cnn
from cleanrl_zoo.nn.heads import squashed_gaussian
from cleanrl_zoo.nn.mlp import mlp
from cleanrl_zoo.nn.table import Table

LONGEST_VIDEO = 10_000  # steps of an episode that nothing else ends
DISTRIBUTIONS = ("diag_gaussian", "squashed_gaussian", "categorical")
BUILDERS: dict[str, Callable[[dict[str, Any]], nn.Module]] = {
    "mlp": lambda spec: mlp(spec["sizes"], spec["activation"]),
    "table": lambda spec: Table(*spec["sizes"]),
    "nature_cnn": lambda spec: nn.Sequential(
        nature_cnn(spec["obs_shape"], spec["channels"], spec["sizes"][0]), mlp(spec["sizes"], spec["activation"])
    ),
}


class Policy(nn.Module):
    """A policy: normalise → network → action. What `load` returns is frozen.

    `spec` is the card's entry "policy":
    `{"builder": "mlp", "sizes": [11, 64, 64, 3], "activation": "tanh", "distribution": "diag_gaussian",
    "action_low": [...], "action_high": [...]}`; a categorical policy has no bounds; a "squashed_gaussian" has
    "log_std_bounds" [lowest, highest] too, and sizes end in two numbers per action (`nn.heads.squashed_gaussian`); with
    "log_std": "clipped" the second is cut off at those bounds, not "stretched" into them.
    The builder "table" has "sizes" [states, actions]: a row per state, of which the largest number is the action.
    The builder "nature_cnn" reads frames of "obs_shape" [C, H, W] with "channels" filters; "sizes" are then those of
    its features and of the actions.
    """

    def __init__(
        self,
        spec: dict[str, Any],
        network: nn.Module,
        log_std: Tensor | None = None,
        obs_norm: ObsNormalizer | None = None,
        card: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.spec, self.card = spec, card or {}
        self.network, self.obs_norm = network, obs_norm
        self.log_std = None if log_std is None else nn.Parameter(log_std.detach())  # [A]

    @torch.inference_mode()
    def act(self, obs: np.ndarray, generator: torch.Generator | None = None) -> np.ndarray:
        """Actions [N, A] (or [N], categorical) for raw observations [N, ...].

        The deterministic action: the mean clipped to the box, the squashed mean, or the most likely category. With
        `generator`, a sample.
        """
        x = torch.as_tensor(obs, dtype=torch.float32)
        output = self.network(x if self.obs_norm is None else self.obs_norm(x))  # [N, A]
        if self.spec["distribution"] == "categorical":
            if generator is None:
                return output.argmax(-1).numpy()
            return torch.multinomial(output.softmax(-1), 1, generator=generator).squeeze(-1).numpy()
        if self.spec["distribution"] == "squashed_gaussian":
            bounds = (torch.tensor(self.spec[key]) for key in ("action_low", "action_high"))
            if self.spec.get("log_std") == "clipped":
                mean, log_std = output.chunk(2, -1)
                policy = SquashedGaussian(mean, log_std.clamp(*self.spec["log_std_bounds"]), *bounds)
            else:
                policy = squashed_gaussian(output, *bounds, *self.spec["log_std_bounds"])
            return (policy.mode() if generator is None else policy.sample(generator=generator)[0]).numpy()
        if generator is not None:
            output = output + self.log_std.exp() * torch.randn(output.shape, generator=generator)
        low, high = (np.asarray(self.spec[key], np.float32) for key in ("action_low", "action_high"))
        return np.clip(output.numpy(), low, high)

    @property
    def obs_shape(self) -> tuple[int, ...]:
        """Of one observation: () where states are numbered."""
        return () if self.spec["builder"] == "table" else tuple(self.spec.get("obs_shape", self.spec["sizes"][:1]))

    def predict(
        self, obs: np.ndarray, state: Any = None, episode_start: Any = None, deterministic: bool = True
    ) -> tuple[np.ndarray, Any]:
        """Actions and `state`, as Stable-Baselines3's `evaluate_policy` asks a model for them.

        obs [N, ...] gives actions [N, ...], one observation one action. Not deterministic: sampled with torch's global
        generator. `state` and `episode_start` are there for recurrent models, which these are not.
        """
        obs = np.asarray(obs)
        single = obs.shape == self.obs_shape
        actions = self.act(obs[None] if single else obs, None if deterministic else torch.default_generator)
        return (actions[0] if single else actions), state


def policy_spec(
    sizes: Sequence[int],
    activation: str,
    action_space: gymnasium.Space,
    log_std_bounds: tuple[float, float] | None = None,
) -> dict[str, Any]:
    """The card's entry "policy" of an `mlp` with these sizes: categorical over a Discrete space, else a diagonal
    Gaussian clipped to the Box, or, with `log_std_bounds`, one squashed into it."""
    spec = {"builder": "mlp", "sizes": list(sizes), "activation": activation}
    if isinstance(action_space, gymnasium.spaces.Discrete):
        return {**spec, "distribution": "categorical"}
    # JSON knows no infinity
    low, high = (np.nan_to_num(bound.astype(np.float32)).tolist() for bound in (action_space.low, action_space.high))
    spec |= {"action_low": low, "action_high": high}
    if log_std_bounds is not None:
        return {**spec, "distribution": "squashed_gaussian", "log_std_bounds": list(log_std_bounds)}
    return {**spec, "distribution": "diag_gaussian"}


def table_policy(rows: Tensor) -> Policy:
    """The categorical policy of a table [S, A]: action values, or log-probs."""
    spec = {"builder": "table", "sizes": list(rows.shape), "distribution": "categorical"}
    table = Table(*rows.shape)
    table.rows.copy_(rows)
    return Policy(spec, table)


def _num_actions(spec: dict[str, Any]) -> int:
    """A: the network's outputs, of which a squashed Gaussian has two per action."""
    return spec["sizes"][-1] // 2 if spec["distribution"] == "squashed_gaussian" else spec["sizes"][-1]


def save(folder: str | Path, *, policy: nn.Module, card: dict[str, Any]) -> None:
    """Writes `policy.safetensors` and `card.json` into `folder`, each through a temporary name.

    Args:
        policy: a `Policy`, or any module whose state dict has its names: `network.*`, `log_std`, `obs_norm.*`.
        card: at least `"env"` (the environment's id) and `"policy"` (see `Policy`).

    Raises:
        ValueError: if the card does not describe the tensors, so that `load` could not rebuild the policy.
    """
    folder = Path(folder)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in policy.state_dict().items()}
    _rebuild(card, tensors, str(folder))
    data = safetensors.torch.save(tensors)
    # the hash ties the two files together: a copy that mixes two policies is refused by load
    card = {**card, "sha256": hashlib.sha256(data).hexdigest()}
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("policy.safetensors", data), ("card.json", json.dumps(card, indent=1).encode() + b"\n")):
        with _temporary(folder / name) as temporary:
            temporary.write_bytes(content)


def load(folder: str | Path) -> Policy:
    """The policy saved in `folder`, frozen, on the CPU; its card is `policy.card`.

    Raises:
        ValueError: one line, if the folder holds no policy, a damaged one, or one this version cannot build.
    """
    folder = Path(folder)
    card = read_card(folder)
    try:
        data = (folder / "policy.safetensors").read_bytes()
        tensors = safetensors.torch.load(data)
    except OSError as error:
        raise ValueError(f"{folder}: policy.safetensors cannot be read ({error.strerror})") from None
    except safetensors.SafetensorError as error:
        raise ValueError(f"{folder}: policy.safetensors is damaged ({error})") from None
    if hashlib.sha256(data).hexdigest() != card.get("sha256"):
        raise ValueError(f"{folder}: policy.safetensors is not the file that card.json was written with")
    return _rebuild(card, tensors, str(folder))


def read_card(folder: Path) -> dict[str, Any]:
    """The card in `folder`; ValueError (one line) if there is none or it is no card."""
    try:
        card = json.loads((folder / "card.json").read_text())
    except OSError:
        raise ValueError(f"{folder}: no policy here (card.json and policy.safetensors are expected)") from None
    except ValueError as error:
        raise ValueError(f"{folder}: card.json is damaged ({error})") from None
    if not isinstance(card, dict) or not isinstance(card.get("env"), str) or not isinstance(card.get("policy"), dict):
        raise ValueError(f'{folder}: card.json is not a policy\'s card (it must name "env" and "policy")')
    provenance, scored = card.get("provenance", {}), card.get("final_eval")
    known = scored is None or (
        isinstance(scored, dict)
        and isinstance(scored.get("mean"), int | float)
        and isinstance(scored.get("returns"), list)
        and all(isinstance(value, int | float) for value in scored["returns"])
    )
    for name, right in (
        ("env_kwargs", isinstance(card.get("env_kwargs") or {}, dict)),
        ("provenance", isinstance(provenance, dict) and isinstance(provenance.get("env", {}), dict)),
        ("final_eval", known),
    ):
        if not right:
            raise ValueError(f'{folder}: card.json is not a policy\'s card (its "{name}" is of another form)')
    return card


def _rebuild(card: dict[str, Any], tensors: dict[str, Tensor], where: str) -> Policy:
    """The policy that `card` describes, filled with `tensors`; every name and shape must match."""
    spec = card.get("policy", {})
    for key, known in (("builder", BUILDERS), ("distribution", DISTRIBUTIONS)):
        if not isinstance(spec.get(key), str) or spec[key] not in known:
            raise ValueError(f"{where}: policy {key} {spec.get(key)!r}: known here are {', '.join(known)}")
    try:
        network = BUILDERS[spec["builder"]](spec)
        gaussian, squashed = (spec["distribution"] == name for name in ("diag_gaussian", "squashed_gaussian"))
        bounded = gaussian or squashed
        if bounded and not len(spec["action_low"]) == len(spec["action_high"]) == _num_actions(spec):
            raise ValueError("action_low and action_high need one bound per action")
        if squashed and len(spec["log_std_bounds"]) != 2:
            raise ValueError("log_std_bounds needs the lowest and the highest")
        if spec.get("log_std", "stretched") not in ("stretched", "clipped"):
            raise ValueError(f"log_std {spec['log_std']!r}: known here are stretched, clipped")
        obs_norm = ObsNormalizer(tuple(tensors["obs_norm.mean"].shape)) if "obs_norm.mean" in tensors else None
        policy = Policy(spec, network, torch.zeros(spec["sizes"][-1]) if gaussian else None, obs_norm, card)
        policy.load_state_dict(tensors)
        policy.requires_grad_(False).eval()
    except KeyError as error:
        raise ValueError(f"{where}: the card's policy lacks {error}") from None
    except (ValueError, TypeError, RuntimeError) as error:
        detail = " ".join(str(error).split())
        raise ValueError(f"{where}: card and tensors do not describe one policy: {detail}") from None
    return policy


@contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """A name beside `path` that becomes `path` on success and is removed on failure."""
    temporary = path.with_name(f".writing-{path.name}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def zoo_folder() -> Path:
    """The committed policies: `results/zoo` under the working directory, else under this repository."""
    local = Path("results/zoo")
    return local if local.is_dir() else Path(__file__).resolve().parents[1] / "results" / "zoo"


def find(name: str) -> Path:
    """The folder of a policy named by its path, by a run folder's path, or by `<algorithm>/<env>` in the zoo.

    Raises:
        ValueError: one line; names the nearest policies of the zoo.
    """
    for folder in (Path(name), Path(name) / "policy", zoo_folder() / name):
        if (folder / "card.json").exists():
            return folder
    for folder in (Path(name), Path(name) / "policy", zoo_folder() / name):
        if (folder / "config.json").exists():
            raise ValueError(f"{folder}: a language model; transformers loads it, algos/grpo.py --model trains it on")
    if (Path(name) / "model" / "model.json").exists():
        raise ValueError(f"{name}: a planner's run, which has a model and no policy; see benchmarks/world_model.py")
    if (Path(name) / "run.json").exists():
        raise ValueError(f"{name}: this run has saved no policy yet; it does when it ends (continue it with --resume)")
    if Path(name).is_dir():
        raise ValueError(f"{name}: no policy here (card.json and policy.safetensors are expected)")
    names = [str(folder.relative_to(zoo_folder())) for folder in committed()]
    nearest = difflib.get_close_matches(name, names, n=3, cutoff=0.3) or names[:3]
    hint = f"the nearest in the zoo: {', '.join(nearest)}" if nearest else f"the zoo ({zoo_folder()}) is empty"
    raise ValueError(f"{name}: neither a folder nor a policy of the zoo; {hint}")


def committed() -> list[Path]:
    """Folders of the zoo, `<algorithm>/<env>`, sorted."""
    return sorted(path.parent for path in zoo_folder().glob("*/*/card.json"))


def _evaluation_envs(policy: Policy, episodes: int, seed: int) -> VecEnv:
    """The environments of the policy's own evaluation: the engine and the arguments that its card names."""
    card = policy.card
    _check_imported(card["env"])
    engine = card.get("provenance", {}).get("env", {}).get("engine", "auto")
    envs = make_vec(card["env"], episodes, seed, engine, EVAL_STREAM, env_kwargs=card.get("env_kwargs"))
    try:
        _check_spaces(policy, envs.single_observation_space, envs.single_action_space)
    except ValueError:
        envs.close()
        raise
    return envs


def evaluate(policy: Policy, episodes: int = 10, seed: int = 0) -> np.ndarray:
    """Raw returns [episodes] of the deterministic policy, one fresh evaluation environment each, statistics frozen.

    Raises:
        ValueError: one line, if the environment cannot be made or is not the one the policy was trained on.
    """
    envs = _evaluation_envs(policy, episodes, seed)
    try:
        return run_episodes(envs, policy.act)[0]
    finally:
        envs.close()


def _check_imported(env_id: str) -> None:
    """Raises ValueError for an environment of a module that nobody has imported: a card must not run its code."""
    module = env_id.rpartition(":")[0]
    if module and module not in sys.modules:
        raise ValueError(
            f"{env_id}: would import the module {module} and run its code; if you trust it, import it first "
            f"(--import {module})"
        )


def _spec(env_id: str) -> gymnasium.envs.registration.EnvSpec:
    """What is registered under `env_id`, whose module, if it names one, has been imported."""
    return gymnasium.spec(env_id.rpartition(":")[2])


def _check_spaces(policy: Policy, obs_space: gymnasium.Space, action_space: gymnasium.Space) -> None:
    if policy.spec["builder"] == "table" and isinstance(obs_space, gymnasium.spaces.Discrete):
        seen, expected, shown = int(obs_space.n), policy.spec["sizes"][0], f"{obs_space.n} states"
    else:
        seen, expected = obs_space.shape, policy.obs_shape
        shown = f"observations {seen}"
    actions = (
        action_space.n if isinstance(action_space, gymnasium.spaces.Discrete) else int(np.prod(action_space.shape))
    )
    if seen != expected or actions != _num_actions(policy.spec):
        raise ValueError(
            f"{policy.card['env']} has {shown} and {actions} actions, "
            f"the policy {expected} and {_num_actions(policy.spec)}: it was trained on another environment"
        )


def record(policy: Policy, out: str | Path, episodes: int = 1, seed: int = 0) -> list[float]:
    """Writes a real-time video of the deterministic policy and returns the raw return of each episode.

    Episode k starts as episode k of `evaluate` with the same seed. The suffix of `out` is the format: .mp4 or .gif.
    A policy that acts on frames is shown those, each pixel as 4 × 4, at 15 a second (60 screens, every fourth seen).
    Another policy's episode is cut after 10,000 steps where the environment has no time limit.

    Raises:
        ValueError: one line, for another suffix, a missing folder, a missing library, or if nothing can render.
    """
    out, env_id = Path(out), policy.card["env"]
    if out.suffix not in (".mp4", ".gif"):
        raise ValueError(f"--out {out}: the name must end in .mp4 or .gif")
    if not out.parent.is_dir():
        raise ValueError(f"--out {out}: the folder {out.parent} does not exist")
    writer = _mp4 if out.suffix == ".mp4" else _gif
    if "obs_shape" in policy.spec:
        returns = [0.0] * episodes
        envs = _evaluation_envs(policy, episodes, seed)
        try:
            with _temporary(out) as temporary:
                writer(temporary, _frames_seen(policy, envs, returns), 15)
        finally:
            envs.close()
        return returns
    _check_imported(env_id)
    spec = _spec(env_id)
    longest = LONGEST_VIDEO if spec.max_episode_steps is None else math.inf  # steps
    creator = spec.entry_point
    creator = load_env_creator(creator) if isinstance(creator, str) else creator
    modes = getattr(creator, "metadata", {}).get("render_modes")
    if modes is not None and "rgb_array" not in modes:
        raise ValueError(f"{env_id} has no picture to film: its render modes are {modes}, rgb_array is needed")
    os.environ.update(find_renderer(env_id))
    with quiet_mujoco():
        env = one_number(gymnasium.make(env_id, render_mode="rgb_array"))
    print(f"recording {episodes} episode(s); software rendering takes up to a minute each", file=sys.stderr)
    try:
        _check_spaces(policy, env.observation_space, env.action_space)
        fps = env.metadata.get("render_fps", 30)
        stride = max(1, round(fps / 30))  # MuJoCo's 125 frames per second are more than a screen shows
        returns = [0.0] * episodes

        def frames() -> Iterator[np.ndarray]:
            for episode, env_seed in enumerate(env_seeds(seed, EVAL_STREAM, episodes)):
                obs, _ = env.reset(seed=env_seed)
                done, step = False, 0
                while not done and step < longest:
                    if step % stride == 0:
                        yield env.render()
                    action = policy.act(np.asarray(obs)[None])[0]
                    obs, reward, terminated, truncated, _ = env.step(action)
                    returns[episode] += float(reward)
                    done, step = terminated or truncated, step + 1
                yield env.render()

        with _temporary(out) as temporary:
            writer(temporary, frames(), fps / stride)
    finally:
        env.close()
    return returns


def _frames_seen(policy: Policy, envs: VecEnv, returns: list[float]) -> Iterator[np.ndarray]:
    """The newest frame of each observation of episode 0, then of episode 1, and so on; fills in their `returns`."""

    def shown(frame: np.ndarray) -> np.ndarray:
        return np.repeat(frame.repeat(4, 0).repeat(4, 1)[..., None], 3, 2)

    for episode in range(envs.num_envs):
        obs, done = envs.reset(), False
        while not done:
            yield shown(obs[episode, -1])
            step = envs.step(policy.act(obs))
            obs, done = step.obs, bool(step.terminated[episode] or step.truncated[episode])
        returns[episode] = float(step.episode_return[episode])
        yield shown(step.final_obs[episode, -1])


def _mp4(path: Path, frames: Iterator[np.ndarray], fps: float) -> None:
    try:
        import imageio.v2 as imageio
        import imageio_ffmpeg  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"--out: MP4 needs {error.name}: pip install -c constraints.txt -e '.[video]' (or name a .gif)"
        ) from None
    # H.264 needs even sides; macro_block_size=2 resizes only odd ones
    with imageio.get_writer(path, format="FFMPEG", fps=fps, codec="libx264", macro_block_size=2) as writer:
        for frame in frames:
            writer.append_data(frame)


def _gif(path: Path, frames: Iterator[np.ndarray], fps: float) -> None:
    try:
        from PIL import Image
    except ImportError:
        raise ValueError("--out: GIF needs pillow: pip install -c constraints.txt -e '.[video]'") from None
    # one palette per frame, no dithering: a third of the size
    images = [Image.fromarray(f).quantize(128, dither=Image.Dither.NONE) for f in frames]
    images[0].save(path, save_all=True, append_images=images[1:], duration=1000 / fps, loop=0)


PROBE = """
import sys, gymnasium
from cleanrl_zoo.envs.vec import quiet_mujoco
with quiet_mujoco():
    env = gymnasium.make(sys.argv[1], render_mode="rgb_array")
env.reset(seed=0)
env.render()[0]
"""


def find_renderer(env_id: str) -> dict[str, str]:
    """The environment variables under which `env_id` renders off-screen on this machine.

    OpenGL's backend is fixed at its first import, so each candidate is tried in a process of its own. A MUJOCO_GL that
    the user has set is the only candidate.

    Raises:
        ValueError: one line that names what was tried and the packages that would help.
    """
    entry_point = str(_spec(env_id).entry_point)
    candidates: list[dict[str, str]] = [{"SDL_VIDEODRIVER": "dummy"}]
    if "mujoco" in entry_point:
        backends = [os.environ["MUJOCO_GL"]] if os.environ.get("MUJOCO_GL") else ["egl", "osmesa", "glfw"]
        candidates = [{"MUJOCO_GL": backend} for backend in backends]
    errors = []
    for variables in candidates:
        command = [sys.executable, "-W", "ignore", "-c", PROBE, env_id]
        try:
            probe = subprocess.run(
                command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=120
            )
        except subprocess.TimeoutExpired:
            errors.append(f"{variables}: no frame within 120 s")
            continue
        if probe.returncode == 0:
            return variables
        last = (probe.stderr.strip().splitlines() or [f"exit code {probe.returncode}"])[-1]
        errors.append(f"{'='.join(next(iter(variables.items())))}: {last}")
    hint = ""
    if "mujoco" in entry_point:
        hint = "; on Debian or Ubuntu `apt-get install libegl1 libgl1` (EGL) or `libosmesa6` (OSMesa) helps"
    raise ValueError(f"{env_id} cannot be rendered off-screen here: {'; '.join(errors)}{hint}")


def _table() -> str:
    """The committed policies, a line each; a damaged one is listed with what is wrong."""
    rows = [("policy", "steps", "seed", "evaluation", "episodes")]
    for folder in committed():
        name = str(folder.relative_to(zoo_folder()))
        try:
            card = load(folder).card
        except ValueError as error:
            rows.append((name, str(error), "", "", ""))
            continue
        returns = np.asarray((card.get("final_eval") or {}).get("returns", []))
        score = f"{returns.mean():.1f} ± {returns.std():.1f}" if len(returns) else "-"
        rows.append((name, str(card.get("global_step", "-")), str(card.get("seed", "-")), score, str(len(returns))))
    if len(rows) == 1:
        return f"no policies in {zoo_folder()}"
    widths = [max(len(row[i]) for row in rows if row[2]) for i in range(5)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except Exception as error:  # whatever a user's module does
        raise ValueError(f"--import {module}: {type(error).__name__}: {error}") from None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: {message}\n")


def main(argv: list[str] | None = None) -> int:
    """The command line; a user's mistake is one line on stderr and exit code 2."""
    parser = _Parser(prog="python -m cleanrl_zoo.zoo", description="Trained policies: list, evaluate, record a video.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the committed policies")
    for name, text in (
        ("evaluate", "returns of the deterministic policy"),
        ("video", "record the deterministic policy"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("policy", help="a run folder, a policy's folder, or <algorithm>/<env> of the zoo")
        command.add_argument(
            "--episodes", type=int, default=10 if name == "evaluate" else 1, help="default %(default)s"
        )
        command.add_argument("--seed", type=int, default=0, help="of the environments, default %(default)s")
        command.add_argument("--import", dest="module", help="module that registers the environment, which you trust")
        if name == "video":
            command.add_argument("--out", required=True, help="file to write, .mp4 or .gif")
    args = parser.parse_args(argv)
    try:
        if args.command == "list":
            print(_table())
            return 0
        if args.episodes < 1 or args.seed < 0:
            raise ValueError("--episodes must be at least 1 and --seed at least 0")
        if args.module is not None:
            _import(args.module)
        torch.set_num_threads(1)  # as in training: another number rounds differently, and is slower here
        policy = load(find(args.policy))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Gymnasium's word on older task versions
            if args.command == "evaluate":
                returns = np.asarray(evaluate(policy, args.episodes, args.seed))
            else:
                returns = np.asarray(record(policy, args.out, args.episodes, args.seed))
    except (ValueError, OSError, gymnasium.error.Error) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 2
    if args.command == "video":
        print(f"{args.out}: {args.episodes} episode(s), return {', '.join(f'{r:.1f}' for r in returns)}")
        return 0
    score = f"{returns.mean():.1f} ± {returns.std():.1f}"
    print(f"{policy.card['env']}: {score} over {args.episodes} episodes (seed {args.seed})")
    if known := policy.card.get("final_eval"):
        of = f"{len(known['returns'])} episodes, seed {policy.card.get('seed', 'not stated')}"
        print(f"the card says: {known['mean']:.1f} ± {np.std(known['returns']):.1f} ({of})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
