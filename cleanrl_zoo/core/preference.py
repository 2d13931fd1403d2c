"""Losses on preferences: which of two completions is better, or whether one is good. Unreduced, to be minimised.

``chosen`` and ``rejected`` are a policy's log-probs of whole completions in nats, summed over their tokens, [B];
``ref_…`` those of the frozen reference. h = (chosen − ref_chosen) − (rejected − ref_rejected). The rewards that come
with a loss are those that the policy implies, detached: to be read and counted. Inputs have equal ranks and broadcast.
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from cleanrl_zoo.core.shapes import check_broadcast

Losses = tuple[Tensor, Tensor, Tensor]  # loss, chosen reward, rejected reward, each [B]


def dpo(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    beta: float,
    label_smoothing: float = 0.0,
    offset: float | Tensor = 0.0,
) -> Losses:
    """−log σ(z), z = βh − offset (DPO, Rafailov et al. 2023, eq. 7); rewards β(chosen − ref_chosen) and the like.

    ``label_smoothing`` ε gives −(1−ε) log σ(z) − ε log σ(−z): a share ε of the labels is wrong (cDPO, Mitchell 2023).
    ``offset`` is by how much the rewards have to differ, a number or [B]: α f(score difference) in ODPO (Amini et al.
    2024). SPIN (Chen et al. 2024, eq. 4.7) is this loss with the previous iterate as reference and its samples as
    rejected. At h = 0 it is log 2. Raises ValueError for different ranks and for ε outside [0, 1].
    """
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing is {label_smoothing}; a share of wrong labels is from 0 to 1")
    difference, *rewards = _implied(chosen, rejected, ref_chosen, ref_rejected, beta)
    if isinstance(offset, Tensor) and offset.dim() > 0:
        check_broadcast(chosen=chosen, offset=offset)
    z = beta * difference - offset
    return -(1 - label_smoothing) * logsigmoid(z) - label_smoothing * logsigmoid(-z), *rewards


def ipo(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float) -> Losses:
    """(h − 1/(2β))²: h is pulled to a finite distance, β being the paper's τ (IPO, Azar et al. 2023, eq. 17).

    Log-probs are summed as printed; averaged over their tokens before the call they give the length-averaged form.
    Raises ValueError for different ranks and for a β that is not positive.
    """
    if beta <= 0:
        raise ValueError(f"beta is {beta}; it must be positive, since h is pulled to 1/(2β)")
    difference, *rewards = _implied(chosen, rejected, ref_chosen, ref_rejected, beta)
    return (difference - 1 / (2 * beta)).square(), *rewards


def hinge(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float) -> Losses:
    """max(0, 1 − βh) (SLiC's loss on log-ratios: RSO, Liu et al. 2024). Raises ValueError for different ranks."""
    difference, *rewards = _implied(chosen, rejected, ref_chosen, ref_rejected, beta)
    return relu(1 - beta * difference), *rewards


def simpo(
    chosen: Tensor, rejected: Tensor, chosen_len: Tensor, rejected_len: Tensor, beta: float, gamma: float
) -> Losses:
    """−log σ(β chosen/n_w − β rejected/n_l − γ), n the numbers of tokens (SimPO, Meng et al. 2024, eq. 6).

    No reference; the rewards are β times the mean log-probs. A completion without tokens has mean 0. Raises ValueError
    for different ranks.
    """
    check_broadcast(chosen=chosen, rejected=rejected, chosen_len=chosen_len, rejected_len=rejected_len)
    chosen_reward, rejected_reward = (
        beta * chosen / chosen_len.clamp(min=1),
        beta * rejected / rejected_len.clamp(min=1),
    )
    loss = -logsigmoid(chosen_reward - rejected_reward - gamma)
    return loss, chosen_reward.detach(), rejected_reward.detach()


def orpo(chosen_mean: Tensor, rejected_mean: Tensor, lambda_: float) -> Losses:
    """−λ log σ(log odds_w − log odds_l), odds = p/(1−p), p = exp(mean log-prob): the odds-ratio term of ORPO alone.

    Hong et al. 2024, eq. 4 to 7; the caller adds the likelihood of the chosen one, −chosen_mean. No reference; the
    rewards are λ times the mean log-probs. Exact for p near 1, and finite at p = 1. Raises ValueError for different
    ranks.
    """
    check_broadcast(chosen_mean=chosen_mean, rejected_mean=rejected_mean)
    loss = -lambda_ * logsigmoid(_log_odds(chosen_mean) - _log_odds(rejected_mean))
    return loss, lambda_ * chosen_mean.detach(), lambda_ * rejected_mean.detach()


def kto(
    logprob: Tensor,
    ref_logprob: Tensor,
    desirable: Tensor,
    kl: float | Tensor,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """λ_D (1 − σ(β(t − z0))) of good completions, λ_U (1 − σ(β(z0 − t))) of bad ones, t = logprob − ref_logprob.

    KTO (Ethayarajh et al. 2024, eq. 8), unpaired: desirable [B] is bool or 0/1 float. z0 = max(0, kl), without a
    gradient: ``kl`` is the mean log-ratio of completions after prompts that are not theirs, a number, over the whole
    optimizer step (or [B]). Returns the loss and the reward βt, detached. Raises ValueError for different ranks.
    """
    check_broadcast(logprob=logprob, ref_logprob=ref_logprob, desirable=desirable)
    baseline = torch.as_tensor(kl, dtype=logprob.dtype, device=logprob.device).detach().clamp(min=0)
    if baseline.dim() > 0:
        check_broadcast(logprob=logprob, kl=baseline)
    logratio = logprob - ref_logprob
    good = desirable != 0
    gain = torch.where(good, logratio - baseline, baseline - logratio)
    value = torch.sigmoid(-beta * gain)  # 1 − σ(β gain) without its rounding
    return torch.where(good, desirable_weight * value, undesirable_weight * value), beta * logratio.detach()


def bradley_terry(
    chosen_score: Tensor, rejected_score: Tensor, margin: float | Tensor = 0.0, center_coef: float = 0.0
) -> Tensor:
    """−log σ(chosen − rejected − margin) + center_coef (chosen + rejected)²: the loss of a reward model, [B].

    Bradley & Terry (1952) as in Ouyang et al. 2022, eq. 1; ``margin``, a number or [B], is how much better the chosen
    one was judged (Llama 2, Touvron et al. 2023, eq. 2); the square keeps scores around 0, which the first term leaves
    free (Eisenstein et al. 2023). Raises ValueError for different ranks.
    """
    check_broadcast(chosen_score=chosen_score, rejected_score=rejected_score)
    if isinstance(margin, Tensor) and margin.dim() > 0:
        check_broadcast(chosen_score=chosen_score, margin=margin)
    loss = -logsigmoid(chosen_score - rejected_score - margin)
    return loss + center_coef * (chosen_score + rejected_score).square()


def preference_accuracy(chosen_reward: Tensor, rejected_reward: Tensor, tolerance: float | Tensor = 0.0) -> Tensor:
    """1 where the chosen one has the higher reward, 0 where the lower, ½ where they differ by at most ``tolerance``.

    Rewards [B] -> [B]. So a model that prefers nothing gets ½ and not what its rounding errors say. Raises ValueError
    for different ranks.
    """
    check_broadcast(chosen_reward=chosen_reward, rejected_reward=rejected_reward)
    difference = chosen_reward - rejected_reward
    return torch.where(difference.abs() <= tolerance, 0.5, (difference > 0).to(difference.dtype))


def _implied(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float) -> Losses:
    """h and the two rewards. Each log-prob meets its own reference first: both may be −10⁴, their difference small."""
    check_broadcast(chosen=chosen, rejected=rejected, ref_chosen=ref_chosen, ref_rejected=ref_rejected)
    better, worse = chosen - ref_chosen, rejected - ref_rejected
    return better - worse, beta * better.detach(), beta * worse.detach()


def _log_odds(logprob: Tensor) -> Tensor:
    """log(p / (1 − p)), log 1 − p from −expm1: p itself would round to 1. At p = 1 that of the next number below."""
    logprob = logprob.clamp(max=-torch.finfo(logprob.dtype).tiny)
    return logprob - torch.log(-torch.expm1(logprob))
