"""One vector interface over every engine.

All engines reset an ended environment within the same step: `VecStep.obs` is then the first observation of the next
episode and `VecStep.final_obs` the true last one of the ended episode. Every step is thus a real transition, and a
value at a truncation has the right observation to bootstrap from.
"""

import sys
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, NamedTuple, Protocol

import gymnasium
import numpy as np

TRAIN_STREAM = 0  # environments that are learned from
EVAL_STREAM = 1  # environments that are only measured on


class VecStep(NamedTuple):
    """What one step of N environments gave.

    The arrays are never written again by a later call. Where no environment ended, `final_obs` and `obs` may be the
    same array.
    """

    obs: np.ndarray  # [N, ...] to act on next
    final_obs: np.ndarray  # [N, ...] the true successor of every transition; == obs where nothing ended
    reward: np.ndarray  # float64 [N], raw
    terminated: np.ndarray  # bool [N], end of the MDP
    truncated: np.ndarray  # bool [N], cut by a time limit
    episode_return: np.ndarray  # float64 [N], raw sum of the episode so far, this step included
    episode_length: np.ndarray  # int64 [N], steps of the episode so far, this step included


class VecEnv(Protocol):
    """What every engine offers; see `make_vec`."""

    env_id: str
    engine: str  # "gymnasium", "mujoco", "atari" or "tabular"
    num_envs: int
    single_observation_space: gymnasium.Space
    single_action_space: gymnasium.Space
    max_episode_steps: int | None
    exact_state: bool
    cut_episodes: int

    def reset(self) -> np.ndarray: ...
    def step(self, actions: np.ndarray) -> VecStep: ...
    def pop_episodes(self) -> list[tuple[float, int]]: ...
    def cut(self, global_step: int) -> np.ndarray: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...
    def versions(self) -> dict[str, str]: ...
    def close(self) -> None: ...


def env_seeds(seed: int, stream: int, num_envs: int, global_step: int | None = None) -> list[int]:
    """One 64-bit seed per environment, from `SeedSequence((seed, stream, env))`: runs with neighbouring seeds share
    no environment's stream. `global_step` gives the seeds of the episodes that start at a cut there."""
    tail = () if global_step is None else (global_step,)
    keys = ((seed, stream, env, *tail) for env in range(num_envs))
    return [int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0]) for key in keys]


def generators(seeds: list[int]) -> list[np.random.Generator]:
    """One generator per environment, from `env_seeds`."""
    return [np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed))) for seed in seeds]


def restored_generators(states: list[dict[str, Any]]) -> list[np.random.Generator]:
    """Generators that go on from their saved `bit_generator.state`s."""
    found = generators([0] * len(states))
    for generator, state in zip(found, states, strict=True):
        generator.bit_generator.state = state
    return found


def check_state(state: dict[str, Any], num_envs: int) -> None:
    """Raises ValueError unless `state` was saved by as many environments."""
    saved = len(state["elapsed"])
    if saved != num_envs:
        raise ValueError(f"the saved state has {saved} environments, this run has {num_envs}; use num_envs {saved}")


def seed_action_space(space: gymnasium.Space, seed: int, stream: int) -> None:
    """Seeds `space.sample()` from (seed, stream), apart from every environment's stream."""
    # a spawn key, since SeedSequence((a, b)) and SeedSequence((a, b, 0)) are one and the same stream
    sequence = np.random.SeedSequence((seed, stream), spawn_key=(0,))
    space.seed(int(sequence.generate_state(1, np.uint32)[0]))


_unstable: deque[str] = deque(maxlen=100)  # messages of MuJoCo about simulations that blew up


@contextmanager
def quiet_mujoco() -> Iterator[None]:
    """Loads MuJoCo models without its notes on deprecated XML, on stderr and in MUJOCO_LOG.TXT; what MuJoCo reports
    later, while it simulates, is collected for `unstable_simulations` instead of being written there."""
    mujoco = sys.modules.get("mujoco")
    if mujoco is None:
        try:
            import mujoco
        except ImportError:
            yield
            return
    handler = mujoco.get_mju_user_warning()
    mujoco.set_mju_user_warning(None)
    config = mujoco.MjLogConfig.get()
    console, file = config.logto_console, config.logto_file
    config.logto_console = config.logto_file = False
    config.set()
    try:
        yield
    finally:
        config.logto_console, config.logto_file = console, file
        config.set()
        mujoco.set_mju_user_warning(handler or _unstable.append)


def unstable_simulations() -> None:
    """Turns what MuJoCo reported since the last call into a `RuntimeWarning`; MuJoCo has then reset that simulation
    to its model's initial state, within its episode."""
    while _unstable:
        warnings.warn(f"MuJoCo: {_unstable.popleft()}", RuntimeWarning, stacklevel=3)


