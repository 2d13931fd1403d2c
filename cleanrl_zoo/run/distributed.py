"""Data parallel training under `torchrun`: every rank has the whole rollout and model, and computes its share.

Each rank samples and trains on its slice of the rows. What was sampled is gathered, so that every rank computes
rewards, advantages and denominators from the whole batch; gradients are sums over the slices. One process, without
`torchrun`, is a world of size 1 in which all of this does nothing.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class World:
    """This process's place among those that train together."""

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this rank writes: log, checkpoints and progress are those of rank 0."""
        return self.rank == 0

    def slice(self, rows: int) -> slice:
        """This rank's share of `rows` rows. Ranks get equal shares, the last ones one row less where they cannot."""
        each, over = divmod(rows, self.size)
        start = self.rank * each + min(self.rank, over)
        return slice(start, start + each + (self.rank < over))

    def parts(self, index: Tensor, size: int) -> list[Tensor]:
        """This rank's share of the rows `index` [M], at most `size` of them at a time; none where there are too few."""
        return [part for part in index[self.slice(len(index))].split(size) if len(part)]

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Each tensor summed over all ranks, by one exchange of all of them. The tensors share dtype and device."""
        if self.size == 1:
            return list(tensors)
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(flat)
        parts = flat.split([tensor.numel() for tensor in tensors])
        return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]

    def gather(self, tensor: Tensor) -> Tensor:
        """The rows of all ranks, [B / size, ...] -> [B, ...]; every rank holds equally many, of the same shape."""
        if self.size == 1:
            return tensor
        mine = tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor.contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine)
        return torch.cat(parts).to(tensor.dtype)


def join_world(device: str = "cpu") -> World:
    """The group that `torchrun` started this process in (gloo on the CPU, NCCL on CUDA), or a world of one."""
    if "WORLD_SIZE" not in os.environ or int(os.environ["WORLD_SIZE"]) == 1:
        return World()
    if not dist.is_initialized():
        if device != "cpu":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("gloo" if device == "cpu" else "nccl")
    return World(dist.get_rank(), dist.get_world_size())


def leave_world() -> None:
    """Ends the group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
