"""Atari games through ale-py's own vector engine: preprocessed frames, reset within the step."""

from importlib import metadata
from typing import Any

import gymnasium
import numpy as np

from cleanrl_zoo.envs.vec import VecStep, check_state, env_seeds, seed_action_space

FRAME_SKIP = 4
KWARGS = {"episodic_life", "full_action_space", "max_episode_steps", "repeat_action_probability"}


class AtariVec:
    """N games of one kind, preprocessed as in Mnih et al. (2015). See `vec.VecEnv` for the interface.

    An observation is a stack of the last four frames, uint8 [4, 84, 84], oldest first: grey, of every four screens
    the maximum of the last two. A game begins with FIRE, where it has that action, and a random number below 30 of
    screens without action; it is cut after 108,000 screens (27,000 steps). Rewards and returns are the game's own.

    Args:
        episodic_life: `terminated` at every life that is lost, for learning only: the game goes on, `obs` is its next
            frame, and `episode_return` and `pop_episodes` count whole games all the same. (ale-py's own option of that
            name starts a new game instead.)
        repeat_action_probability: the chance that the last action is repeated instead (sticky actions, Machado et al.
            2018, who advise 0.25). The names "ALE/…-v5" imply 0.25 elsewhere; here it is 0 unless given.
        full_action_space: all 18 actions instead of those that the game knows.
        max_episode_steps: steps of four screens after which an episode is truncated.

    The engine cannot save its state: `exact_state` is False, and a resumed run starts from the last cut.
    """

    engine = "atari"
    exact_state = False

    def __init__(
        self,
        env_id: str,
        num_envs: int,
        seed: int,
        stream: int,
        threads: int,
        episodic_life: bool = False,
        repeat_action_probability: float = 0.0,
        full_action_space: bool = False,
        max_episode_steps: int = 27_000,
    ):
        from ale_py.vector_env import AtariVectorEnv  # an extra; `make_vec` says so where it is missing

        if not 0.0 <= repeat_action_probability <= 1.0:
            raise ValueError(f"repeat_action_probability is {repeat_action_probability}, must be from 0 to 1")
        self.env_id, self.num_envs = env_id, num_envs
        self.max_episode_steps, self.cut_episodes = max_episode_steps, 0
        self._seed, self._stream, self._episodic_life = seed, stream, episodic_life
        self._vec = AtariVectorEnv(
            gymnasium.spec(env_id).kwargs["game"],
            num_envs,
            num_threads=threads,
            autoreset_mode="SameStep",
            frameskip=FRAME_SKIP,
            max_num_frames_per_episode=FRAME_SKIP * max_episode_steps,
            repeat_action_probability=repeat_action_probability,
            full_action_space=full_action_space,
            reward_clipping=False,
        )
        self.single_observation_space = self._vec.single_observation_space
        self.single_action_space = self._vec.single_action_space
        self._elapsed = np.zeros(num_envs, np.int64)  # [N]
        self._return = np.zeros(num_envs)  # [N]
        self._lives = np.zeros(num_envs, np.int64)  # [N]
        self._episodes: list[tuple[float, int]] = []  # ended and not yet popped
        self._cut_at: int | None = None  # the step of the last cut

    def reset(self) -> np.ndarray:
        """Starts a new game everywhere, from the seeds of (seed, stream, env). Returns obs uint8 [N, 4, 84, 84]."""
        seed_action_space(self.single_action_space, self._seed, self._stream)
        self._episodes, self._cut_at = [], None
        return self._restart(env_seeds(self._seed, self._stream, self.num_envs))

    def cut(self, global_step: int) -> np.ndarray:
        """Drops the games under way and starts new ones from (seed, stream, env, global_step). Returns obs."""
        self.cut_episodes += int((self._elapsed > 0).sum())
        self._cut_at = global_step
        return self._restart(env_seeds(self._seed, self._stream, self.num_envs, global_step))

    def _restart(self, seeds: list[int]) -> np.ndarray:
        self._elapsed[:] = 0
        self._return[:] = 0.0
        obs, info = self._vec.reset(seed=np.array(seeds, np.uint64) >> np.uint64(33))  # the engine takes 31 bits
        self._lives[:] = info["lives"]
        return obs

    def step(self, actions: np.ndarray) -> VecStep:
        """Steps every game with its action [N]."""
        obs, reward, terminated, truncated, info = self._vec.step(actions)
        self._elapsed += 1
        self._return += reward
        episode_return, episode_length = self._return.copy(), self._elapsed.copy()
        final_obs, lost = obs, info["lives"] < self._lives
        self._lives[:] = info["lives"]
        ended = (terminated | truncated).nonzero()[0]
        if ended.size:
            self._episodes += zip(episode_return[ended].tolist(), episode_length[ended].tolist(), strict=True)
            final_obs = obs.copy()
            final_obs[ended] = info["final_obs"][ended]  # elsewhere the engine leaves these rows unwritten
            self._elapsed[ended] = 0
            self._return[ended] = 0.0
        if self._episodic_life:  # where the episode ended, `lives` are already the next one's
            terminated = terminated | (lost & ~truncated)
        return VecStep(obs, final_obs, reward.astype(np.float64), terminated, truncated, episode_return, episode_length)

    def pop_episodes(self) -> list[tuple[float, int]]:
        """(raw return, length) of the games that ended since the last call, in order."""
        episodes, self._episodes = self._episodes, []
        return episodes

    def state_dict(self) -> dict[str, Any]:
        """What is not lost with the games; see `load_state_dict`."""
        return {
            "elapsed": self._elapsed.copy(),
            "episodes": [list(episode) for episode in self._episodes],
            "cut_episodes": self.cut_episodes,
            "cut_at": self._cut_at,
            "action_space_rng": self.single_action_space.np_random.bit_generator.state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state_dict()` at the last cut, where it is meant to be called: the games that began there
        begin anew."""
        check_state(state, self.num_envs)
        self._cut_at = state["cut_at"]
        self._restart(env_seeds(self._seed, self._stream, self.num_envs, self._cut_at))
        self._episodes = [tuple(episode) for episode in state["episodes"]]
        self.cut_episodes = int(state["cut_episodes"])
        self.single_action_space.np_random.bit_generator.state = state["action_space_rng"]

    def versions(self) -> dict[str, str]:
        """The packages that the numbers depend on."""
        return {name: metadata.version(name) for name in ("gymnasium", "ale-py")}

    def close(self) -> None:
        """Ends the engine and its threads."""
        self._vec.close()
        self._vec.ale = None
