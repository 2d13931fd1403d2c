"""Action distributions as plain tensor code, light enough to be built inside a compiled function.

The last dimension is the action's: log-probs, entropies and KLs (nats) are sums over it, [..., A] -> [...].
``sample`` takes ready-made ``noise``, so that a whole rollout's can be drawn before the loop, or a ``generator``.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from cleanrl_zoo.core.kl import categorical_kl
from cleanrl_zoo.core.shapes import check_broadcast, check_fits, chosen

LOG_2PI = math.log(2 * math.pi)


class DiagGaussian:
    """Independent normal distributions. mean [..., A]; log_std [..., A], or [A] shared by all rows.

    Raises ValueError for a log_std of another shape, which would widen the mean.
    """

    def __init__(self, mean: Tensor, log_std: Tensor) -> None:
        check_fits(mean, log_std=log_std)
        self.mean, self.log_std = mean, log_std.expand_as(mean)

    def sample(self, noise: Tensor | None = None, generator: torch.Generator | None = None) -> Tensor:
        """mean + std · noise, noise standard normal, of the mean's shape. Reparameterised (differentiable)."""
        if noise is None:
            noise = _draw(torch.randn, self.mean, generator)
        check_broadcast(mean=self.mean, noise=noise)
        return self.mean + self.log_std.exp() * noise

    def log_prob(self, action: Tensor) -> Tensor:
        """Σ_A −½((a − μ)/σ)² − log σ − ½ log 2π. Raises ValueError if the action's rank is not the mean's."""
        check_broadcast(mean=self.mean, action=action)
        standard = (action - self.mean) * torch.exp(-self.log_std)
        return (-0.5 * standard.square() - self.log_std - 0.5 * LOG_2PI).sum(-1)

    def entropy(self) -> Tensor:
        """Σ_A log σ + ½ log 2πe."""
        return (self.log_std + 0.5 * (1 + LOG_2PI)).sum(-1)

    def kl(self, other: "DiagGaussian") -> Tensor:
        """KL(self‖other) = Σ_A ½(e^{2d} − 1 − 2d + ((μ − μ')/σ')²), d = log σ − log σ'; exactly 0 for equal ones."""
        check_broadcast(mean=self.mean, other_mean=other.mean)
        difference = 2 * (self.log_std - other.log_std)
        distance = (self.mean - other.mean) * torch.exp(-other.log_std)
        return 0.5 * (torch.expm1(difference) - difference + distance.square()).sum(-1)

    def mode(self) -> Tensor:
        return self.mean


class Categorical:
    """Discrete distribution over A actions from unnormalised log-probs, logits [..., A]; −inf excludes an action."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits.log_softmax(-1)  # normalised

    def sample(self, noise: Tensor | None = None, generator: torch.Generator | None = None) -> Tensor:
        """argmax_a logit_a + Gumbel_a -> int64 [...]; noise is uniform in [0, 1), of the logits' shape."""
        if noise is None:
            noise = _draw(torch.rand, self.logits, generator)
        check_broadcast(logits=self.logits, noise=noise)
        return (self.logits + gumbel(noise)).argmax(-1)

    def log_prob(self, action: Tensor) -> Tensor:
        """action [...] of integers -> [...]. Raises ValueError unless it has one dimension fewer than the logits."""
        return chosen(self.logits, action, "logits", "action")

    def entropy(self) -> Tensor:
        """−Σ_a p log p."""
        return -(self.logits.exp() * self.logits.masked_fill(self.logits == -torch.inf, 0.0)).sum(-1)

    def kl(self, other: "Categorical") -> Tensor:
        """KL(self‖other)."""
        return categorical_kl(self.logits, other.logits)

    def mode(self) -> Tensor:
        return self.logits.argmax(-1)


class SquashedGaussian:
    """a = low + (high − low)(1 + tanh u)/2 with u ~ N(mean, std) (SAC, Haarnoja et al. 2018, appendix C).

    mean, log_std as for DiagGaussian; low, high: finite bounds, tensors [A] (or what broadcasts to it) or floats.
    There is no closed form for the entropy: −log-prob of a sample estimates it. Raises ValueError for bounds of
    another shape, which would widen the mean.
    """

    def __init__(self, mean: Tensor, log_std: Tensor, low: Tensor | float, high: Tensor | float) -> None:
        self.base = DiagGaussian(mean, log_std)
        self.low = torch.as_tensor(low, dtype=mean.dtype, device=mean.device)
        self.high = torch.as_tensor(high, dtype=mean.dtype, device=mean.device)
        check_fits(mean, low=self.low, high=self.high)

    def sample(self, noise: Tensor | None = None, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Reparameterised (action [..., A], logprob [...]); noise as for DiagGaussian.

        The log-prob is computed from u itself, so it stays exact where tanh u has rounded to ±1.
        """
        pre_squash = self.base.sample(noise, generator)
        return self._squash(pre_squash), self._log_prob(pre_squash)

    def log_prob(self, action: Tensor) -> Tensor:
        """Log-density of an action. Actions at or beyond the bounds are taken as the nearest that has a finite u."""
        check_broadcast(mean=self.base.mean, action=action)
        share = (action - self.low) / (self.high - self.low)  # (1 + tanh u)/2 = σ(2u)
        return self._log_prob(0.5 * torch.logit(share, eps=torch.finfo(share.dtype).eps))

    def kl(self, other: "SquashedGaussian") -> Tensor:
        """KL(self‖other) for equal bounds: that of the normal distributions, since squashing is one-to-one."""
        return self.base.kl(other.base)

    def mode(self) -> Tensor:
        """The squashed mean: the deterministic action (the median, not the maximum of the density)."""
        return self._squash(self.base.mean)

    def _squash(self, pre_squash: Tensor) -> Tensor:
        action = self.low + (self.high - self.low) * (0.5 + 0.5 * torch.tanh(pre_squash))
        return torch.clamp(action, self.low, self.high)  # rounding can step over a bound

    def _log_prob(self, pre_squash: Tensor) -> Tensor:
        # log |da/du| = log((high − low)/2 · (1 − tanh² u)), and 1 − tanh² u = 4 σ(2u) σ(−2u), which cannot overflow.
        slope = F.logsigmoid(2 * pre_squash) + F.logsigmoid(-2 * pre_squash) + torch.log(2 * (self.high - self.low))
        return self.base.log_prob(pre_squash) - slope.sum(-1)


def gumbel(uniform: Tensor) -> Tensor:
    """Gumbel's noise of `uniform` noise in [0, 1): argmax_a logit_a + Gumbel_a has the distribution of the logits."""
    return -torch.log(-torch.log(uniform))


@torch.no_grad()
def policy_noise(
    shape: tuple[int, ...], log_std: Tensor | None, generator: torch.Generator, device: str = "cpu"
) -> Tensor:
    """What makes samples of a policy's outputs when added to them, `shape` = [..., A], so that the noise of a whole
    rollout can be drawn at once.

    To means of standard deviation exp(`log_std`), [A], it adds σ · ε, and the sum is the action of `DiagGaussian`. To
    logits (`log_std` is None) it adds Gumbel's noise, and the largest sum is the action of `Categorical`.
    """
    if log_std is None:
        return gumbel(torch.rand(shape, generator=generator, device=device))
    return log_std.exp() * torch.randn(shape, generator=generator, device=device)


def _draw(source: Callable[..., Tensor], like: Tensor, generator: torch.Generator | None) -> Tensor:
    return source(like.shape, generator=generator, dtype=like.dtype, device=like.device)
