"""What is known of an environment when its dynamics are not: which observations end an episode.

Written for batches of observations that a learned model imagines, [..., D], as tensor code; the same formulas as in
Gymnasium's sources, as far as the observation shows the state. A velocity that is observed cut off at ±10 cannot be
told from a larger one, which matters to no task here.
"""

from collections.abc import Callable

import torch
from torch import Tensor


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


def _double_pendulum(obs: Tensor) -> Tensor:
    sin1, sin2, cos1, cos2 = obs[..., 1:5].unbind(-1)
    tip = 0.6 * cos1 + 0.6 * (cos1 * cos2 - sin1 * sin2)  # two poles of 0.6 m, the second angle relative to the first
    return tip <= 1.0


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
}


def termination(env_id: str) -> Callable[[Tensor], Tensor]:
    """The function from next observations [..., D] to whether the episode ends there, bool [...].

    Raises:
        ValueError: for an environment whose function is not written here.
    """
    name = env_id.rpartition(":")[2].rpartition("-v")[0]
    if name not in TERMINATIONS:
        known = ", ".join(sorted(TERMINATIONS))
        raise ValueError(f"--env {env_id}: its termination is not known to the model; allowed are {known}")
    return TERMINATIONS[name]
