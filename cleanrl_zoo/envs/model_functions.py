"""What is known of an environment when its dynamics are not: which observations end an episode, what a step earns,
and which of the observed numbers are angles.

Written for batches of observations that a learned model imagines, [..., D], as tensor code; the same formulas as in
Gymnasium's sources, as far as the observation shows the state. A velocity that is observed cut off at ±10 cannot be
told from a larger one, which matters to no task here. The reward of a runner is the way that its body went, which is
not observed: here it is the mean of the observed forward velocities before and after the step, which over random
actions misses the true velocity (standard deviation 0.4 to 0.7 m/s) by 0.004 m/s on Hopper-v4, 0.015 on Walker2d-v4
and 0.18 on HalfCheetah-v4, whose contacts are short against its step.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from cleanrl_zoo.envs import cartpole


def _never(obs: Tensor) -> Tensor:
    return torch.zeros(obs.shape[:-1], dtype=torch.bool, device=obs.device)


def _hopper(obs: Tensor) -> Tensor:
    in_range = obs[..., 1:].abs().amax(-1) < 100.0
    return ~(in_range & (obs[..., 0] > 0.7) & (obs[..., 1].abs() < 0.2))


def _walker(obs: Tensor) -> Tensor:
    return ~((obs[..., 0] > 0.8) & (obs[..., 0] < 2.0) & (obs[..., 1].abs() < 1.0))


def _height_between(low: float, high: float) -> Callable[[Tensor], Tensor]:
    def ended(obs: Tensor) -> Tensor:
        return ~(torch.isfinite(obs).all(-1) & (obs[..., 0] >= low) & (obs[..., 0] <= high))

    return ended


def _humanoid(obs: Tensor) -> Tensor:
    return ~((obs[..., 0] > 1.0) & (obs[..., 0] < 2.0))


def _inverted_pendulum(obs: Tensor) -> Tensor:
    return ~(torch.isfinite(obs).all(-1) & (obs[..., 1].abs() <= 0.2))


def _double_pendulum_tip(obs: Tensor) -> tuple[Tensor, Tensor]:
    """x and y of the tip: two poles of 0.6 m, the second angle relative to the first."""
    sin1, sin2, cos1, cos2 = obs[..., 1:5].unbind(-1)
    x = obs[..., 0] + 0.6 * sin1 + 0.6 * (sin1 * cos2 + cos1 * sin2)
    return x, 0.6 * cos1 + 0.6 * (cos1 * cos2 - sin1 * sin2)


def _double_pendulum(obs: Tensor) -> Tensor:
    return _double_pendulum_tip(obs)[1] <= 1.0


def _balance(obs: Tensor) -> Tensor:
    return (obs[..., 0].abs() > cartpole.X_LIMIT) | (obs[..., 2].abs() > cartpole.ANGLE_LIMIT)


TERMINATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Hopper": _hopper,
    "Walker2d": _walker,
    "Ant": _height_between(0.2, 1.0),
    "Humanoid": _humanoid,
    "InvertedPendulum": _inverted_pendulum,
    "InvertedDoublePendulum": _double_pendulum,
    "HalfCheetah": _never,
    "Swimmer": _never,
    "Reacher": _never,
    "Pusher": _never,
    "Pendulum": _never,
    "MountainCarContinuous": lambda obs: (obs[..., 0] >= 0.45) & (obs[..., 1] >= 0.0),
    "cartpole/Balance": _balance,
    "cartpole/SwingUp": _never,
}


# Rewards of (obs, action, next_obs)

Reward = Callable[[Tensor, Tensor, Tensor], Tensor]


def _swing_up_reward(obs: Tensor, action: Tensor, next_obs: Tensor) -> Tensor:
    push = action[..., 0].clamp(-1.0, 1.0)
    return next_obs[..., 3] - cartpole.X_COST * next_obs[..., 0].square() - cartpole.ACTION_COST * push.square()


def _pendulum_reward(obs: Tensor, action: Tensor, next_obs: Tensor) -> Tensor:
    angle, torque = torch.atan2(obs[..., 1], obs[..., 0]), action[..., 0].clamp(-2.0, 2.0)
    return -(angle.square() + 0.1 * obs[..., 2].square() + 0.001 * torque.square())


def _mountain_car_reward(obs: Tensor, action: Tensor, next_obs: Tensor) -> Tensor:
    return 100.0 * TERMINATIONS["MountainCarContinuous"](next_obs) - 0.1 * action[..., 0].square()


def _double_pendulum_reward(version: int) -> Reward:
    def reward(obs: Tensor, action: Tensor, next_obs: Tensor) -> Tensor:
        (x, y), v1, v2 = _double_pendulum_tip(next_obs), next_obs[..., 6], next_obs[..., 7]
        bonus = 10.0 if version == 4 else 10.0 * (y > 1.0)
        return bonus - (0.01 * x.square() + (y - 2.0).square()) - (1e-3 * v1.square() + 5e-3 * v2.square())

    return reward


def _runner_reward(velocity: int, control_weight: float, bonus: Callable[[Tensor], Tensor | float]) -> Reward:
    """`velocity`: where the forward velocity stands in the observation."""

    def reward(obs: Tensor, action: Tensor, next_obs: Tensor) -> Tensor:
        forward = 0.5 * (obs[..., velocity] + next_obs[..., velocity])
        return forward + bonus(next_obs) - control_weight * action.square().sum(-1)

    return reward


def _reacher_reward(obs: Tensor, action: Tensor, next_obs: Tensor) -> Tensor:
    return -torch.linalg.vector_norm(obs[..., -3:], dim=-1) - action.square().sum(-1)


# v4 pays the bonus of staying upright on the terminal step too, and takes Reacher's distance before the step
REWARDS: dict[str, Reward] = {
    "cartpole/Balance-v0": lambda obs, action, next_obs: torch.ones_like(next_obs[..., 0]),
    "cartpole/SwingUp-v0": _swing_up_reward,
    "Pendulum-v1": _pendulum_reward,
    "MountainCarContinuous-v0": _mountain_car_reward,
    "InvertedPendulum-v4": lambda obs, action, next_obs: torch.ones_like(next_obs[..., 0]),
    "InvertedPendulum-v5": lambda obs, action, next_obs: 1.0 - _inverted_pendulum(next_obs).float(),
    "InvertedDoublePendulum-v4": _double_pendulum_reward(4),
    "InvertedDoublePendulum-v5": _double_pendulum_reward(5),
    "Reacher-v4": _reacher_reward,
    "HalfCheetah-v4": _runner_reward(8, 0.1, lambda obs: 0.0),
    "HalfCheetah-v5": _runner_reward(8, 0.1, lambda obs: 0.0),
    "Hopper-v4": _runner_reward(5, 1e-3, lambda obs: 1.0),
    "Hopper-v5": _runner_reward(5, 1e-3, lambda obs: 1.0 - _hopper(obs).float()),
    "Walker2d-v4": _runner_reward(8, 1e-3, lambda obs: 1.0),
    "Walker2d-v5": _runner_reward(8, 1e-3, lambda obs: 1.0 - _walker(obs).float()),
}

# Columns of the observation that are angles without an end: a body that can turn over.
ANGLES: dict[str, tuple[int, ...]] = {"HalfCheetah": (1,), "Swimmer": (0,)}


def _name(env_id: str) -> str:
    """`module:Name-v4` → `Name`."""
    return env_id.rpartition(":")[2].rpartition("-v")[0]


def termination(env_id: str) -> Callable[[Tensor], Tensor]:
    """The function from next observations [..., D] to whether the episode ends there, bool [...].

    Raises:
        ValueError: for an environment whose function is not written here.
    """
    if _name(env_id) not in TERMINATIONS:
        known = ", ".join(sorted(TERMINATIONS))
        raise ValueError(f"--env {env_id}: its termination is not known to the model; allowed are {known}")
    return TERMINATIONS[_name(env_id)]


def reward(env_id: str) -> Reward:
    """The function from obs [..., D], action [..., A] and next_obs [..., D] to the reward [...].

    Raises:
        ValueError: for an environment whose function is not written here.
    """
    name = env_id.rpartition(":")[2]
    if name not in REWARDS:
        known = ", ".join(REWARDS)
        raise ValueError(f"--env {env_id}: its reward is not known to the model; give --learn-reward or one of {known}")
    return REWARDS[name]


def features(env_id: str) -> Callable[[Tensor], Tensor]:
    """What a model should see of an observation: [..., D] -> [..., D'], each endless angle as its sine and cosine."""
    angles = ANGLES.get(_name(env_id), ())
    if not angles:
        return _unchanged

    def with_sines(obs: Tensor) -> Tensor:
        # by columns: a list of indices would be a constant tensor, which the compiled loop of pets.py cannot hold
        columns = obs.unbind(-1)
        kept = [column for index, column in enumerate(columns) if index not in angles]
        turned = [columns[index] for index in angles]
        return torch.stack([*kept, *(x.sin() for x in turned), *(x.cos() for x in turned)], -1)

    return with_sines


def _unchanged(obs: Tensor) -> Tensor:
    return obs
