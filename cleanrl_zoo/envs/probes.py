"""Probe environments: so small that the right values are known in closed form.

Each isolates one thing that a learner must get right. `probe/<Name>-v0` has two discrete actions,
`probe/<Name>Continuous-v0` one action in [−1, 1], and `probe/<Name>Frames-v0` two discrete actions and, like Atari,
frames of bytes, [4, 36, 36], in which the number is the place of a bright square. Values are of the optimal policy.

| name   | an episode                                                          | values                            |
|--------|---------------------------------------------------------------------|-----------------------------------|
| Loop   | obs 0, reward 1 for ever, cut after 10 steps                        | 1 / (1 − γ), truncation bootstraps |
| Delay  | obs 0, reward 0; obs 1, reward 1, terminated                        | V(0) = γ, V(1) = 1                |
| Cue    | one step; obs c = ±1 at random, reward c, terminated                | V(c) = c                          |
| Choice | one step; obs 0; reward ±1 for action 1 / 0, or 1 − (a − ½)²        | 1, by action 1 / by action ½      |
| Match  | one step; obs c = ±1; reward ±1 if (action is 1) is (c is 1) or not, or 1 − (a − c/2)² | 1             |
| Count  | obs counts the steps, reward 1, cut after 3 steps                   | 1 / (1 − γ)                       |
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete


class Probe(gymnasium.Env):
    """What the probes share: one number is observed, as it is or in frames; actions are discrete or continuous."""

    state_names = ("value",)  # what an exact checkpoint has to hold

    def __init__(self, continuous: bool = False, frames: bool = False):
        self.continuous, self.frames = continuous, frames
        self.observation_space = (
            Box(0, 255, (4, 36, 36), np.uint8) if frames else Box(-np.inf, np.inf, (1,), np.float32)
        )
        self.action_space = Box(-1.0, 1.0, (1,), np.float32) if continuous else Discrete(2)
        self.value = 0.0  # what is observed

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.value = self.first_value()
        return self._obs(), {}

    def step(self, action):
        reward, terminated = self.advance(float(action[0]) if self.continuous else int(action))
        return self._obs(), reward, terminated, False, {}

    def _obs(self) -> np.ndarray:
        if not self.frames:
            return np.array([self.value], np.float32)
        frames, left = np.zeros((4, 36, 36), np.uint8), 6 * (int(self.value) + 2)  # values are −1, 0, 1, 2 or 3
        frames[:, 15:21, left : left + 6] = 255
        return frames

    def first_value(self) -> float:
        """The first observation of an episode."""
        return 0.0

    def advance(self, action: float) -> tuple[float, bool]:
        """Moves `value` on; returns the reward and whether the episode terminated."""
        raise NotImplementedError

    def random_cue(self) -> float:
        """−1 or 1, evenly."""
        return float(self.np_random.choice([-1.0, 1.0]))

    def payoff(self, action: float, cue: float) -> float:
        """The reward of one action where `cue` (−1 or 1) names the right one."""
        if self.continuous:
            return 1.0 - (action - 0.5 * cue) ** 2
        return 1.0 if (action == 1) == (cue == 1.0) else -1.0


class Loop(Probe):
    """Reward 1 for ever, cut after 10 steps."""

    def advance(self, action):
        return 1.0, False


class Delay(Probe):
    """Reward 1 on the second step only."""

    def advance(self, action):
        reward, self.value = self.value, self.value + 1.0
        return reward, reward == 1.0


class Cue(Probe):
    """One step whose reward is the observation."""

    def first_value(self):
        return self.random_cue()

    def advance(self, action):
        return self.value, True


class Choice(Probe):
    """One step whose reward depends on the action."""

    def advance(self, action):
        return self.payoff(action, 1.0), True


class Match(Probe):
    """One step whose reward depends on observation and action."""

    def first_value(self):
        return self.random_cue()

    def advance(self, action):
        return self.payoff(action, self.value), True


class Count(Probe):
    """The observation counts the steps, cut after 3."""

    def advance(self, action):
        self.value += 1.0
        return 1.0, False


LIMITS = {Loop: 10, Delay: 10, Cue: 10, Choice: 10, Match: 10, Count: 3}  # steps until an episode is truncated

for _probe, _limit in LIMITS.items():
    for _suffix, _kwargs in (("", {}), ("Continuous", {"continuous": True}), ("Frames", {"frames": True})):
        gymnasium.register(
            f"probe/{_probe.__name__}{_suffix}-v0",
            f"{__name__}:{_probe.__name__}",
            max_episode_steps=_limit,
            kwargs=_kwargs,
        )
