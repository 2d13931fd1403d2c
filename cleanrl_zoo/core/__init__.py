"""Pure tensor maths: no environment, model, file or config."""

from cleanrl_zoo.core.advantages import (
    agreement_masks,
    anchor_relative,
    conditional_reward,
    gdpo,
    group_relative,
    highest_variance,
    leave_one_out,
    normalize,
    overlong_penalty,
)
from cleanrl_zoo.core.distributions import Categorical, DiagGaussian, SquashedGaussian
from cleanrl_zoo.core.entropy import EntropyBand, clamped_entropy, linear_clamped_entropy
from cleanrl_zoo.core.kl import AdaptiveKL, categorical_kl, k1, k2, k3
from cleanrl_zoo.core.logprobs import linear_logprobs, token_entropy, token_logprobs
from cleanrl_zoo.core.off_policy import (
    banded_weight,
    decoupled_surrogate,
    sequence_weight,
    token_veto,
    truncated_weight,
)
from cleanrl_zoo.core.policy_losses import (
    clipped_surrogate,
    clipped_weight_pg,
    kl_penalized_surrogate,
    policy_gradient,
    sequence_logratio,
    tapered_pg,
)
from cleanrl_zoo.core.preference import bradley_terry, dpo, hinge, ipo, kto, orpo, preference_accuracy, simpo
from cleanrl_zoo.core.reduce import aggregate, explained_variance, masked_mean, masked_std
from cleanrl_zoo.core.returns import bilevel_gae, discounted_returns, gae, lambda_returns, n_step_returns
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
    "EntropyBand",
    "LineSearch",
    "SquashedGaussian",
    "aggregate",
    "agreement_masks",
    "anchor_relative",
    "banded_weight",
    "bilevel_gae",
    "bradley_terry",
    "categorical_kl",
    "clamped_entropy",
    "clipped_surrogate",
    "clipped_value_loss",
    "clipped_weight_pg",
    "conditional_reward",
    "conjugate_gradient",
    "decoupled_surrogate",
    "discounted_returns",
    "double_q_target",
    "dpo",
    "expected_sarsa_target",
    "explained_variance",
    "fisher_factors",
    "fisher_vector_product",
    "gae",
    "gdpo",
    "group_relative",
    "highest_variance",
    "hinge",
    "interquartile_mean",
    "ipo",
    "k1",
    "k2",
    "k3",
    "kl_penalized_surrogate",
    "kto",
    "lambda_returns",
    "leave_one_out",
    "line_search",
    "linear_clamped_entropy",
    "linear_logprobs",
    "masked_mean",
    "masked_std",
    "n_step_returns",
    "normalize",
    "orpo",
    "overlong_penalty",
    "policy_gradient",
    "polyak_update",
    "preference_accuracy",
    "probability_of_improvement",
    "q_target",
    "sarsa_target",
    "sequence_logratio",
    "sequence_weight",
    "simpo",
    "soft_q_target",
    "squared_value_loss",
    "stratified_bootstrap",
    "tapered_pg",
    "token_entropy",
    "token_logprobs",
    "token_veto",
    "truncated_weight",
    "update_moments",
]
