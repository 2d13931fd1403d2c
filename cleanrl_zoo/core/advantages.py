"""What is done to rewards and advantages before they weigh a loss.

Rewards [P, G]: P prompts (or states) with a group of G samples each. ``mask`` (bool or 0/1 float) is 0 for a sample
that could not be scored: it is left out of every mean and std, its advantage is 0, and its reward may be anything, NaN
included. A group whose rewards are all equal, and a group of one, give exact zeros: rounding in the mean must not be
blown up by a tiny std. A NaN that counts shows in the result.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cleanrl_zoo.core.reduce import masked_mean, masked_std
from cleanrl_zoo.core.shapes import check_broadcast

GROUP_SCALES = ("group", "none", "batch")
ANCHOR_SCALES = ("group", "none")


def normalize(x: Tensor, mask: Tensor | None = None, eps: float = 1e-8, ddof: int = 1) -> Tensor:
    """(x − mean) / (std + eps) over all elements whose mask is 1; elements whose mask is 0 become 0.

    The divisor of the variance is count − ddof. One element, or elements that are all equal, give exact zeros: rounding
    in the mean must not be blown up to order one by a tiny std. x of any shape -> the same shape (broadcast with mask).
    Raises ValueError for different ranks.
    """
    check_broadcast(x=x, mask=mask)
    keep = torch.ones_like(x, dtype=torch.bool) if mask is None else mask != 0
    x, keep = torch.broadcast_tensors(x, keep)
    highest = torch.where(keep, x, -torch.inf).amax()
    lowest = torch.where(keep, x, torch.inf).amin()
    normalized = (x - masked_mean(x, keep)) / (masked_std(x, keep, ddof=ddof) + eps)
    return torch.where(keep & ~(highest <= lowest), normalized, 0.0)  # a NaN in x compares false and shows


def group_relative(
    rewards: Tensor, scale: str = "group", eps: float = 1e-4, ddof: int = 1, mask: Tensor | None = None
) -> Tensor:
    """(R − mean of its group) / divisor, [P, G] -> [P, G].

    group  std of the group + eps (GRPO, Shao et al. 2024)
    none   1 (Dr. GRPO, Liu, Z. et al. 2025)
    batch  std of the raw rewards over the batch + eps (Lite PPO, Liu, Z. et al. 2025b)

    The divisor of the variance is count − ddof. Raises ValueError for an unknown scale and for shapes that do not fit.
    """
    if scale not in GROUP_SCALES:
        raise ValueError(f"group_relative scale {scale!r} is unknown; choose one of {', '.join(GROUP_SCALES)}")
    rewards, keep, varied = _groups(rewards, mask)
    centred = rewards - masked_mean(rewards, keep, dim=1).unsqueeze(1)
    if scale == "group":
        centred = centred / (masked_std(rewards, keep, dim=1, ddof=ddof).unsqueeze(1) + eps)
    elif scale == "batch":
        centred = centred / (masked_std(rewards, keep, ddof=ddof) + eps)
    return torch.where(keep & varied, centred, 0.0)


def leave_one_out(rewards: Tensor, mask: Tensor | None = None) -> Tensor:
    """R − mean of the group's other rewards = n/(n − 1) · (R − mean), n the samples that count; [P, G] -> [P, G].

    RLOO (Kool et al. 2019; Ahmadian et al. 2024). Raises ValueError for shapes that do not fit.
    """
    rewards, keep, varied = _groups(rewards, mask)
    count = keep.sum(1, keepdim=True)
    centred = rewards - masked_mean(rewards, keep, dim=1).unsqueeze(1)
    return torch.where(keep & varied, centred * count / (count - 1).clamp(min=1), 0.0)


def gdpo(
    rewards: Tensor,
    weights: Tensor | Sequence[float],
    eps: float = 1e-4,
    ddof: int = 1,
    mask: Tensor | None = None,
) -> Tensor:
    """K rewards [P, G, K], each normalised within its group, summed with ``weights`` [K], normalised over the batch.

    Result and mask are [P, G]; eps is added to the std both times. Normalising before the sum keeps a reward that
    spreads little from drowning in one that spreads much (GDPO, Liu, S.-Y. et al. 2026). Raises ValueError for shapes
    that do not fit.
    """
    weights = torch.as_tensor(weights, device=rewards.device)
    if rewards.dim() != 3 or weights.shape != rewards.shape[2:]:
        raise ValueError(
            f"rewards have shape {list(rewards.shape)} and weights {list(weights.shape)}; give [prompts, samples, K] "
            "and [K]"
        )
    each = [group_relative(part, eps=eps, ddof=ddof, mask=mask) for part in rewards.unbind(2)]  # K of [P, G]
    total = sum(weight.to(part.dtype) * part for weight, part in zip(weights, each, strict=True))
    return normalize(total, mask, eps=eps, ddof=ddof)


def conditional_reward(easy: Tensor, hard: Tensor, threshold: float = 1.0) -> Tensor:
    """The easy reward where the hard one reaches ``threshold``, else 0: format is paid only for a right answer.

    GDPO (Liu et al. 2026). Raises ValueError for different ranks.
    """
    check_broadcast(easy=easy, hard=hard)
    return torch.where(hard >= threshold, easy, 0.0)


def overlong_penalty(length: Tensor, max_length: int, cache: int) -> Tensor:
    """0 up to max_length − cache tokens, from there linear to −1 at max_length, −1 beyond. Any shape -> same shape.

    To be added to the reward (DAPO, Yu et al. 2025, eq. 13). Raises ValueError unless 0 < cache <= max_length.
    """
    if not 0 < cache <= max_length:
        raise ValueError(f"overlong cache is {cache} with max_length {max_length}; it must lie in 1 … max_length")
    return ((max_length - cache - length) / cache).clamp(-1.0, 0.0)


def anchor_relative(
    returns: Tensor,
    anchor: Tensor,
    scale: str = "group",
    eps: float = 1e-4,
    ddof: int = 1,
    mask: Tensor | None = None,
) -> Tensor:
    """Step advantages of GiGPO (Feng et al. 2025): returns compared between equal states of a group.

    returns [P, N]: the discounted returns of all N steps of a prompt's group, in any order; anchor [P, N]: integer ids
    of the states they started from; an id is compared within its own row only. Result [P, N]: (G − mean) / (std + eps)
    over the steps that share the state, or G − mean for scale "none"; 0 for a state seen once. Raises ValueError for an
    unknown scale and for shapes that do not fit.
    """
    if scale not in ANCHOR_SCALES:
        raise ValueError(f"anchor_relative scale {scale!r} is unknown; choose one of {', '.join(ANCHOR_SCALES)}")
    check_broadcast(returns=returns, anchor=anchor)
    returns, keep, _ = _groups(returns, mask)
    row = torch.arange(len(returns), device=returns.device).unsqueeze(1)
    ids = anchor.expand_as(returns).unique(return_inverse=True)[1]  # [P, N] 0, 1, 2, … for whatever ids were given
    state = (row * returns.numel() + ids).unique(return_inverse=True)[1].flatten()  # [P·N] of this row alone

    def per_state(values: Tensor) -> Tensor:
        """[P, N] summed over every state, given back to its steps."""
        return torch.zeros_like(values).flatten().index_add(0, state, values.flatten())[state].view_as(values)

    lowest = torch.full_like(returns, torch.inf).flatten()
    lowest = lowest.scatter_reduce(0, state, torch.where(keep, returns, torch.inf).flatten(), "amin")[state]
    above = torch.where(keep, returns - lowest.view_as(returns), 0.0)  # equal returns differ by exactly nothing
    count, total = per_state(keep.to(returns.dtype)), per_state(above)
    centred = torch.where(keep, above - total / count.clamp(min=1), 0.0)
    if scale == "none":
        return centred
    variance = per_state(centred.square()) / (count - ddof).clamp(min=1)
    return torch.where(total == 0, 0.0, centred / (variance.sqrt() + eps))


def highest_variance(rewards: Tensor, count: int, mask: Tensor | None = None) -> Tensor:
    """The ``count`` prompts whose rewards vary most, as ascending indices [count]; ties go to the earlier prompt.

    StarPO-S keeps these and drops the others (RAGEN, Wang et al. 2025). rewards [P, G]. Raises ValueError
    for a count outside 1 … P.
    """
    if not 1 <= count <= len(rewards):
        raise ValueError(f"count is {count} of {len(rewards)} prompts; it must lie in 1 … {len(rewards)}")
    rewards, keep, varied = _groups(rewards, mask)
    spread = torch.where(varied.squeeze(1), masked_std(rewards, keep, dim=1), 0.0)  # [P]
    return spread.argsort(descending=True, stable=True)[:count].sort().values


def agreement_masks(values: Tensor, agree: float, disagree: float, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Where several critics' opinions say that a token is worth learning from (asymmetric PPO, Liu, J. et al. 2025).

    values [C, B, L] from C critics; the value to use is their mean. Returns two bool masks [B, L] that start from
    ``mask`` [B, L] and drop, of its tokens, the share ``agree`` on which the critics' std is smallest (for the
    advantages), and the share ``disagree`` on which it is largest (for the entropy bonus). Shares are rounded down to
    tokens; ties go by position. Raises ValueError for shares outside 0 … 1 and for fewer than two critics.
    """
    if not (0 <= agree <= 1 and 0 <= disagree <= 1):
        raise ValueError(f"shares are agree {agree} and disagree {disagree}; both must lie in 0 … 1")
    if len(values) < 2:
        raise ValueError(f"values have shape {list(values.shape)}; give [C, B, L] with at least two critics")
    spread = values.std(0)  # [B, L]
    check_broadcast(values=spread, mask=mask)
    keep = torch.ones_like(spread, dtype=torch.bool) if mask is None else (mask != 0).expand_as(spread)
    order = torch.where(keep, spread, torch.inf).flatten().argsort(stable=True)
    rank = order.argsort().view_as(spread)  # 0 where the critics agree most; what is masked comes last
    total = keep.sum().double()
    fewest, most = ((share * total + 1e-6).floor() for share in (agree, disagree))  # 0.53 of 100 tokens are 53
    return keep & (rank >= fewest), keep & (rank < total - most)


def _groups(rewards: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards [P, G] as numbers, which of them count [P, G], and which groups hold different ones [P, 1]."""
    if rewards.dim() != 2:
        raise ValueError(f"rewards have shape {list(rewards.shape)}; give [prompts, samples of each]")
    check_broadcast(rewards=rewards, mask=mask)
    if not rewards.is_floating_point():
        rewards = rewards.to(torch.get_default_dtype())
    keep = torch.ones_like(rewards, dtype=torch.bool) if mask is None else mask != 0
    rewards, keep = torch.broadcast_tensors(rewards, keep)
    highest = torch.where(keep, rewards, -torch.inf).amax(1, keepdim=True)
    lowest = torch.where(keep, rewards, torch.inf).amin(1, keepdim=True)
    return rewards, keep, ~(highest <= lowest)  # a NaN compares false, so its group counts as varied and shows it
