"""Weights and masks between three policies: behavior, which sampled; proximal, the trainer before this batch's first
update (= old); and the target that is being trained.

Trainer and sampler differ even with equal parameters: another precision, other kernels, a copy one step behind. A
weight w is made from ρ = exp(proximal − behavior), carries no gradient and multiplies the surrogate:
``aggregate(w * clipped_surrogate(logprob, proximal_logprob, advantage), mask)``. A weight of 0 leaves the token or
sequence in the denominator; to drop it there too, pass a denominator without it. What was rejected still counts in its
group's baseline. Decoupled PPO is w = ρ (``decoupled_surrogate``); PPO-IS, whose ratio and clip are centred on the
behavior, needs no weight: ``clipped_surrogate(logprob, behavior_logprob, advantage)``.

Log-probs and masks [B, L] (ranks equal, size-1 dimensions broadcast), nats. ρ is compared in logs, so no difference is
too large. All functions raise ValueError for different ranks.
"""

import math

import torch
from torch import Tensor

from cleanrl_zoo.core.policy_losses import clipped_surrogate
from cleanrl_zoo.core.shapes import check_broadcast


def truncated_weight(proximal_logprob: Tensor, behavior_logprob: Tensor, cap: float) -> Tensor:
    """min(ρ, cap): cut from above only (TIS, Yao et al. 2025). cap = inf gives ρ itself, within what is finite.

    Raises ValueError for a cap that is not positive.
    """
    _check_cap(cap)
    return _exp(_logratio(proximal_logprob, behavior_logprob)).clamp(max=cap)


def banded_weight(proximal_logprob: Tensor, behavior_logprob: Tensor, low: float, high: float) -> Tensor:
    """ρ where low <= ρ <= high, 0 outside: the weight is kept inside the band, not set to 1 (IcePop, Ling Team 2025).

    Raises ValueError unless 0 <= low <= high.
    """
    if not 0 <= low <= high:
        raise ValueError(f"the band is {low} … {high}; it needs 0 <= low <= high")
    logratio = _logratio(proximal_logprob, behavior_logprob)
    inside = (logratio >= _log(low)) & (logratio <= _log(high))
    return torch.where(inside, _exp(logratio), 0.0)


def sequence_weight(proximal_logprob: Tensor, behavior_logprob: Tensor, mask: Tensor, cap: float) -> Tensor:
    """exp Σ_t m log ρ, the ratio of the whole sequence, where it is at most cap, else 0: [B, 1] (MIS, Liu et al. 2025).

    Raises ValueError for a cap that is not positive.
    """
    _check_cap(cap)
    logratio = _logratio(proximal_logprob, behavior_logprob, mask).sum(-1, keepdim=True)  # [B, 1]
    return torch.where(logratio <= _log(cap), _exp(logratio), 0.0)


def token_veto(proximal_logprob: Tensor, behavior_logprob: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """1, or 0 where any token of the sequence has ρ < threshold: [B, 1] (WTRS; threshold 1e-4 … 1e-5).

    One token that the trainer finds all but impossible says that its sequence came from another distribution. Raises
    ValueError for a threshold outside 0 … 1.
    """
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold is {threshold}; it must lie above 0 and at most at 1")
    logratio = _logratio(proximal_logprob, behavior_logprob, mask)
    vetoed = (logratio < _log(threshold)).any(-1, keepdim=True)  # [B, 1]
    return (~vetoed).to(logratio.dtype)


def decoupled_surrogate(
    logprob: Tensor,
    proximal_logprob: Tensor,
    behavior_logprob: Tensor,
    advantage: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """−ρ min(r A, clip(r, 1 − clip_low, 1 + clip_high) A), r = π/π_proximal: the clip stays around the proximal policy.

    Decoupled PPO (Hilton et al. 2022), untruncated.
    """
    weight = truncated_weight(proximal_logprob, behavior_logprob, cap=math.inf)
    return weight * clipped_surrogate(logprob, proximal_logprob, advantage, clip_low, clip_high)


def _logratio(proximal_logprob: Tensor, behavior_logprob: Tensor, mask: Tensor | None = None) -> Tensor:
    """log ρ without a gradient, 0 where the mask is 0."""
    check_broadcast(proximal_logprob=proximal_logprob, behavior_logprob=behavior_logprob, mask=mask)
    logratio = (proximal_logprob - behavior_logprob).detach()
    return logratio if mask is None else torch.where(mask != 0, logratio, 0.0)


def _exp(logratio: Tensor) -> Tensor:
    """exp, finite where it would overflow: times an advantage of 0 it must give 0, not NaN."""
    return torch.exp(logratio).clamp(max=torch.finfo(logratio.dtype).max)


def _log(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf


def _check_cap(cap: float) -> None:
    if not cap > 0:
        raise ValueError(f"cap is {cap}; it must be positive")
