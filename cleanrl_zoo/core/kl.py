"""Kullback-Leibler divergences in nats: sample estimators, the exact categorical one, an adaptive coefficient.

``sampled`` and ``other`` are log-probs, under two policies, of what the first of them drew. All three estimators have
the right mean (k2 approximately), but as losses differentiated through ``sampled`` = π, with ``other`` = ref, they
differ: E[∇k1] = 0, E[∇k2] = ∇KL(π‖ref), E[∇k3] = ∇KL(ref‖π).
"""

import math

import torch
from torch import Tensor

from cleanrl_zoo.core.shapes import check_broadcast

ADAPTIVE_KL_RULES = ("double_halve", "proportional")


def k1(sampled: Tensor, other: Tensor) -> Tensor:
    """log p − log q: unbiased for KL(p‖q), high variance, may be negative (Schulman 2020). ValueError: ranks differ."""
    check_broadcast(sampled=sampled, other=other)
    return sampled - other


def k2(sampled: Tensor, other: Tensor) -> Tensor:
    """½(log p − log q)²: biased, low variance (Schulman 2020). Raises ValueError for different ranks."""
    check_broadcast(sampled=sampled, other=other)
    return 0.5 * (sampled - other).square()


def k3(sampled: Tensor, other: Tensor) -> Tensor:
    """e^d − 1 − d with d = log q − log p: unbiased for KL(p‖q), never negative (Schulman 2020).

    Raises ValueError for different ranks.
    """
    check_broadcast(sampled=sampled, other=other)
    difference = other - sampled
    return torch.expm1(difference) - difference


def categorical_kl(logits_p: Tensor, logits_q: Tensor) -> Tensor:
    """KL(p‖q) = Σ_a p(a)(log p(a) − log q(a)) over the last dimension: [..., A], [..., A] -> [...].

    An action that p excludes by a logit of −inf adds 0. Raises ValueError for different ranks.
    """
    check_broadcast(logits_p=logits_p, logits_q=logits_q)
    logp, logq = logits_p.log_softmax(-1), logits_q.log_softmax(-1)
    return (logp.exp() * (logp - logq).masked_fill(logp == -torch.inf, 0.0)).sum(-1)


class AdaptiveKL:
    """A KL penalty's coefficient, moved to hold the KL near ``target`` (nats).

    double_halve  coef × 2 if KL > 1.5 target, ÷ 2 if KL < target / 1.5 (PPO, Schulman et al. 2017, section 4)
    proportional  coef × (1 + clip(KL/target − 1, ±0.2) · n/horizon) for n new samples (Ziegler et al. 2019, sec. 2.2)

    ``horizon`` counts samples as ``n`` does; one update takes fewer than five horizons, at which the coefficient would
    become 0 or negative. Raises ValueError for an unknown rule or settings that are not positive.
    """

    def __init__(self, target: float, coef: float, rule: str = "double_halve", horizon: float | None = None) -> None:
        if rule not in ADAPTIVE_KL_RULES:
            raise ValueError(f"adaptive KL rule {rule!r} is unknown; choose one of {', '.join(ADAPTIVE_KL_RULES)}")
        if not (target > 0 and coef > 0):
            raise ValueError(f"adaptive KL got target {target} and coef {coef}; both must be positive")
        if rule == "proportional" and (horizon is None or not horizon > 0):
            raise ValueError(
                f"adaptive KL rule 'proportional' got horizon {horizon}; give a positive number of samples"
            )
        self.target, self.coef, self.rule, self.horizon = target, float(coef), rule, horizon

    def update(self, kl: float | Tensor, n: int = 1) -> float:
        """Move the coefficient by one measured mean KL over n samples; returns the new coefficient.

        A KL that is NaN leaves it as it is. Raises ValueError for as many samples as five horizons.
        """
        ratio = float(kl) / self.target
        if self.rule == "proportional":
            if n >= 5 * self.horizon:
                raise ValueError(f"{n} samples against a horizon of {self.horizon}: must be fewer than five horizons")
            self.coef *= 1 + (0.0 if math.isnan(ratio) else min(max(ratio - 1, -0.2), 0.2)) * n / self.horizon
        elif ratio > 1.5:
            self.coef *= 2
        elif ratio < 1 / 1.5:
            self.coef /= 2
        return self.coef

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coef = float(state["coef"])
