"""Running scales of observations and rewards: float64, vectorised over environments, saved like any module."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from cleanrl_zoo.core.statistics import update_moments


class ObsNormalizer(nn.Module):
    """Maps observations [..., *shape] to (obs − mean) / √(var + eps), clipped to ±clip, as float32.

    `update` learns mean and variance, `forward` only reads them: a policy that is evaluated does not change. The
    statistics are buffers, thus part of the policy's state dict. Before the first update mean is 0 and variance 1.
    Both are plain tensor code and may be part of a compiled graph; `on_arrays` is `forward` by NumPy.
    """

    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, shape: tuple[int, ...], clip: float = 10.0, eps: float = 1e-8):
        super().__init__()
        if not shape:
            raise ValueError("shape is (), an observation to normalise needs at least one dimension")
        self.clip, self.eps = clip, eps
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))
        # [1], since the compiler drops in-place writes to 0-dimensional float64 tensors on the CPU
        self.register_buffer("count", torch.zeros(1, dtype=torch.float64))

    @torch.no_grad()
    def update(self, obs: Tensor) -> None:
        """Counts every observation of `obs` [..., *shape] in (Chan et al. 1979)."""
        batch = obs.reshape(-1, *self.mean.shape)
        mean, var, count = update_moments(self.mean, self.var, self.count, batch)
        self.mean.copy_(mean)
        self.var.copy_(var)
        self.count.copy_(count)

    def forward(self, obs: Tensor) -> Tensor:
        scaled = (obs.to(torch.float64) - self.mean) / torch.sqrt(self.var + self.eps)
        return scaled.clamp(-self.clip, self.clip).to(torch.float32)

    def on_arrays(self) -> Callable[[np.ndarray], np.ndarray]:
        """`forward` of arrays by NumPy, with the scales as they are now: faster for the few observations of a step."""
        mean, scale = self.mean.cpu().numpy().copy(), torch.sqrt(self.var + self.eps).cpu().numpy()

        def normalized(obs: np.ndarray) -> np.ndarray:
            return ((obs - mean) / scale).clip(-self.clip, self.clip).astype(np.float32)

        return normalized


class RewardScaler(nn.Module):
    """Divides rewards by the running standard deviation of the discounted return (as in Engstrom et al. 2020).

    Per environment R ← γR + r; the variance of all R so far, this step's included, gives r / √(var + eps), clipped to
    ±clip; then R ← 0 where the episode ended, by termination or truncation alike. Rewards are not centred.
    """

    running_return: Tensor
    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, num_envs: int, gamma: float, clip: float = 10.0, eps: float = 1e-8):
        super().__init__()
        self.gamma, self.clip, self.eps = gamma, clip, eps
        self.register_buffer("running_return", torch.zeros(num_envs, dtype=torch.float64))  # [N]
        self.register_buffer("mean", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("var", torch.ones(1, dtype=torch.float64))
        self.register_buffer("count", torch.zeros(1, dtype=torch.float64))

    @torch.no_grad()
    def forward(self, rewards: Tensor, done: Tensor) -> Tensor:
        """Scales the rewards of one step [N] or of a rollout [T, N] and learns from them; the dtype is kept.

        done: terminated or truncated, bool or 0/1, of the same shape. A rollout gives what its steps one by one give:
        row t is divided by the deviation of the returns up to and including row t.
        """
        raw = rewards.to(torch.float64).reshape(-1, len(self.running_return))  # [T, N]
        keep = 1.0 - done.to(torch.float64).reshape(raw.shape)
        running, returns = self.running_return, []
        for reward, kept in zip(raw.unbind(), keep.unbind(), strict=True):
            returns.append(torch.add(reward, running, alpha=self.gamma))
            running = returns[-1] * kept

        # Moments after every row, by sums around the old mean: var_t = (n0 var0 + Σd²) / n_t − (Σd / n_t)²
        deviation = torch.stack(returns) - self.mean
        count = self.count + raw.shape[1] * torch.arange(1, len(raw) + 1, dtype=torch.float64, device=raw.device)  # [T]
        shift = deviation.sum(1).cumsum(0) / count
        var = (self.count * self.var + (deviation**2).sum(1).cumsum(0)) / count - shift**2
        var = var.clamp(min=0.0)  # rounding, where all returns are equal
        scaled = (raw / torch.sqrt(var + self.eps)[:, None]).clamp(-self.clip, self.clip)

        self.running_return.copy_(running)
        self.mean.add_(shift[-1])
        self.var.copy_(var[-1:])
        self.count.copy_(count[-1:])
        return scaled.reshape(rewards.shape).to(rewards.dtype)
