"""Any Gymnasium environment, through Gymnasium's own `SyncVectorEnv` in its same-step autoreset mode."""

import warnings
from importlib import metadata
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import OrderEnforcing, TimeLimit

from cleanrl_zoo.envs.tabular import one_number
from cleanrl_zoo.envs.vec import VecStep, check_state, env_seeds, quiet_mujoco, seed_action_space, unstable_simulations

# The attributes that make up the state of an environment, beside its generator and its time limit. Environments
# that are not listed cannot be restored exactly. `MountainCarEnv` and `Continuous_MountainCarEnv` change the type or
# dtype of their state after the first step, which is why states are stored per environment and never stacked.
_STATE_OF = {
    "gymnasium.envs.classic_control.cartpole:CartPoleEnv": ("state", "steps_beyond_terminated"),
    "gymnasium.envs.classic_control.acrobot:AcrobotEnv": ("state",),
    "gymnasium.envs.classic_control.mountain_car:MountainCarEnv": ("state",),
    "gymnasium.envs.classic_control.continuous_mountain_car:Continuous_MountainCarEnv": ("state",),
    "gymnasium.envs.classic_control.pendulum:PendulumEnv": ("state",),
    "gymnasium.envs.toy_text.cliffwalking:CliffWalkingEnv": ("s",),
    "gymnasium.envs.toy_text.frozen_lake:FrozenLakeEnv": ("s",),
    "gymnasium.envs.toy_text.taxi:TaxiEnv": ("s", "fickle_step"),
}


