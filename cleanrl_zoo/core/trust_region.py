"""The parts of a natural-gradient step under a KL bound (TRPO, Schulman et al. 2015, section 6 and appendix C)."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor


def conjugate_gradient(
    matvec: Callable[[Tensor], Tensor], b: Tensor, iterations: int, tolerance: float = 1e-10
) -> Tensor:
    """Approximate H⁻¹b from products with the positive definite H alone (Hestenes & Stiefel 1952).

    b [P] -> x [P]. Stops after ``iterations``, once ‖b − Hx‖ <= tolerance · ‖b‖, or where the curvature along the next
    direction is not positive.
    """
    x = torch.zeros_like(b)
    residual, direction = b.clone(), b.clone()
    square = residual @ residual
    enough = tolerance**2 * square
    for _ in range(iterations):
        if square <= enough:
            break
        product = matvec(direction)
        curvature = direction @ product
        if not curvature > 0:
            break
        length = square / curvature
        x = x + length * direction
        residual = residual - length * product
        previous, square = square, residual @ residual
        direction = residual + square / previous * direction
    return x


def fisher_vector_product(
    kl: Tensor | Callable[[], Tensor], parameters: Iterable[Tensor], vector: Tensor, damping: float
) -> Tensor:
    """(H + damping · I) v, H the Hessian of the mean KL(π_old‖π) at π = π_old, which is the Fisher matrix there.

    ``kl`` is that scalar with its graph (kept for the next product), or a function that computes it anew. Every tensor
    the policy depends on belongs into ``parameters``, a free-standing log_std too. vector [P] -> [P], flattened in the
    order of ``parameters``.
    """
    parameters = tuple(parameters)
    value = kl() if callable(kl) else kl
    gradient = torch.autograd.grad(value, parameters, create_graph=True, materialize_grads=True)
    along = torch.cat([part.reshape(-1) for part in gradient]) @ vector.detach()
    product = torch.autograd.grad(along, parameters, retain_graph=True, materialize_grads=True)
    return torch.cat([part.reshape(-1) for part in product]) + damping * vector.detach()


class LineSearch(NamedTuple):
    """How a line search ended; ``loss`` and ``kl`` are those of the parameters it left."""

    accepted: bool
    fraction: float  # of the full step; 0 where refused
    loss: float
    kl: float


@torch.no_grad()
def line_search(
    evaluate: Callable[[], tuple[Tensor | float, Tensor | float]],
    step: Tensor,
    parameters: Iterable[Tensor],
    max_kl: float,
    shrink: float = 0.5,
    max_trials: int = 10,
) -> LineSearch:
    """Take the largest of the steps s, shrink·s, shrink²·s, … that lowers the loss and keeps KL <= max_kl.

    ``evaluate()`` -> (loss, kl) at the parameters as they then are: the surrogate loss to be minimised, and the mean
    KL(π_old‖π) in nats. step [P] is flat, in the order of ``parameters``, and is added to them. If no step passes
    (NaN passes nothing), or ``evaluate`` raises, the parameters are left bit-equal to what they were.
    """
    parameters = list(parameters)
    old = [parameter.clone() for parameter in parameters]
    loss_before, kl_before = (float(value) for value in evaluate())
    parts = [part.view_as(parameter) for part, parameter in zip(_split(step, old), old, strict=True)]
    accepted = False
    try:
        for trial in range(max_trials):
            fraction = shrink**trial
            for parameter, start, part in zip(parameters, old, parts, strict=True):
                parameter.copy_(start + fraction * part)
            loss, kl = (float(value) for value in evaluate())
            if loss < loss_before and kl <= max_kl:
                accepted = True
                return LineSearch(True, fraction, loss, kl)
    finally:
        if not accepted:
            for parameter, start in zip(parameters, old, strict=True):
                parameter.copy_(start)
    return LineSearch(False, 0.0, loss_before, kl_before)


def _split(flat: Tensor, like: list[Tensor]) -> tuple[Tensor, ...]:
    sizes = [tensor.numel() for tensor in like]
    if flat.shape != (sum(sizes),):
        raise ValueError(f"step has shape {list(flat.shape)}; the parameters need one flat vector of {sum(sizes)}")
    return flat.split(sizes)
