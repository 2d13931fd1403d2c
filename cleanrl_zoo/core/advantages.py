"""What is done to advantages before they weigh a loss."""

import torch
from torch import Tensor

from cleanrl_zoo.core.reduce import masked_mean, masked_std
from cleanrl_zoo.core.shapes import check_broadcast


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
