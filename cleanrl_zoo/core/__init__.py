"""Pure tensor maths: no environment, model, file or config."""

from cleanrl_zoo.core.advantages import normalize
from cleanrl_zoo.core.distributions import Categorical, DiagGaussian, SquashedGaussian
from cleanrl_zoo.core.kl import AdaptiveKL, categorical_kl, k1, k2, k3
from cleanrl_zoo.core.policy_losses import clipped_surrogate, kl_penalized_surrogate, policy_gradient
from cleanrl_zoo.core.reduce import aggregate, explained_variance, masked_mean, masked_std
from cleanrl_zoo.core.returns import discounted_returns, gae, lambda_returns, n_step_returns
from cleanrl_zoo.core.statistics import (
    interquartile_mean,
    probability_of_improvement,
    stratified_bootstrap,
    update_moments,
)
from cleanrl_zoo.core.targets import (
    double_q_target,
    expected_sarsa_target,
    polyak_update,
    q_target,
    sarsa_target,
    soft_q_target,
)
from cleanrl_zoo.core.trust_region import (
    LineSearch,
    conjugate_gradient,
    fisher_factors,
    fisher_vector_product,
    line_search,
)
from cleanrl_zoo.core.value_losses import clipped_value_loss, squared_value_loss

__all__ = [
    "AdaptiveKL",
    "Categorical",
    "DiagGaussian",
    "LineSearch",
    "SquashedGaussian",
    "aggregate",
    "categorical_kl",
    "clipped_surrogate",
    "clipped_value_loss",
    "conjugate_gradient",
    "discounted_returns",
    "double_q_target",
    "expected_sarsa_target",
    "explained_variance",
    "fisher_factors",
    "fisher_vector_product",
    "gae",
    "interquartile_mean",
    "k1",
    "k2",
    "k3",
    "kl_penalized_surrogate",
    "lambda_returns",
    "line_search",
    "masked_mean",
    "masked_std",
    "n_step_returns",
    "normalize",
    "policy_gradient",
    "polyak_update",
    "probability_of_improvement",
    "q_target",
    "sarsa_target",
    "soft_q_target",
    "squared_value_loss",
    "stratified_bootstrap",
    "update_moments",
]
