"""Policy losses: unreduced, to be minimised. Inputs have equal ranks and broadcast; log-probs are in nats.

Nothing is detached, whitened or reduced here: ``old_logprob`` and ``advantage`` come in as constants, and
``core.reduce.aggregate`` (or a mean) makes the scalar.
"""

import math

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
    ratio = _ratio(logprob, old_logprob)
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
    return -advantage * _ratio(logprob, old_logprob) + kl_coef * kl


def sequence_logratio(logprob: Tensor, old_logprob: Tensor, mask: Tensor, per_token: bool = False) -> Tensor:
    """log s_i = Σ_t m (ℓ − ℓ°) / n_i, the length-normalised log-ratio of a sequence: [B, L] -> [B].

    GSPO (Zheng et al. 2025, eq. 7); exp of it is the geometric mean of the token ratios, not their product. A row
    without tokens gives 0. ``per_token`` gives sg[log s_i] + ℓ − sg[ℓ], [B, L]: every token has the value of its
    sequence and the gradient of its own log-prob, so that advantages may differ by token (GSPO-token, eq. 14).
    The result is a log-prob against zero: ``clipped_surrogate(logratio, torch.zeros_like(logratio), ...)``.
    Raises ValueError for different ranks.
    """
    check_broadcast(logprob=logprob, old_logprob=old_logprob, mask=mask)
    difference = torch.where(mask != 0, logprob - old_logprob, 0.0)  # [B, L]
    count = (mask != 0).expand_as(difference).sum(-1)  # [B]
    logratio = difference.sum(-1) / count.clamp(min=1)  # [B]
    if not per_token:
        return logratio
    own = torch.where(mask != 0, logprob, 0.0)
    return logratio.detach().unsqueeze(-1) + (own - own.detach())


def clipped_weight_pg(
    logprob: Tensor, old_logprob: Tensor, advantage: Tensor, clip_low: float | None, clip_high: float | None
) -> Tensor:
    """−w A ℓ, w = clip(r, 1 − clip_low, 1 + clip_high) without a gradient: no token loses its own (CISPO).

    MiniMax-M1 (2025), eq. 4 and 5, which leave the lower bound off: None for a bound that is off. ``clip_high`` is
    added to 1, so a cap of 5 is clip_high 4. Raises ValueError for different ranks.
    """
    check_broadcast(logprob=logprob, old_logprob=old_logprob, advantage=advantage)
    weight = torch.exp(logprob - old_logprob).detach()
    weight = weight.clamp(
        min=0.0 if clip_low is None else 1 - clip_low,
        max=torch.finfo(weight.dtype).max if clip_high is None else 1 + clip_high,
    )
    return policy_gradient(logprob, weight * advantage)


def tapered_pg(logprob: Tensor, behavior_logprob: Tensor, advantage: Tensor, mask: Tensor, cap: float = 1.0) -> Tensor:
    """−w A ℓ at every token, [B, L]: REINFORCE on samples that another policy μ drew (TOPR, Le Roux et al. 2025).

    w = 1 where A >= 0, and min(π(y)/μ(y), cap) of the whole sequence y where A < 0, without a gradient: what was right
    is learnt however unlikely it has become, what was wrong is unlearnt only while the policy still says it. The sign
    test is on the advantage (reward minus baseline), [B, 1] or [B, L]. Tokens with mask 0 give 0; the sum of a row is
    −w A Σℓ. Raises ValueError for different ranks and for a cap that is not positive.
    """
    check_broadcast(logprob=logprob, behavior_logprob=behavior_logprob, advantage=advantage, mask=mask)
    if cap <= 0:
        raise ValueError(f"cap is {cap}; the largest weight of a sequence must be positive")
    keep = mask != 0
    logratio = torch.where(keep, logprob.detach() - behavior_logprob, 0.0).sum(-1, keepdim=True)  # [B, 1]
    weight = torch.where(advantage < 0, torch.exp(logratio).clamp(max=cap), 1.0)
    return policy_gradient(torch.where(keep, logprob, 0.0), torch.where(keep, weight * advantage, 0.0))


def _ratio(logprob: Tensor, old_logprob: Tensor) -> Tensor:
    """exp(logprob − old_logprob), at most max^¾ of what the dtype holds (e^66 in float32), and beyond without gradient.

    Where it overflowed, the gradient of a clipped or masked element would be 0 · inf.
    """
    return torch.exp((logprob - old_logprob).clamp(max=0.75 * math.log(torch.finfo(logprob.dtype).max)))
