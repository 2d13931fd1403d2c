"""MuJoCo tasks stepped as a batch: MuJoCo's own thread pool simulates, formulas over stacked arrays do the rest.

Which thread simulates an environment has no influence on its numbers.
"""

import os
from pathlib import Path
from typing import Any

import gymnasium
import mujoco
import numpy as np
from mujoco.batch import Batch

from cleanrl_zoo.envs.mujoco_tasks import TASKS, Stack
from cleanrl_zoo.envs.vec import (
    VecStep,
    check_state,
    env_seeds,
    generators,
    quiet_mujoco,
    restored_generators,
    seed_action_space,
    unstable_simulations,
)


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
            model = mujoco.MjModel.from_xml_path(str(assets / task.model_file))
        threads = min(threads or _available_cores(), num_envs)
        self._batch = batch = Batch(model, num_envs, threads, persistent=task.contact_forces)
        arrays = {name: batch.bind(name) for name in ("qpos", "qvel", "ctrl", *task.reads)}
        if task.contact_forces:  # mj_step does not compute them: see _compute_contact_forces
            arrays["cfrc_ext"] = np.zeros((num_envs, model.nbody, 6))
        self._scratch = mujoco.MjData(model) if task.contact_forces else None
        state = batch.state[:, 1 : 1 + model.nq + model.nv]  # a row is time, qpos, qvel, ...
        dt = model.opt.timestep * task.frame_skip
        self._stack = Stack(state=state, dt=dt, body_mass=model.body_mass, **arrays)
        self._qpos0, self._qvel0 = arrays["qpos"][0].copy(), arrays["qvel"][0].copy()

        self._position = np.zeros(num_envs)  # [N] of `task.position`, as of the last step
        self._rngs: list[np.random.Generator] = []
        self._elapsed = np.zeros(num_envs, np.int64)  # [N]
        self._return = np.zeros(num_envs)  # [N]
        self._episodes: list[tuple[float, int]] = []  # ended and not yet popped

        low, high = model.actuator_ctrlrange.astype(np.float32).T
        self.single_action_space = gymnasium.spaces.Box(low, high, dtype=np.float32)
        size = task.observe(self._stack).shape[1]
        self.single_observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (size,), np.float64)

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
        self._rngs = generators(seeds)
        self._start_episodes(np.arange(self.num_envs))
        self._position = self._task.position(self._stack)
        return self._task.observe(self._stack)

    def step(self, actions: np.ndarray) -> VecStep:
        """Simulates every environment with its row of actions [N, A], already inside the box."""
        task, stack = self._task, self._stack
        if actions.shape != stack.ctrl.shape:  # one column would be broadcast to all actuators
            raise ValueError(f"actions have shape {actions.shape}, {self.env_id} takes {stack.ctrl.shape}")
        stack.ctrl[:] = actions
        self._batch.step(nstep=task.frame_skip)
        if task.contact_forces:
            self._compute_contact_forces()
        unstable_simulations()

        before, after = self._position, task.position(stack)
        final_obs = task.observe(stack)  # [N, D]
        reward, terminated = task.outcome(before, after, stack, actions)
        self._elapsed += 1
        self._return += reward
        truncated = self._elapsed >= self.max_episode_steps
        episode_return, episode_length = self._return.copy(), self._elapsed.copy()

        obs, ended = final_obs, (terminated | truncated).nonzero()[0]
        if ended.size:
            self._episodes += zip(episode_return[ended].tolist(), episode_length[ended].tolist(), strict=True)
            self._start_episodes(ended)
            obs, after = task.observe(stack), task.position(stack)  # unchanged rows give the same numbers again
        self._position = after
        return VecStep(obs, final_obs, reward, terminated, truncated, episode_return, episode_length)

    def pop_episodes(self) -> list[tuple[float, int]]:
        """(raw return, length) of the episodes that ended since the last call, in order."""
        episodes, self._episodes = self._episodes, []
        return episodes

    def _start_episodes(self, envs: np.ndarray) -> None:
        stack = self._stack
        self._batch.reset(envs, stage=mujoco.mjtStage.mjSTAGE_NONE)
        for env in envs.tolist():
            stack.qpos[env], stack.qvel[env] = self._task.draw(self._rngs[env], self._qpos0, self._qvel0)
        self._batch.forward(envs)
        if self._task.contact_forces:
            stack.cfrc_ext[envs] = 0.0
        self._elapsed[envs] = 0
        self._return[envs] = 0.0

    def _compute_contact_forces(self) -> None:
        # not by a sensor that needs them: under RK4, sensors are computed in the first of the four stages only, while
        # Gymnasium takes the forces, like xpos, from the last one
        batch, data, forces = self._batch, self._scratch, self._scratch.cfrc_ext
        for env, row in enumerate(self._stack.cfrc_ext):
            batch.get_data(env, data)
            mujoco.mj_rnePostConstraint(batch.model, data)
            row[:] = forces

    def state_dict(self) -> dict[str, Any]:
        """Everything that later steps depend on; restoring it continues bit for bit."""
        return {
            "simulations": self._batch.state.copy(),  # the solver's warm start included
            "position": self._position.copy(),  # kept, not recomputed: derived arrays lag the state
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
        self._batch.state[:] = state["simulations"]
        self._position = state["position"].copy()
        self._rngs = restored_generators(state["rngs"])
        self._elapsed[:] = state["elapsed"]
        self._return[:] = state["return"]
        self._episodes = [tuple(episode) for episode in state["episodes"]]
        self.cut_episodes = int(state["cut_episodes"])
        self.single_action_space.np_random.bit_generator.state = state["action_space_rng"]

    def versions(self) -> dict[str, str]:
        """The packages that the numbers depend on."""
        return {"gymnasium": gymnasium.__version__, "mujoco": mujoco.__version__}

    def close(self) -> None:
        """Ends the simulation threads and releases their memory."""
        self._batch = self._stack = self._scratch = None  # an array bound to the batch would keep it, too


def _available_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # Linux: what this process may use, not what the machine has
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
