"""MuJoCo tasks stepped as a batch: one `MjData` per environment, one thread or several, formulas over stacked arrays.

`mj_step` releases the interpreter lock, so environments are simulated in parallel by ordinary threads. The calling
thread and the workers take environments from one shared iterator until none is left: nobody waits for a slower half,
and a worker that the system has not woken in time costs nothing. Which thread simulates an environment has no
influence on its numbers.
"""

import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import mujoco
import numpy as np

from cleanrl_zoo.envs.mujoco_tasks import TASKS, Constants, Stack
from cleanrl_zoo.envs.vec import VecStep, check_state, env_seeds, quiet_mujoco, seed_action_space, unstable_simulations

_STATE = mujoco.mjtState.mjSTATE_INTEGRATION  # all that the next mj_step depends on, the solver's warm start included


class MujocoVec:
    """N environments of one task of `TASKS`. See `vec.VecEnv` for the interface and `make_vec` for the arguments."""

    engine = "mujoco"
    exact_state = True

    def __init__(
        self,
        env_id: str,
        num_envs: int,
        seed: int,
        stream: int,
        threads: int = 0,
        max_episode_steps: int | None = None,
    ):
        task = TASKS[env_id]
        self.env_id, self.num_envs = env_id, num_envs
        self.max_episode_steps = max_episode_steps or task.max_episode_steps
        self.cut_episodes = 0
        self._task, self._seed, self._stream = task, seed, stream

        assets = Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets"
        with quiet_mujoco():
            self._model = model = mujoco.MjModel.from_xml_path(str(assets / task.model_file))
        self._data = [mujoco.MjData(model) for _ in range(num_envs)]
        self._take = _taker(model, self._data, task.frame_skip, task.contact_forces)
        self._qpos0, self._qvel0 = self._data[0].qpos.copy(), self._data[0].qvel.copy()
        self._constants = Constants(dt=model.opt.timestep * task.frame_skip, body_mass=model.body_mass.copy())

        names = ("qpos", "qvel", *task.reads)
        shapes = {name: getattr(self._data[0], name).shape for name in names}
        self._before, self._after = Stack(num_envs, shapes), Stack(num_envs, shapes)
        self._views = [getattr(data, name).reshape(-1) for data in self._data for name in names]
        self._rngs: list[np.random.Generator] = []
        self._elapsed = np.zeros(num_envs, np.int64)  # [N]
        self._return = np.zeros(num_envs)  # [N]
        self._episodes: list[tuple[float, int]] = []  # ended and not yet popped

        low, high = model.actuator_ctrlrange.astype(np.float32).T
        self.single_action_space = gymnasium.spaces.Box(low, high, dtype=np.float32)
        self._action_shape = (num_envs, model.nu)
        size = task.observe(self._after).shape[1]
        self.single_observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (size,), np.float64)

        self._todo: queue.SimpleQueue = queue.SimpleQueue()
        self._done: queue.SimpleQueue = queue.SimpleQueue()
        # with fewer than two environments per thread, waking a worker costs about what it saves
        threads = min(threads, num_envs) if threads else max(1, min(_available_cores(), num_envs // 2))
        work = (self._todo, self._done, self._take)  # no reference to self, so that a forgotten engine can end
        self._workers = [threading.Thread(target=_work, args=work, daemon=True) for _ in range(threads - 1)]
        for worker in self._workers:
            worker.start()
        self._stop = weakref.finalize(self, _stop, self._todo, self._workers)

    def reset(self) -> np.ndarray:
        """Starts a new episode everywhere, from the seeds of (seed, stream, env). Returns obs [N, D]."""
        seed_action_space(self.single_action_space, self._seed, self._stream)
        self._episodes = []
        return self._restart(env_seeds(self._seed, self._stream, self.num_envs))

    def cut(self, global_step: int) -> np.ndarray:
        """Drops the episodes under way and starts new ones from (seed, stream, env, global_step). Returns obs."""
        self.cut_episodes += int((self._elapsed > 0).sum())
        return self._restart(env_seeds(self._seed, self._stream, self.num_envs, global_step))

    def _restart(self, seeds: list[int]) -> np.ndarray:
        self._rngs = [np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed))) for seed in seeds]
        for env in range(self.num_envs):
            self._reset_env(env)
        np.concatenate(self._views, out=self._after.flat.reshape(-1))
        return self._task.observe(self._after)

    def step(self, actions: np.ndarray) -> VecStep:
        """Simulates every environment with its row of actions [N, A], already inside the box."""
        task = self._task
        if actions.shape != self._action_shape:  # one column would be broadcast to all actuators
            raise ValueError(f"actions have shape {actions.shape}, {self.env_id} takes {self._action_shape}")
        before, after = self._before, self._after = self._after, self._before
        self._simulate(actions)
        unstable_simulations()
        np.concatenate(self._views, out=after.flat.reshape(-1))

        final_obs = task.observe(after)  # [N, D]
        reward, terminated = task.outcome(before, after, actions, self._constants)
        self._elapsed += 1
        self._return += reward
        truncated = self._elapsed >= self.max_episode_steps
        episode_return, episode_length = self._return.copy(), self._elapsed.copy()

        obs, ended = final_obs, (terminated | truncated).nonzero()[0]
        if ended.size:
            self._episodes += zip(episode_return[ended].tolist(), episode_length[ended].tolist(), strict=True)
            for env in ended.tolist():
                self._reset_env(env)
            np.concatenate(self._views, out=after.flat.reshape(-1))
            obs = task.observe(after)  # unchanged rows give the same numbers again
        return VecStep(obs, final_obs, reward, terminated, truncated, episode_return, episode_length)

    def pop_episodes(self) -> list[tuple[float, int]]:
        """(raw return, length) of the episodes that ended since the last call, in order."""
        episodes, self._episodes = self._episodes, []
        return episodes

    def _reset_env(self, env: int) -> None:
        data = self._data[env]
        mujoco.mj_resetData(self._model, data)
        data.qpos[:], data.qvel[:] = self._task.draw(self._rngs[env], self._qpos0, self._qvel0)
        mujoco.mj_forward(self._model, data)
        self._elapsed[env] = 0
        self._return[env] = 0.0

    def _simulate(self, actions: np.ndarray) -> None:
        work = iter(range(self.num_envs))
        for _ in self._workers:
            self._todo.put((work, actions))
        others = self.num_envs - sum(1 for _ in self._take(work, actions))
        errors = [self._done.get() for _ in range(others)]
        for error in errors:
            if error is not None:
                raise error

    def state_dict(self) -> dict[str, Any]:
        """Everything that later steps depend on; restoring it continues bit for bit."""
        states = np.zeros((self.num_envs, mujoco.mj_stateSize(self._model, _STATE)))
        for data, row in zip(self._data, states, strict=True):
            mujoco.mj_getState(self._model, data, row, _STATE)
        return {
            "integration": states,
            "stack": self._after.flat.copy(),  # derived arrays lag the state: they are kept, not recomputed
            "rngs": [rng.bit_generator.state for rng in self._rngs],
            "elapsed": self._elapsed.copy(),
            "return": self._return.copy(),
            "episodes": [list(episode) for episode in self._episodes],
            "cut_episodes": self.cut_episodes,
            "action_space_rng": self.single_action_space.np_random.bit_generator.state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state_dict()` of the same task and number of environments."""
        check_state(state, self.num_envs)
        self._rngs = []
        for data, row, rng_state in zip(self._data, state["integration"], state["rngs"], strict=True):
            mujoco.mj_resetData(self._model, data)
            mujoco.mj_setState(self._model, data, row, _STATE)
            bits = np.random.PCG64()
            bits.state = rng_state
            self._rngs.append(np.random.Generator(bits))
        self._after.flat[:] = state["stack"]
        self._elapsed[:] = state["elapsed"]
        self._return[:] = state["return"]
        self._episodes = [tuple(episode) for episode in state["episodes"]]
        self.cut_episodes = int(state["cut_episodes"])
        self.single_action_space.np_random.bit_generator.state = state["action_space_rng"]

    def versions(self) -> dict[str, str]:
        """The packages that the numbers depend on."""
        return {"gymnasium": gymnasium.__version__, "mujoco": mujoco.__version__}

    def close(self) -> None:
        """Ends the worker threads."""
        self._stop()


def _taker(
    model: mujoco.MjModel, data: list[mujoco.MjData], frame_skip: int, contact_forces: bool
) -> Callable[[Iterator[int], np.ndarray], Iterator[int]]:
    """The loop of every thread: take(work, actions) simulates whichever environments it can get hold of in `work`,
    and yields after each one."""
    ctrl = [one.ctrl for one in data]

    def take(work, actions):
        for env in work:
            ctrl[env][:] = actions[env]
            mujoco.mj_step(model, data[env], frame_skip)
            if contact_forces:
                mujoco.mj_rnePostConstraint(model, data[env])
            yield env

    return take


def _work(todo: queue.SimpleQueue, done: queue.SimpleQueue, take: Callable) -> None:
    while (item := todo.get()) is not None:
        try:
            for _ in take(*item):
                done.put(None)
        except Exception as error:  # raised again by the calling thread
            done.put(error)


def _stop(todo: queue.SimpleQueue, workers: list[threading.Thread]) -> None:
    for _ in workers:
        todo.put(None)
    while workers:
        workers.pop().join()


def _available_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # Linux: what this process may use, not what the machine has
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
