"""What was seen of many worlds at once, by state and action, for planning on tables."""

from dataclasses import dataclass

import torch
from torch import Tensor

from cleanrl_zoo.data.episodes import Transition


@dataclass
class TableModel:
    """A deterministic model of R worlds: what followed each pair of state and action last time, all [R, S, A].

    A pair that was never tried leads back to its state with reward 0 (Sutton & Barto 2018, section 8.3).
    """

    reward: Tensor  # float64
    next_obs: Tensor  # int64
    terminated: Tensor  # bool
    tried: Tensor  # bool, the model holds something
    when: Tensor  # int64, the step at which the pair was tried last

    @classmethod
    def empty(cls, runs: int, states: int, actions: int) -> "TableModel":
        """A model that has seen nothing."""
        shape = runs, states, actions
        itself = torch.arange(states).view(1, -1, 1).expand(shape).clone()
        no, zero = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.int64)
        return cls(zero.double(), itself, no, no.clone(), zero)

    def remember(self, step: Transition, when: int) -> None:
        """Puts in one real step of every world, [R], made at step `when`."""
        pair = torch.arange(len(self.tried)), step.obs, step.action
        self.reward[pair], self.next_obs[pair], self.terminated[pair] = step.reward, step.next_obs, step.terminated
        self.tried[pair], self.when[pair] = True, when

    def recall(self, obs: Tensor, action: Tensor) -> Transition:
        """What would follow one pair of every world; obs and action int64 [..., R]."""
        pair = torch.arange(len(self.tried)), obs, action
        ended = self.terminated[pair]
        return Transition(obs, action, self.reward[pair], self.next_obs[pair], ended, ended)

    def leading_to(self, obs: Tensor) -> Tensor:
        """Which pairs are remembered to lead to state `obs` [R] of their world, and not to an end: bool [R, S, A]."""
        return self.tried & ~self.terminated & (self.next_obs == obs.view(-1, 1, 1))
