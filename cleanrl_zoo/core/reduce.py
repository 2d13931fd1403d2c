"""From many numbers to one: means over a mask, the reduction of a loss, explained variance.

``mask`` has the rank of ``x``, is bool or 0/1 float, and 1 means that the element counts. What stands where the mask
is 0 never reaches the result.
"""

import torch
from torch import Tensor

from cleanrl_zoo.core.shapes import check_broadcast, check_equal

AGGREGATE_MODES = ("token_mean", "sequence_mean", "constant", "sum")


def masked_mean(x: Tensor, mask: Tensor | None = None, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """Mean of the elements whose mask is 1, over ``dim`` (None: all). 0 where no element counts."""
    x, keep = _with_mask(x, mask)
    return _sum(x, dim) / _sum(keep, dim).clamp(min=1)


def masked_std(
    x: Tensor, mask: Tensor | None = None, dim: int | tuple[int, ...] | None = None, ddof: int = 1
) -> Tensor:
    """Standard deviation of the elements whose mask is 1, divisor count − ddof. 0 where count <= ddof."""
    x, keep = _with_mask(x, mask)
    count = _sum(keep, dim, keepdim=True)
    mean = _sum(x, dim, keepdim=True) / count.clamp(min=1)
    squares = _sum(keep * (x - mean).square(), dim)
    divisor = _sum(keep, dim) - ddof
    variance = squares * (divisor > 0) / divisor.clamp(min=1)
    spread = variance > 0  # the root of 0 has no finite slope
    return torch.where(spread, torch.where(spread, variance, 1.0).sqrt(), variance)


def aggregate(
    loss: Tensor, mask: Tensor | None = None, mode: str = "token_mean", denominator: float | Tensor | None = None
) -> Tensor:
    """Reduce a loss [B, L] (or [B]) to a scalar; m is the mask, n_i = Σ_t m_it, D the denominator.

    token_mean     Σ m x / D, D = Σ m by default
    sequence_mean  Σ_i (Σ_t m x / n_i) / D, D = B by default
    constant       Σ m x / D, D must be given (Dr. GRPO, Liu et al. 2025: B · L_max)
    sum            Σ m x / D, D = B by default

    ``denominator`` is the TOTAL divisor of the whole optimizer step, over all micro-batches and ranks. Given that, the
    sum of the parts' results is the whole's, however the batch was split. A row without tokens adds 0 and counts in B.
    Raises ValueError for an unknown mode, a denominator that is missing or a number that is not positive (a tensor is
    not looked at), or different ranks.
    """
    if mode not in AGGREGATE_MODES:
        raise ValueError(f"aggregate mode {mode!r} is unknown; choose one of {', '.join(AGGREGATE_MODES)}")
    if denominator is None and mode == "constant":
        raise ValueError("aggregate mode 'constant' needs a denominator: sequences times maximal length of the step")
    if isinstance(denominator, int | float) and not denominator > 0:
        raise ValueError(f"aggregate denominator is {denominator}; it must be positive")
    loss, keep = _with_mask(loss, mask)
    if mode == "sequence_mean":
        per_row = tuple(range(1, loss.dim()))
        rows = loss.sum(per_row) / keep.sum(per_row).clamp(min=1) if per_row else loss  # [B]
        return rows.sum() / (len(rows) if denominator is None else denominator)
    if denominator is None:
        denominator = keep.sum().clamp(min=1) if mode == "token_mean" else len(loss)
    return loss.sum() / denominator


def explained_variance(prediction: Tensor, target: Tensor) -> Tensor:
    """1 − Var(target − prediction) / Var(target): 1 perfect, 0 no better than a constant, below 0 worse.

    A constant target, which holds no variance to explain, gives 0, and so does an empty one. Raises ValueError for
    unequal shapes.
    """
    check_equal(prediction=prediction, target=target)
    if target.numel() == 0:
        return target.new_zeros(())
    constant = target.amax() <= target.amin()
    explained = 1 - (target - prediction).var(correction=0) / target.var(correction=0)
    return torch.where(constant, 0.0, explained)


def _with_mask(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """x with zeros where the mask is 0, and the mask as numbers, both of the broadcast shape."""
    if not x.is_floating_point():
        x = x.to(torch.get_default_dtype())
    if mask is None:
        return x, torch.ones_like(x)
    check_broadcast(x=x, mask=mask)
    x, mask = torch.broadcast_tensors(x, mask)
    return torch.where(mask != 0, x, 0.0), (mask != 0).to(x.dtype)


def _sum(x: Tensor, dim: int | tuple[int, ...] | None, keepdim: bool = False) -> Tensor:
    return x.sum(dim=tuple(range(x.dim())) if dim is None else dim, keepdim=keepdim)
