"""Helpers of the tests of algorithm files: run one in this process or in another, and compare two runs."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent.parent


def load_algorithm(name: str) -> ModuleType:
    """The module algos/<name>.py."""
    path = ROOT / "algos" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def run_file(name: str, *flags: str, cwd: Path, timeout: float = 120) -> subprocess.CompletedProcess:
    """`python algos/<name>.py flags...` in `cwd`, as a user would start it."""
    return subprocess.run(
        command(name, *flags), cwd=cwd, env=environment(), capture_output=True, text=True, timeout=timeout
    )


def command(name: str, *flags: str) -> list[str]:
    return [sys.executable, str(ROOT / "algos" / f"{name}.py"), *flags]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def rows_without_clock(run_dir: Path) -> list[dict]:
    """The log without the wall-clock tags, which stand outside every comparison."""
    from cleanrl_zoo.run.metrics import WALL_CLOCK_TAGS

    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(WALL_CLOCK_TAGS)} for line in lines]


def final_checkpoint(run_dir: Path) -> dict:
    """The last checkpoint as {path: value}, tensors as bytes, without the seconds."""
    from cleanrl_zoo.run.checkpoint import list_checkpoints, load_checkpoint

    flat: dict = {}

    def walk(value, path):
        if isinstance(value, dict):
            for key, item in value.items():
                walk(item, f"{path}/{key}")
        elif isinstance(value, list):
            for index, item in enumerate(value):
                walk(item, f"{path}/{index}")
        elif hasattr(value, "numpy"):
            flat[path] = value.numpy().tobytes()
        else:
            flat[path] = value.tobytes() if hasattr(value, "tobytes") else value

    walk(load_checkpoint(list_checkpoints(run_dir / "checkpoints")[-1]), "")
    for clock in ("/run/seconds", "/run/log_bytes"):  # the log's length depends on the digits of its wall-clock tags
        flat.pop(clock)
    return flat


def assert_same_run(first: Path, second: Path) -> None:
    """Parameters, optimizer, scales, generators, environments, curve, evaluation and policy are bit-equal."""
    assert rows_without_clock(first) == rows_without_clock(second)
    one, two = final_checkpoint(first), final_checkpoint(second)
    assert one.keys() == two.keys()
    assert [key for key in one if repr(one[key]) != repr(two[key])] == []
    summaries = [json.loads((d / "summary.json").read_text()) for d in (first, second)]
    for summary in summaries:
        del summary["wall_clock_s"], summary["steps_per_second"]
    assert summaries[0] == summaries[1]
    saved = [
        path.relative_to(first) for path in sorted(first.glob("*/*.safetensors"))
    ]  # the policy, or a planner's model
    assert saved and all((first / path).read_bytes() == (second / path).read_bytes() for path in saved)


def args_for(module: ModuleType, preset: str = "debug", **changes: Any) -> Any:
    """The checked flags of `--preset debug` with some changed: `num_envs=1`, `compile=True`, `hidden=(8, 8)`."""
    words = ["--preset", preset]
    for name, value in changes.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", *map(str, value if isinstance(value, tuple) else (value,))]
    return module.parse_args(module.Args, module.PRESETS, words)


def start(module: ModuleType, args: Any) -> tuple[Any, Any, Any]:
    """Environments, state and rollout store of an on-policy file, as its main makes them."""
    import gymnasium
    import torch

    envs = module.make_vec(args.env, args.num_envs, args.seed, args.vec, threads=1)
    state, space = module.TrainState.create(args, envs), envs.single_action_space
    obs_space = envs.single_observation_space
    obs_dtype = torch.uint8 if obs_space.dtype == "uint8" else torch.float32
    dtype = torch.int64 if isinstance(space, gymnasium.spaces.Discrete) else torch.float32
    shapes = obs_space.shape, space.shape
    return envs, state, module.Rollout.allocate(args.num_steps, args.num_envs, *shapes, obs_dtype, dtype)


def training_episodes(module: ModuleType, args: Any, minibatch_step: Any) -> list[tuple[float, int]]:
    """(return, length) of the episodes of a whole run of an on-policy file, in order."""
    envs, state, rollout = start(module, args)
    while state.global_step < args.total_timesteps:
        module.collect(state, envs, rollout, *acting(module), args)
        module.update(state, rollout, minibatch_step, args)
    return envs.pop_episodes()


def start_off_policy(module: ModuleType, args: Any) -> tuple[Any, Any]:
    """Environments and state of an off-policy file, as its main makes them."""
    envs = module.make_vec(args.env, args.num_envs, args.seed, args.vec, threads=1)
    return envs, module.TrainState.create(args, envs)


def acted_on(module: ModuleType, args: Any, number: Any) -> list[int]:
    """What each of five vector steps leaves to be acted on in the last environment, as `number(obs)` reads it."""
    envs, state = start_off_policy(module, args)
    found = []
    for _ in range(5):
        module.collect(state, envs, module.act, args)
        found.append(int(number(state.obs[-1])))
    return found


def train_off_policy(module: ModuleType, args: Any, act: Any = None, update_step: Any = None) -> tuple[Any, list[dict]]:
    """A whole run of an off-policy file without its log: the state at the end, and what each iteration that made
    updates reported."""
    envs, state = start_off_policy(module, args)
    metrics = []
    while state.global_step < args.total_timesteps:
        module.collect(state, envs, act or module.act, args)
        before = state.updates
        row = module.update(state, update_step or module.update_step, args)
        if state.updates > before:
            metrics.append({tag: float(value) for tag, value in row.items()})
    return state, metrics


def assert_as_recorded(path: Path, now: dict, rtol: float, atol: float | None = None) -> None:
    """A fingerprint {tag: values} or {label: {tag: values}} against the committed one.

    atol: by default `rtol` of a tag's largest value. Other instruction sets (SSE, AVX2, AVX-512) move these by up to
    5e-4 of it, another coefficient by more than 5e-2; the second bound also lets a ratio fall on the other side of the
    clip.
    """
    recorded = _flat(json.loads(path.read_text()))
    assert _flat(now).keys() == recorded.keys()
    for tag, values in recorded.items():
        bound = rtol * np.abs(values).max() if atol is None else atol
        np.testing.assert_allclose(_flat(now)[tag], values, rtol=rtol, atol=bound, err_msg=tag)


def _flat(table: dict) -> dict[str, list[float]]:
    return {
        f"{label} {tag}".strip(): values
        for label, row in table.items()
        for tag, values in (row.items() if isinstance(row, dict) else [("", row)])
    }


def acting(module: ModuleType) -> tuple[Any, ...]:
    """What `collect` of an on-policy file takes to act with: pixels have a function that may be compiled."""
    return (module.act,) if hasattr(module, "act") else ()


def train(module: ModuleType, args: Any, minibatch_step: Any = None, act: Any = None) -> tuple[Any, list[dict]]:
    """A whole run of an on-policy file without its log: the state at the end, and what each update reported."""
    envs, state, rollout = start(module, args)
    metrics = []
    while state.global_step < args.total_timesteps:
        module.collect(state, envs, rollout, *([act] if act else acting(module)), args)
        values = module.update(state, rollout, minibatch_step or module.minibatch_step, args)
        metrics.append({tag: float(value) for tag, value in values.items()})
    return state, metrics


def noted_steps(envs: Any) -> list[np.ndarray]:
    """The actions that `envs` will have been stepped with, a list that fills."""
    steps, step = [], envs.step

    def noted(actions: np.ndarray) -> Any:
        steps.append(actions.copy())
        return step(actions)

    envs.step = noted
    return steps
