"""The rollout store of on-policy methods: one iteration's transitions, time first, allocated once."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass
class Rollout:
    """`num_steps` × `num_envs` transitions; row t is the transition obs[t] → final_obs[t].

    The tensors live on the CPU; `numpy` holds views of the same memory, because one row is written four times faster
    through numpy than through torch. Copies to another device are made for the whole rollout at once.
    """

    obs: Tensor  # [T, N, ...] as the environment gave it
    final_obs: Tensor  # [T, N, ...] the true next observation, before any autoreset
    actions: Tensor  # [T, N, ...] as sampled, never clipped
    rewards: Tensor  # [T, N] raw
    terminated: Tensor  # [T, N] bool
    truncated: Tensor  # [T, N] bool
    numpy: dict[str, np.ndarray] = field(repr=False)

    @classmethod
    def allocate(
        cls,
        num_steps: int,
        num_envs: int,
        obs_shape: tuple[int, ...],
        action_shape: tuple[int, ...],
        obs_dtype: torch.dtype = torch.float32,
        action_dtype: torch.dtype = torch.float32,
    ) -> "Rollout":
        """Zero-filled memory for `num_steps` steps of `num_envs` environments."""
        time, envs = num_steps, num_envs
        tensors = {
            "obs": torch.zeros(time, envs, *obs_shape, dtype=obs_dtype),
            "final_obs": torch.zeros(time, envs, *obs_shape, dtype=obs_dtype),
            "actions": torch.zeros(time, envs, *action_shape, dtype=action_dtype),
            "rewards": torch.zeros(time, envs, dtype=torch.float64),
            "terminated": torch.zeros(time, envs, dtype=torch.bool),
            "truncated": torch.zeros(time, envs, dtype=torch.bool),
        }
        return cls(**tensors, numpy={name: tensor.numpy() for name, tensor in tensors.items()})

    def put_obs(self, t: int, obs: np.ndarray) -> np.ndarray:
        """Writes the observations of row `t` and gives them back as stored: the policy acts on what it learns from."""
        self.numpy["obs"][t] = obs
        return self.numpy["obs"][t]

    def put_step(self, t: int, actions: np.ndarray, step: Any) -> None:
        """Writes the rest of row `t`: the actions as sampled and what `envs.step` (a `VecStep`) returned for them."""
        rows = self.numpy
        rows["actions"][t] = actions
        rows["final_obs"][t] = step.final_obs
        rows["rewards"][t] = step.reward
        rows["terminated"][t] = step.terminated
        rows["truncated"][t] = step.truncated

    @property
    def done(self) -> Tensor:
        """terminated or truncated, bool [T, N]."""
        return self.terminated | self.truncated

    def to(self, device: str | torch.device) -> "Rollout":
        """The same transitions on `device`, not to be written to; on the CPU the store's own memory."""
        names = ("obs", "final_obs", "actions", "rewards", "terminated", "truncated")
        return Rollout(**{name: getattr(self, name).to(device) for name in names}, numpy={})
