"""Regression targets for action values, and the slow copy of a network that they are computed with.

Shapes: reward, terminated, next_action and scalars per step [B]; action values [B, A]. gamma is a float or [B]: γ to
the number of real steps where the rewards are n-step sums. terminated is bool or 0/1 float; truncation bootstraps.
Nothing is detached: call these under ``torch.no_grad()``. All raise ValueError for ranks that do not fit.
"""

import torch
from torch import Tensor, nn

from cleanrl_zoo.core.shapes import check_broadcast, chosen


def q_target(reward: Tensor, next_q: Tensor, terminated: Tensor, gamma: float | Tensor) -> Tensor:
    """r + γ(1 − term) max_a Q(s', a) (Q-learning, Watkins 1989; DQN, Mnih et al. 2015)."""
    return _bootstrap(reward, next_q.amax(-1), terminated, gamma)


def double_q_target(
    reward: Tensor, next_q_online: Tensor, next_q_target: Tensor, terminated: Tensor, gamma: float | Tensor
) -> Tensor:
    """r + γ(1 − term) Q_target(s', argmax_a Q_online(s', a)) (double DQN, van Hasselt et al. 2016, eq. 4)."""
    check_broadcast(next_q_online=next_q_online, next_q_target=next_q_target)
    return sarsa_target(reward, next_q_target, next_q_online.argmax(-1), terminated, gamma)


def sarsa_target(
    reward: Tensor, next_q: Tensor, next_action: Tensor, terminated: Tensor, gamma: float | Tensor
) -> Tensor:
    """r + γ(1 − term) Q(s', a') for the action a' that is taken next (Sutton & Barto eq. 6.7)."""
    return _bootstrap(reward, chosen(next_q, next_action, "next_q", "next_action"), terminated, gamma)


def expected_sarsa_target(
    reward: Tensor, next_q: Tensor, next_probs: Tensor, terminated: Tensor, gamma: float | Tensor
) -> Tensor:
    """r + γ(1 − term) Σ_a π(a|s') Q(s', a) (Sutton & Barto eq. 6.9)."""
    check_broadcast(next_q=next_q, next_probs=next_probs)
    return _bootstrap(reward, (next_probs * next_q).sum(-1), terminated, gamma)


def soft_q_target(
    reward: Tensor,
    next_q_min: Tensor,
    next_logprob: Tensor,
    alpha: float | Tensor,
    terminated: Tensor,
    gamma: float | Tensor,
) -> Tensor:
    """r + γ(1 − term)(min_i Q_i(s', a') − α log π(a'|s')), a' ~ π (SAC, Haarnoja et al. 2018b, eq. 3 and 5)."""
    check_broadcast(reward=reward, next_q_min=next_q_min, next_logprob=next_logprob)
    return _bootstrap(reward, next_q_min - alpha * next_logprob, terminated, gamma)


@torch.no_grad()
def polyak_update(target_module: nn.Module, online_module: nn.Module, tau: float) -> None:
    """θ_target ← (1 − τ) θ_target + τ θ_online, in place; buffers are copied. τ = 1 copies exactly.

    Raises ValueError for τ outside [0, 1] and, before anything changes, for modules of different shapes.
    """
    if not 0 <= tau <= 1:
        raise ValueError(f"tau is {tau}; the weight of the online network must lie in [0, 1]")
    modules = target_module, online_module
    parameters, buffers = [list(m.parameters()) for m in modules], [list(m.buffers()) for m in modules]
    shapes = [[list(tensor.shape) for tensor in (*p, *b)] for p, b in zip(parameters, buffers, strict=True)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"the target's tensors have shapes {shapes[0]}, the network's {shapes[1]}; they must be equal")
    for target, online in zip(*parameters, strict=True):
        target.lerp_(online, tau)
    for target, online in zip(*buffers, strict=True):
        target.copy_(online)


def _bootstrap(reward: Tensor, next_value: Tensor, terminated: Tensor, gamma: float | Tensor) -> Tensor:
    per_step = gamma if isinstance(gamma, Tensor) and gamma.dim() > 0 else None
    check_broadcast(reward=reward, next_value=next_value, terminated=terminated, gamma=per_step)
    return reward + gamma * (1 - terminated.to(next_value.dtype)) * next_value
