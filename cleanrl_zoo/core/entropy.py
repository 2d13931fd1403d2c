"""Keeping a policy over a large vocabulary random enough: the entropy (nats) of the likely tokens, held in a band.

A bonus on the entropy of all tokens pays for probability anywhere, and most of 10⁵ tokens are right nowhere. AEnt (Shen
2025, arXiv:2509.03493) counts the likeliest tokens alone, renormalised, and moves the bonus's weight by what it finds.
"""

import math

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

PIECE_BYTES = 64 << 20  # of logits in memory at a time


def clamped_entropy(logits: Tensor, share: float, temperature: float = 1.0) -> Tensor:
    """Entropy of softmax(logits / temperature) over the likeliest ⌈share · V⌉ tokens, renormalised: [..., V] -> [...].

    Which tokens these are is not differentiated. A logit of −inf excludes its token. Computed in float32 at least.
    Raises ValueError for a share outside (0, 1] or a temperature that is not positive and finite.
    """
    if not (0 < share <= 1 and 0 < temperature < math.inf):
        raise ValueError(f"share is {share} and temperature {temperature}; give a share in (0, 1] and one above 0")
    count = math.ceil(round(share * logits.shape[-1], 6))  # 0.07 · 100 is 7.000000000000001
    top = logits.topk(count, sorted=False).values
    logp = (top.to(torch.promote_types(top.dtype, torch.float32)) / temperature).log_softmax(-1)
    return -(logp.exp() * logp.masked_fill(logp == -torch.inf, 0.0)).sum(-1)


def linear_clamped_entropy(hidden: Tensor, weight: Tensor, share: float, temperature: float = 1.0) -> Tensor:
    """``clamped_entropy`` of the logits hidden @ weightᵀ, some megabytes of them at a time.

    hidden [R, H]; weight [V, H] of the head -> [R]. The logits are computed again for the gradient. Raises ValueError
    as ``clamped_entropy`` does and for shapes that do not fit.
    """
    if weight.dim() != 2 or hidden.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden has shape {list(hidden.shape)} and weight {list(weight.shape)}; give [R, H] and [V, H]"
        )

    def piece(rows: Tensor) -> Tensor:
        return clamped_entropy(rows @ weight.t(), share, temperature)

    height = max(PIECE_BYTES // (len(weight) * weight.element_size()), 1)
    return torch.cat([checkpoint(piece, rows, use_reentrant=False) for rows in hidden.split(height)])


class EntropyBand:
    """The weight of an entropy bonus, moved to hold the entropy between ``low`` and ``high`` (nats).

    coef + rate · (low − entropy) below the band, coef − rate · (entropy − high) above it, and never under 0; inside the
    band it stays. Raises ValueError unless 0 <= low <= high and coef and rate are numbers of at least 0.
    """

    def __init__(self, low: float, high: float, coef: float, rate: float) -> None:
        if not 0 <= low <= high:
            raise ValueError(f"entropy band is {low} … {high}; give 0 <= low <= high")
        if not (0 <= coef < math.inf and 0 <= rate < math.inf):
            raise ValueError(f"entropy band got coef {coef} and rate {rate}; both must be numbers of at least 0")
        self.low, self.high, self.coef, self.rate = low, high, float(coef), rate

    def update(self, entropy: float | Tensor) -> float:
        """Move the weight by one measured mean entropy; returns the new weight."""
        entropy = float(entropy)
        moved = self.coef + self.rate * (max(self.low - entropy, 0.0) - max(entropy - self.high, 0.0))
        self.coef = max(moved, 0.0)
        return self.coef

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coef = float(state["coef"])