def make_vec(
    env_id: str,
    num_envs: int,
    seed: int,
    vec: str = "auto",
    stream: int = TRAIN_STREAM,
    threads: int = 0,
    env_kwargs: dict[str, Any] | None = None,
) -> VecEnv:
    """Makes `num_envs` environments behind one interface.

    Args:
        env_id: a name registered with Gymnasium ("Hopper-v4", "ALE/Pong-v5"), "module:Name-v0" to import its module
            first, or a probe ("probe/Loop-v0").
        num_envs: N, at least 1.
        seed: non-negative; environment `i` is seeded from `SeedSequence((seed, stream, i))`.
        vec: "gymnasium" for `SyncVectorEnv`; "mujoco" for the batch engine (the tasks of `mujoco_tasks.TASKS`);
            "atari" for ale-py's vector engine with the usual preprocessing ("ALE/..."); "tabular" for worlds whose
            exact model is known (`tabular.WORLDS`, Gymnasium's FrozenLake, CliffWalking, Taxi); "auto" for that of
            the last three that has the task, where `env_kwargs` asks for nothing special.
        stream: TRAIN_STREAM or EVAL_STREAM, so that evaluation never shares random numbers with training.
        threads: simulation threads of the batch engines (MuJoCo's: the calling one included); 0 for one per core.
        env_kwargs: passed to `gymnasium.make`; MuJoCo's batch engine takes `max_episode_steps` only, Atari's the
            arguments of `AtariVec`.

    Raises:
        ValueError: with one line that says what was given and what is allowed.
    """
    env_kwargs = dict(env_kwargs or {})
    if env_kwargs.get("max_episode_steps", 0) is None:  # Gymnasium's own default
        del env_kwargs["max_episode_steps"]
    limit = env_kwargs.get("max_episode_steps", 1)
    bounds = (("num_envs", num_envs, 1), ("seed", seed, 0), ("threads", threads, 0), ("max_episode_steps", limit, 1))
    for name, value, low in bounds:
        if value < low:
            raise ValueError(f"{name} is {value}, must be at least {low}")
    if vec not in ("auto", "gymnasium", "mujoco", "atari", "tabular"):
        raise ValueError(f"vec is {vec!r}, must be auto, gymnasium, mujoco, atari or tabular")
    _check_registered(env_id)
    if vec == "atari" or (vec == "auto" and env_id.startswith("ALE/")):
        from cleanrl_zoo.envs.atari import KWARGS, AtariVec

        special = sorted(env_kwargs.keys() - KWARGS)
        if not env_id.startswith("ALE/"):
            raise ValueError(f"vec is atari, which has no {env_id}, only names that begin with ALE/; use vec gymnasium")
        if not special:
            return AtariVec(env_id, num_envs, seed, stream, threads, **env_kwargs)
        if vec == "atari":
            raise ValueError(f"vec is atari, which takes no env_kwargs {', '.join(special)}; use vec gymnasium")
    elif vec not in ("gymnasium", "tabular"):
        from cleanrl_zoo.envs.mujoco_tasks import TASKS

        special = sorted(env_kwargs.keys() - {"max_episode_steps"})
        if env_id in TASKS and not special:
            from cleanrl_zoo.envs.mujoco_vec import MujocoVec

            return MujocoVec(env_id, num_envs, seed, stream, threads, **env_kwargs)
        if vec == "mujoco" and special:
            raise ValueError(f"vec is mujoco, which takes no env_kwargs {', '.join(special)}; use vec gymnasium")
        if vec == "mujoco":
            raise ValueError(f"vec is mujoco, which has no {env_id}, only {', '.join(TASKS)}; use vec gymnasium")
    from cleanrl_zoo.envs.gymnasium_vec import GymnasiumVec
    from cleanrl_zoo.envs.tabular import TabularVec, tabular_world

    try:
        world = None if vec == "gymnasium" else tabular_world(env_id, env_kwargs)
        if world is not None:
            limit = env_kwargs.get("max_episode_steps", gymnasium.registry[env_id].max_episode_steps)
            return TabularVec(env_id, num_envs, seed, stream, world, limit)
        if vec == "tabular":
            raise ValueError(f"{env_id} has no model that is known, which vec tabular needs; use vec gymnasium")
        return GymnasiumVec(env_id, num_envs, seed, stream, env_kwargs)
    except Exception as error:  # whatever a registered environment does while it is made
        if str(error).startswith(env_id):  # said by GymnasiumVec itself
            raise
        box2d = env_id in gymnasium.registry and "box2d" in str(gymnasium.registry[env_id].entry_point)
        if box2d and isinstance(error, (gymnasium.error.DependencyNotInstalled, ImportError)):
            raise ValueError(
                f"{env_id} needs a package that is not installed: pip install -c constraints.txt -e '.[box2d]'"
            ) from error
        kind = "" if isinstance(error, (gymnasium.error.Error, ImportError)) else f"{type(error).__name__}: "
        raise ValueError(f"{env_id} cannot be made: {kind}{str(error).strip().partition(chr(10))[0]}") from error


def _check_registered(env_id: str) -> None:
    """Raises unless Gymnasium knows the name, and names the nearest that it knows."""
    if ":" in env_id:  # gymnasium.make imports the module, which registers the name
        return
    if env_id.startswith("ALE/"):
        try:
            import ale_py
        except ImportError as error:
            raise ValueError(
                f"{env_id} needs a package that is not installed: pip install -c constraints.txt -e '.[atari]'"
            ) from error
        gymnasium.register_envs(ale_py)
    # names whose entry point only raises are Gymnasium's placeholders for tasks that it has dropped
    placeholder = lambda spec: getattr(spec.entry_point, "__name__", "").startswith("_raise")  # noqa: E731
    known = [name for name, spec in gymnasium.registry.items() if not placeholder(spec)]
    if env_id in known:
        return
    by_lower = {name.lower(): name for name in known}
    near = [by_lower[name] for name in get_close_matches(env_id.lower(), by_lower, n=4, cutoff=0.5)]
    hint = f"nearest: {', '.join(near)}" if near else "gymnasium.registry lists the names"
    raise ValueError(f"unknown environment {env_id!r}, {hint}")
