"""Tables: action values without a network, and ε-greedy choices from them.

Tables are [..., A]; R runs side by side have [R, S, A]. An action that a state does not have is marked by RULED_OUT, a
number so low that no maximum takes it, and finite, so that its product with probability 0 is 0.
"""

import torch
from torch import Tensor, nn

RULED_OUT = -1e30
LARGEST = 1e15  # errors beyond it are those of values that diverge, far from where they would look ruled out


class Table(nn.Module):
    """A row of numbers per state: [N] states, as any number type, to [N, A]."""

    def __init__(self, states: int, actions: int) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(states, actions, dtype=torch.float64))

    def forward(self, state: Tensor) -> Tensor:
        return self.rows[state.long()]


def new_table(runs: int, allowed: Tensor) -> Tensor:
    """Action values [R, S, A] that begin at 0, or RULED_OUT where `allowed` [S, A] is false; float64."""
    return torch.where(allowed, torch.tensor(0.0, dtype=torch.float64), RULED_OUT).repeat(runs, 1, 1)


def greedy_probs(q: Tensor) -> Tensor:
    """Probabilities [..., A], even over the actions with the largest q [..., A]."""
    best = (q == q.amax(-1, keepdim=True)).to(q.dtype)
    return best / best.sum(-1, keepdim=True)


def epsilon_greedy_probs(q: Tensor, epsilon: float) -> Tensor:
    """Probabilities [..., A]: ε spread evenly over all allowed actions, the rest over those with the largest q.

    Sutton & Barto (2018), section 2.2; ties share evenly.
    """
    allowed = (q > RULED_OUT / 2).to(q.dtype)
    return (1.0 - epsilon) * greedy_probs(q) + epsilon * allowed / allowed.sum(-1, keepdim=True)


def mean_error(error: Tensor, count: Tensor | int | None = None) -> Tensor:
    """Mean of |error| over all entries, or their sum over `count`; infinite once one is beyond LARGEST.

    An infinite metric ends a run, with advice, before values that diverge come near RULED_OUT.
    """
    size = error.abs()
    mean = size.sum() / (size.numel() if count is None else count)
    return torch.where((size > LARGEST).any(), torch.inf, mean)


def sample_action(probs: Tensor, uniform: Tensor) -> Tensor:
    """One action [...] from each row of probs [..., A], up to a factor, by uniform numbers in [0, 1) [...]."""
    cumulative = probs.cumsum(-1)
    # compared with the row's own sum, which rounding may leave below 1: an action of probability 0 is never taken
    return (cumulative <= uniform.unsqueeze(-1) * cumulative[..., -1:]).sum(-1)
