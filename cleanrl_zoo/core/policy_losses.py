"""Policy losses: unreduced, to be minimised. Inputs have equal ranks and broadcast; log-probs are in nats.

Nothing is detached, whitened or reduced here: ``old_logprob`` and ``advantage`` come in as constants, and
``core.reduce.aggregate`` (or a mean) makes the scalar.
"""

import torch
from torch import Tensor

from cleanrl_zoo.core.shapes import check_broadcast


def policy_gradient(logprob: Tensor, advantage: Tensor) -> Tensor:
    """−A log π(a|s), whose gradient is the score-function estimate (REINFORCE, Williams 1992).

    Raises ValueError for different ranks.
    """
    check_broadcast(logprob=logprob, advantage=advantage)
    return -advantage * logprob


def clipped_surrogate(
    logprob: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Tensor:
    """−min(r A, clip(r, 1 − clip_low, 1 + clip_high) A), r = π/π_old (PPO, Schulman et al. 2017, eq. 7).

    ``dual_clip`` c > 1 bounds the loss by −cA where A < 0, so a huge ratio cannot dominate (Ye et al. 2020, eq. 5).
    Raises ValueError for dual_clip <= 1 and for different ranks.
    """
    check_broadcast(logprob=logprob, old_logprob=old_logprob, advantage=advantage)
    ratio = torch.exp(logprob - old_logprob)
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip_low, 1 + clip_high))
    if dual_clip is None:
        return loss
    if dual_clip <= 1:
        raise ValueError(f"dual_clip is {dual_clip}; it must be above 1, or None to turn it off")
    return torch.where(advantage < 0, torch.minimum(loss, -dual_clip * advantage), loss)


def kl_penalized_surrogate(
    logprob: Tensor, old_logprob: Tensor, advantage: Tensor, kl: Tensor, kl_coef: float | Tensor
) -> Tensor:
    """−r A + kl_coef · KL, r = π/π_old (PPO with a KL penalty, Schulman et al. 2017, eq. 8).

    ``kl`` is the per-element KL(π_old‖π) with its graph. Raises ValueError for different ranks.
    """
    check_broadcast(logprob=logprob, old_logprob=old_logprob, advantage=advantage, kl=kl)
    return -advantage * torch.exp(logprob - old_logprob) + kl_coef * kl
