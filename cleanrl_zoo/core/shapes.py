"""Shape checks shared by the formulas. They read shapes only, so they cost little and pass through torch.compile."""

import torch
from torch import Tensor


def check_broadcast(**tensors: Tensor | None) -> None:
    """Raise ValueError unless all tensors have one number of dimensions and sizes that are equal or 1.

    Torch alone would silently turn [B, 1] with [B] into [B, B]. ``None`` entries are skipped.
    """
    shapes = [tensor.shape for tensor in tensors.values() if tensor is not None]
    for shape in shapes:
        if len(shape) != len(shapes[0]):
            raise ValueError(
                f"different numbers of dimensions: {_listed(tensors)}; give every input the same number "
                "(size-1 dimensions broadcast)"
            )
    for sizes in zip(*shapes, strict=True):
        wide = [size for size in sizes if size != 1]
        for size in wide:
            if size != wide[0]:
                raise ValueError(f"shapes do not broadcast: {_listed(tensors)}; sizes must be equal or 1")


def check_equal(**tensors: Tensor) -> None:
    """Raise ValueError unless all tensors have the same shape."""
    shapes = [tensor.shape for tensor in tensors.values()]
    for shape in shapes:
        if shape != shapes[0]:
            raise ValueError(f"shapes differ: {_listed(tensors)}; all of them must have the same shape")


def check_fits(mean: Tensor, **others: Tensor) -> None:
    """Raise ValueError unless the others have the mean's number of dimensions, or at most one, and do not widen it."""
    for name, other in others.items():
        same_rank = other.dim() in (0, 1, mean.dim())
        if not same_rank or any(n not in (1, m) for n, m in zip(other.shape[::-1], mean.shape[::-1], strict=False)):
            raise ValueError(f"{name} {list(other.shape)} for a mean {list(mean.shape)}: give it that shape, or [A]")


def chosen(table: Tensor, index: Tensor, name: str, index_name: str) -> Tensor:
    """table[..., index] for one number per row: table [..., A], integers [...] -> [...]; size-1 dimensions broadcast.

    The names are those of the error. Raises ValueError unless index has one dimension fewer than the table.
    """
    column = index.long().unsqueeze(-1)
    check_broadcast(**{name: table, index_name: column})
    if table.shape[:-1] != index.shape:  # gather does not broadcast: it would read the first rows only
        rows = torch.broadcast_shapes(table.shape[:-1], index.shape)
        table, column = table.expand(*rows, -1), column.expand(*rows, 1)
    return table.gather(-1, column).squeeze(-1)


def _listed(tensors: dict[str, Tensor | None]) -> str:
    return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items() if tensor is not None)
