"""What a model of the world is fitted to, each row held out or drawn by the members for good; and what it imagined."""

from typing import Any

import torch
from torch import Tensor

HOLDOUT_SHARE = 0.2


class ModelData:
    """Rows (input, target) of transitions, with a holdout and each member's bootstrap sample.

    Rows come in blocks. When a block is committed, every row is held out with the share `holdout`, and each member
    draws as many of the block's other rows, with replacement, as there are. These draws never change afterwards: fits
    between two blocks see the same samples, and a row that was held out once is never learned from.

    Args:
        capacity: rows that there is room for.
        input_dim, target_dim: widths of a row.
        members: E.
        holdout: share of the rows that is held out.
    """

    def __init__(
        self, capacity: int, input_dim: int, target_dim: int, members: int, holdout: float = HOLDOUT_SHARE
    ) -> None:
        if not 0.0 < holdout < 1.0:
            raise ValueError(f"holdout {holdout}: must be above 0 and below 1")
        self.share = holdout
        self._inputs, self._targets = torch.zeros(capacity, input_dim), torch.zeros(capacity, target_dim)
        self._bootstrap = torch.zeros(members, capacity, dtype=torch.int64)
        self._holdout = torch.zeros(capacity, dtype=torch.int64)
        self._count = self._committed = self._drawn = self._held = 0

    def __len__(self) -> int:
        """Rows stored, those of the open block too."""
        return self._count

    def add(self, inputs: Tensor, targets: Tensor) -> None:
        """Stores rows [n, in], [n, target] in the open block.

        Raises:
            ValueError: when there is no room.
        """
        stop = self._count + len(inputs)
        if stop > len(self._inputs):
            raise ValueError(f"{stop} rows of model data: there is room for {len(self._inputs)}")
        self._inputs[self._count : stop], self._targets[self._count : stop] = inputs, targets
        self._count = stop

    def commit(self, generator: torch.Generator) -> None:
        """Ends the open block: draws what is held out of it and what each member learns from."""
        size = self._count - self._committed
        if size == 0:
            return
        order = torch.randperm(size, generator=generator) + self._committed
        # rounded so that the share is kept over all blocks, those of one row too
        held = min(size, max(0, round(self.share * self._count) - self._held))
        self._holdout[self._held : self._held + held] = order[:held]
        self._held += held
        learned = order[held:]
        if len(learned):
            draws = torch.randint(len(learned), (len(self._bootstrap), len(learned)), generator=generator)
            self._bootstrap[:, self._drawn : self._drawn + len(learned)] = learned[draws]
            self._drawn += len(learned)
        self._committed = self._count

    @property
    def inputs(self) -> Tensor:
        """[n, in], a view of the committed rows."""
        return self._inputs[: self._committed]

    @property
    def targets(self) -> Tensor:
        """[n, target], a view of the committed rows."""
        return self._targets[: self._committed]

    @property
    def bootstrap(self) -> Tensor:
        """int64 [E, m]: the rows that each member learns from."""
        return self._bootstrap[:, : self._drawn]

    @property
    def holdout(self) -> Tensor:
        """int64 [h]: the rows held out."""
        return self._holdout[: self._held]

    def state_dict(self) -> dict[str, Any]:
        """All rows and draws."""
        return {
            "inputs": self._inputs[: self._count].clone(),
            "targets": self._targets[: self._count].clone(),
            "bootstrap": self.bootstrap.clone(),
            "holdout": self.holdout.clone(),
            "committed": self._committed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` gave."""
        self._count, self._committed = len(state["inputs"]), state["committed"]
        self._drawn, self._held = state["bootstrap"].shape[1], len(state["holdout"])
        self._inputs[: self._count], self._targets[: self._count] = state["inputs"], state["targets"]
        self._bootstrap[:, : self._drawn] = state["bootstrap"]
        self._holdout[: self._held] = state["holdout"]


class RecentBlocks:
    """The rows of the last `keep` blocks, which may differ in length, sampled uniformly: imagined transitions.

    Args:
        keep: blocks.
        width: numbers per row, float32.
    """

    def __init__(self, keep: int, width: int) -> None:
        if keep < 1:
            raise ValueError(f"{keep} blocks to keep: at least 1")
        self.keep = keep
        self.sizes: list[int] = []
        self.rows = torch.zeros(0, width)  # [n, width], oldest first

    def __len__(self) -> int:
        return len(self.rows)

    def push(self, block: Tensor) -> None:
        """Adds the rows of `block` [n, width] and drops those of the oldest block where there are more than `keep`."""
        dropped = self.sizes[0] if len(self.sizes) == self.keep else 0
        self.sizes = [*self.sizes, len(block)][-self.keep :]
        self.rows = torch.cat([self.rows[dropped:], block])

    def sample(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Rows [*shape, width], each drawn uniformly, with replacement.

        Raises:
            ValueError: when there are none.
        """
        if len(self.rows) == 0:
            raise ValueError("no imagined rows: push a block before sampling")
        index = torch.randint(len(self.rows), shape, generator=generator)
        return self.rows.index_select(0, index.flatten()).view(*shape, -1)

    def state_dict(self) -> dict[str, Any]:
        """All rows and the blocks' sizes."""
        return {"rows": self.rows, "sizes": list(self.sizes)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` gave."""
        self.rows, self.sizes = state["rows"].clone(), list(state["sizes"])
