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
    Raises ValueError for a share outside (0, 1] or a temperature that is not positive.
    """
    if not (0 < share <= 1 and temperature > 0):
        raise ValueError(f"share is {share} and temperature {temperature}; give a share in (0, 1] and a positive one")
    top = logits.topk(math.ceil(share * logits.shape[-1]), sorted=False).values
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

    coef + rate · (low − entropy) below the band, coef − rate · (entropy − high) above it, never under 0 or over
    ``most``; inside the band it stays. Raises ValueError unless 0 <= low <= high and no other setting is negative.
    """

    def __init__(self, low: float, high: float, coef: float, rate: float, most: float = 1.0) -> None:
        if not 0 <= low <= high:
            raise ValueError(f"entropy band is {low} … {high}; give 0 <= low <= high")
        if min(coef, rate, most) < 0:
            raise ValueError(f"entropy band got coef {coef}, rate {rate}, most {most}; none may be negative")
        self.low, self.high, self.coef, self.rate, self.most = low, high, float(coef), rate, most

    def update(self, entropy: float | Tensor) -> float:
        """Move the weight by one measured mean entropy; returns the new weight."""
        entropy = float(entropy)
        self.coef += self.rate * (max(self.low - entropy, 0.0) - max(entropy - self.high, 0.0))
        self.coef = min(max(self.coef, 0.0), self.most)
        return self.coef

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coef = float(state["coef"])
