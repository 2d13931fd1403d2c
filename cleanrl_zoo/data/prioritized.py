"""Prioritised experience replay: transitions drawn in proportion to how surprising they were.

Schaul, Quan, Antonoglou & Silver (2016), "Prioritized Experience Replay", arXiv:1511.05952.

    P(i) = p_i^α / Σ_k p_k^α                                                              equation 1
    p_i  = |δ_i| + ε   (proportional)     or     p_i = 1 / rank(i)   (rank-based)         section 3.3
    w_i  = (N · P(i))^−β / max_j w_j,  the maximum over the batch                         section 3.4

A batch is drawn in strata: one transition from each of B ranges of equal probability (appendix B.2.1).
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cleanrl_zoo.data.replay import Replay


class SumTree:
    """Weights of leaves with the sums of every `FAN_OUT` of them, of every `FAN_OUT` of these sums, and so on.

    All entries of a batch go through a level together. Sums are computed anew from below and never corrected by
    differences, so that they do not drift.

    Args:
        levels: float64 zeros of the lengths `SumTree.lengths(size)`, leaves first.
    """

    FAN_OUT = 16  # wide, because a level costs a few calls whatever its width
    TOP = 4096  # at most so many entries at the top, searched as a whole

    def __init__(self, levels: list[np.ndarray]) -> None:
        self.levels, self.leaves = levels, levels[0]

    @classmethod
    def lengths(cls, size: int) -> list[int]:
        """How long the levels of a tree of `size` leaves are, full groups all of them."""
        lengths = [-(-size // cls.FAN_OUT) * cls.FAN_OUT]
        while lengths[-1] > cls.TOP:
            lengths.append(-(-lengths[-1] // cls.FAN_OUT**2) * cls.FAN_OUT)
        return lengths

    @property
    def total(self) -> float:
        return float(self.levels[-1].sum())

    def set(self, index: np.ndarray, weight: np.ndarray | float) -> None:
        """Gives the leaves `index` [B] their weights [B], the last where one occurs twice."""
        self.leaves[index] = weight
        for below, above in zip(self.levels, self.levels[1:], strict=False):
            index = index // self.FAN_OUT
            above[index] = self._sums(below.reshape(-1, self.FAN_OUT).take(index, 0))

    def set_all(self, weights: np.ndarray) -> None:
        """Gives the first leaves these weights and the others none."""
        self.leaves[:] = 0
        self.leaves[: len(weights)] = weights
        for below, above in zip(self.levels, self.levels[1:], strict=False):
            above[: len(below) // self.FAN_OUT] = self._sums(below.reshape(-1, self.FAN_OUT))

    @staticmethod
    def _sums(rows: np.ndarray) -> np.ndarray:
        """Of each row, bit for bit the same whichever rows stand beside it; in half the time of `rows.sum(1)`."""
        return np.einsum("ij->i", rows)

    def find(self, fraction: np.ndarray) -> np.ndarray:
        """The leaves [B] at these fractions [B] of the total, each in [0, 1). One without weight is never found."""
        sums = torch.from_numpy(self.levels[-1]).cumsum(0).numpy()  # in half of NumPy's time
        mass = np.minimum(fraction * sums[-1], _below(sums[-1]))
        node = sums.searchsorted(mass, side="right")
        mass -= sums[node] - self.levels[-1][node]
        row = np.arange(len(mass))
        for level in reversed(self.levels[:-1]):
            children = level.reshape(-1, self.FAN_OUT).take(node, 0)  # [B, FAN_OUT]
            sums = torch.from_numpy(children).cumsum(1).numpy()
            # rounding must not lead before the first child with a weight, nor beyond the last
            mass = np.maximum(np.minimum(mass, _below(sums[:, -1])), 0.0)
            child = (sums > mass[:, None]).argmax(1)
            mass -= sums[row, child] - children[row, child]
            node = node * self.FAN_OUT + child
        return node


def _below(x: np.ndarray) -> np.ndarray:
    """A number just smaller than a positive x."""
    return x * (1 - 2.0**-52)


class PrioritizedReplay(Replay):
    """A replay whose `indices` are drawn by priority, |δ| + ε of the transition's last TD error δ; see the subclasses.

    Args:
        *args, **kwargs: of `Replay`.
        alpha: exponent α of the priorities; 0 is uniform.
        epsilon: ε, so that nothing is never seen again.

    After each update: `update_priorities(index, td_error)`. New transitions have the largest priority given so far.
    """

    def __init__(self, *args: Any, alpha: float = 0.6, epsilon: float = 1e-6, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.alpha, self.epsilon = alpha, epsilon
        # one leaf per row, P(i) but for the sum; 0 where nothing can be sampled
        self.tree = SumTree([array for name, array in self._arrays.items() if name.startswith("tree")])
        self._largest = 1.0  # priority given so far
        self._synced = 1  # rows that the tree knows of, as `_total` counts them

    @classmethod
    def _layout(cls, *args: Any) -> dict[str, Any]:
        layout = super()._layout(*args)
        lengths = SumTree.lengths(math.prod(layout["record"][0]))
        return {**layout, **{f"tree{i}": ((n,), np.dtype(np.float64)) for i, n in enumerate(lengths)}}

    def _weigh(self, index: np.ndarray, priority: np.ndarray) -> np.ndarray:
        """Notes the priorities [B] of the rows `index` [B]; gives their leaves [B]."""
        raise NotImplementedError

    def indices(self, batch_size: int, generator: torch.Generator) -> np.ndarray:
        """Row numbers int64 [B] for `gather`, row i drawn with probability P(i); in the order of the store.

        Raises:
            ValueError: when nothing has been stored.
        """
        if not len(self):
            raise ValueError("the replay is empty: add transitions before sampling")
        self._sync()
        draw = torch.rand(batch_size, generator=generator, dtype=torch.float64).numpy()
        return self.tree.find((np.arange(batch_size) + draw) / batch_size)

    def probabilities(self, index: np.ndarray) -> np.ndarray:
        """P(i) of the row numbers `index` [B], equation 1; 0 where a row cannot be sampled."""
        self._sync()
        return self.tree.leaves[index] / self.tree.total

    def weights(self, index: np.ndarray, beta: float) -> Tensor:
        """Importance weights of a batch, float32 [B], the largest 1; to be asked for before its priorities change."""
        leaves = self.tree.leaves.take(index)  # N and the sum over all rows cancel against the largest
        return torch.from_numpy(((leaves / leaves.min()) ** -beta).astype(np.float32))

    def update_priorities(self, index: np.ndarray, td_error: Tensor | np.ndarray) -> None:
        """Gives the rows `index` [B] their priorities from the errors δ [B]; rows that were lost since are left out.

        Raises:
            ValueError: when an error is NaN or Inf.
        """
        priority = np.abs(np.asarray(td_error, dtype=np.float64)) + self.epsilon
        largest = float(priority.max())
        if not math.isfinite(largest):
            raise ValueError("a TD error is NaN or Inf: no priority can be made of it")
        self._largest = max(self._largest, largest)
        if self._synced != self._total:
            self._sync()
            kept = self.tree.leaves[index] > 0
            index, priority = index[kept], priority[kept]
        self.tree.set(index, self._weigh(index, priority))

    def _sync(self) -> None:
        """Lets the tree know of the rows that were added since the last draw, and of those that were lost."""
        if self._synced == self._total:
            return
        first = max(1, self._total - self.steps)  # the oldest row now, and what it was then
        lost = np.arange(max(1, self._synced - self.steps), min(first, self._synced))
        added = np.arange(max(first, self._synced), self._total)
        envs = np.arange(self.num_envs)[:, None] * self._stride
        lost, added = ((envs + rows % self.slots).ravel() for rows in (lost, added))
        new = self._weigh(added, np.full(len(added), self._largest))
        # a slot may have been lost and filled again: the last weight is the one that stays
        self.tree.set(np.concatenate([lost, added]), np.concatenate([np.zeros(len(lost)), new]))
        self._synced = self._total

    def state_dict(self) -> dict[str, Any]:
        """What `Replay` gives, and the priorities."""
        own = {"leaves": self.tree.leaves, "largest": self._largest, "synced": self._synced}
        return {**super().state_dict(), "priorities": own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` gave; the replay must have been made with the same arguments."""
        super().load_state_dict(state)
        own = state["priorities"]
        self.tree.set_all(own["leaves"])
        self._largest, self._synced = own["largest"], own["synced"]