class GymnasiumVec:
    """N environments made by `gymnasium.make(env_id, **env_kwargs)`. See `vec.VecEnv` for the interface."""

    engine = "gymnasium"

    def __init__(self, env_id: str, num_envs: int, seed: int, stream: int, env_kwargs: dict[str, Any]):
        self.env_id, self.num_envs = env_id, num_envs
        self.cut_episodes = 0
        self._seed, self._stream = seed, stream
        with warnings.catch_warnings(), quiet_mujoco():
            warnings.simplefilter("ignore")  # "is out of date": the user asked for this version
            makers = [lambda: one_number(gymnasium.make(env_id, disable_env_checker=True, **env_kwargs))] * num_envs
            self._vec = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
        self.single_observation_space = self._vec.single_observation_space
        self.single_action_space = self._vec.single_action_space
        if isinstance(self.single_observation_space, (gymnasium.spaces.Dict, gymnasium.spaces.Tuple)):
            raise ValueError(
                f"{env_id} observes a {type(self.single_observation_space).__name__} space, allowed are spaces of one "
                "array; flatten it with gymnasium.wrappers.FlattenObservation in a registered environment of your own"
            )
        self.max_episode_steps = self._vec.envs[0].spec.max_episode_steps
        self._time_limits = [_find(env, TimeLimit) for env in self._vec.envs]
        self._state_names = _state_names(self._vec.envs[0])
        self.exact_state = self._state_names is not None
        self._elapsed = np.zeros(num_envs, np.int64)  # [N]
        self._return = np.zeros(num_envs)  # [N]
        self._episodes: list[tuple[float, int]] = []  # ended and not yet popped
        self._cut_at: int | None = None  # the step of the last cut

    def reset(self) -> np.ndarray:
        """Starts a new episode everywhere, from the seeds of (seed, stream, env). Returns obs [N, ...]."""
        seed_action_space(self.single_action_space, self._seed, self._stream)
        self._episodes, self._cut_at = [], None
        return self._restart(env_seeds(self._seed, self._stream, self.num_envs))

    def cut(self, global_step: int) -> np.ndarray:
        """Drops the episodes under way and starts new ones from (seed, stream, env, global_step). Returns obs."""
        self.cut_episodes += int((self._elapsed > 0).sum())
        self._cut_at = global_step
        return self._restart(env_seeds(self._seed, self._stream, self.num_envs, global_step))

    def _restart(self, seeds: list[int]) -> np.ndarray:
        self._elapsed[:] = 0
        self._return[:] = 0.0
        obs, _ = self._vec.reset(seed=seeds)
        return obs

    def step(self, actions: np.ndarray) -> VecStep:
        """Steps every environment with its row of actions [N, ...], already inside the action space."""
        obs, reward, terminated, truncated, info = self._vec.step(actions)
        unstable_simulations()
        self._elapsed += 1
        self._return += reward
        episode_return, episode_length = self._return.copy(), self._elapsed.copy()
        final_obs, ended = obs, (terminated | truncated).nonzero()[0]
        if ended.size:
            self._episodes += zip(episode_return[ended].tolist(), episode_length[ended].tolist(), strict=True)
            final_obs = obs.copy()
            for env in ended:
                final_obs[env] = info["final_obs"][env]  # an object array with None where nothing ended
            self._elapsed[ended] = 0
            self._return[ended] = 0.0
        return VecStep(obs, final_obs, reward, terminated, truncated, episode_return, episode_length)

    def pop_episodes(self) -> list[tuple[float, int]]:
        """(raw return, length) of the episodes that ended since the last call, in order."""
        episodes, self._episodes = self._episodes, []
        return episodes

    def state_dict(self) -> dict[str, Any]:
        """Everything that later steps depend on, if `exact_state`; otherwise the step of the last cut."""
        state: dict[str, Any] = {
            "elapsed": self._elapsed.copy(),
            "return": self._return.copy(),
            "episodes": [list(episode) for episode in self._episodes],
            "cut_episodes": self.cut_episodes,
            "cut_at": self._cut_at,
            "action_space_rng": self.single_action_space.np_random.bit_generator.state,
        }
        if self.exact_state:
            state["envs"] = [
                {
                    "rng": env.unwrapped.np_random.bit_generator.state,
                    "elapsed": limit._elapsed_steps if limit else None,
                    **{name: _plain(getattr(env.unwrapped, name)) for name in self._state_names},
                }
                for env, limit in zip(self._vec.envs, self._time_limits, strict=True)
            ]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state_dict()`, bit for bit if `exact_state`; otherwise from the last cut, where it is meant
        to be called: the episodes that began there begin anew."""
        check_state(state, self.num_envs)
        self._cut_at = state["cut_at"]
        # also where the state follows below: it makes the generators and satisfies OrderEnforcing
        self._restart(env_seeds(self._seed, self._stream, self.num_envs, self._cut_at))
        self._elapsed[:] = state["elapsed"]
        self._return[:] = state["return"]
        self._episodes = [tuple(episode) for episode in state["episodes"]]
        self.cut_episodes = int(state["cut_episodes"])
        self.single_action_space.np_random.bit_generator.state = state["action_space_rng"]
        if not self.exact_state:
            return
        for env, limit, saved in zip(self._vec.envs, self._time_limits, state["envs"], strict=True):
            env.unwrapped.np_random.bit_generator.state = saved["rng"]
            if limit:
                limit._elapsed_steps = saved["elapsed"]
            for name in self._state_names:
                setattr(env.unwrapped, name, _plain(saved[name]))

    def versions(self) -> dict[str, str]:
        """The packages that the numbers depend on."""
        module = type(self._vec.envs[0].unwrapped).__module__
        packages = ["gymnasium"]
        if module.startswith("gymnasium.envs.mujoco"):
            packages.append("mujoco")
        elif module.startswith("gymnasium.envs.box2d"):
            packages.append("box2d")
        elif not module.startswith(("gymnasium.", "cleanrl_zoo.")):
            packages.extend(metadata.packages_distributions().get(module.split(".")[0], []))
        return {name: metadata.version(name) for name in packages}

    def close(self) -> None:
        """Closes every environment."""
        self._vec.close()


def _plain(value: Any) -> Any:
    """A copy that holds arrays and Python scalars only; a tuple of numbers becomes an array of the same numbers."""
    if isinstance(value, (tuple, list, np.ndarray)):
        return np.array(value)
    return value.item() if isinstance(value, np.generic) else value


def _find(env: gymnasium.Env, wrapper: type) -> Any:
    while env is not env.unwrapped:
        if isinstance(env, wrapper):
            return env
        env = env.env
    return None


def _state_names(env: gymnasium.Env) -> tuple[str, ...] | None:
    """The names of the attributes to save, None where an environment or a wrapper of it has a state unknown to us."""
    while env is not env.unwrapped:
        if type(env) not in (TimeLimit, OrderEnforcing):
            return None
        env = env.env
    kind = type(env)
    return getattr(kind, "state_names", None) or _STATE_OF.get(f"{kind.__module__}:{kind.__name__}")