class ProportionalReplay(PrioritizedReplay):
    """Prioritised by the size of the TD error: p_i = |δ_i| + ε."""

    def _weigh(self, index: np.ndarray, priority: np.ndarray) -> np.ndarray:
        return priority**self.alpha


class RankReplay(PrioritizedReplay):
    """Prioritised by the rank of the TD error: p_i = 1 / rank(i).

    A rank is counted among the priorities as they were at the last `sort`, and kept until the row is given a priority
    again or all are sorted, which is done when as many priorities were given as there are transitions. (The paper
    keeps ranks approximately in a heap, and sorts it once in 10⁶ steps.) Before the first sort every row has rank 1:
    the draws are uniform until as many priorities were given as transitions are stored.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._priority = self._arrays["priority"]  # the last given; means nothing where the leaf is 0
        self._sorted = self._arrays["sorted"][:0]  # of the last sort, ascending
        self._given = 0  # priorities since then

    @classmethod
    def _layout(cls, *args: Any) -> dict[str, Any]:
        layout = super()._layout(*args)
        rows = (math.prod(layout["record"][0]),)
        return {**layout, **{name: (rows, np.dtype(np.float32)) for name in ("priority", "sorted")}}

    def _weigh(self, index: np.ndarray, priority: np.ndarray) -> np.ndarray:
        self._priority[index] = priority
        order = priority.argsort()  # neighbours among the sorted are then searched one after the other, in warm memory
        greater = np.empty(len(priority))
        greater[order] = len(self._sorted) - self._sorted.searchsorted(priority[order].astype(np.float32), side="right")
        return (1.0 + greater) ** -self.alpha

    def update_priorities(self, index: np.ndarray, td_error: Tensor | np.ndarray) -> None:
        """As in `PrioritizedReplay`; sorts when it is time."""
        super().update_priorities(index, td_error)
        self._given += len(index)
        if self._given >= len(self):
            self.sort()

    def sort(self) -> None:
        """Counts all ranks anew: the largest priority has rank 1, equal ones keep the order of the store."""
        self._sync()
        rows = np.flatnonzero(self.tree.leaves)
        order = rows[np.argsort(-self._priority[rows], kind="stable")]
        leaves = np.zeros(len(self._priority))
        leaves[order] = np.arange(1.0, len(order) + 1) ** -self.alpha
        self.tree.set_all(leaves)
        self._sorted = self._arrays["sorted"][: len(order)]
        self._sorted[:] = self._priority[order][::-1]
        self._given = 0

    def state_dict(self) -> dict[str, Any]:
        """What `PrioritizedReplay` gives, and what ranks are counted by."""
        own = {"priority": self._priority, "sorted": self._sorted, "given": self._given}
        return {**super().state_dict(), "ranks": own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` gave; the replay must have been made with the same arguments."""
        super().load_state_dict(state)
        own = state["ranks"]
        self._priority[:], self._given = own["priority"], own["given"]
        self._sorted = self._arrays["sorted"][: len(own["sorted"])]
        self._sorted[:] = own["sorted"]
