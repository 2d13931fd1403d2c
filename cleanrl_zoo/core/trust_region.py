"""The parts of a natural-gradient step under a KL bound (TRPO, Schulman et al. 2015, section 6 and appendix C)."""

from collections.abc import Callable, Iterable, Sequence
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


class FisherFactors(NamedTuple):
    """What `fisher_vector_product` needs of F = JᵀMJ, computed once for many vectors; made by `fisher_factors`."""

    outputs: tuple[Tensor, ...]
    probes: tuple[Tensor, ...]  # u, zeros like the outputs
    pullback: tuple[Tensor, ...]  # Jᵀu with its graph, linear in u
    slope: tuple[Tensor, ...]  # ∂KL/∂outputs with its graph


def fisher_factors(kl: Tensor, outputs: Sequence[Tensor], parameters: Iterable[Tensor]) -> FisherFactors:
    """The Fisher matrix as JᵀMJ (Schulman et al. 2015, appendix C.1), for repeated products at half the cost.

    ``kl`` is the mean KL(π_old‖π) at π = π_old, a scalar that depends on the parameters through ``outputs`` alone: mean
    and log_std, or the logits, with their graph. J is ∂outputs/∂parameters and M the Hessian of ``kl`` in the outputs;
    what is left out against the Hessian in the parameters is multiplied by the slope of the KL, which is 0 at π_old.
    """
    outputs = tuple(outputs)
    probes = tuple(torch.zeros_like(output, requires_grad=True) for output in outputs)
    pullback = torch.autograd.grad(outputs, tuple(parameters), probes, create_graph=True, materialize_grads=True)
    slope = torch.autograd.grad(kl, outputs, create_graph=True, materialize_grads=True)
    return FisherFactors(outputs, probes, pullback, slope)


def fisher_vector_product(
    kl: Tensor | Callable[[], Tensor] | FisherFactors, parameters: Iterable[Tensor], vector: Tensor, damping: float
) -> Tensor:
    """(H + damping · I) v, H the Hessian of the mean KL(π_old‖π) at π = π_old, which is the Fisher matrix there.

    ``kl`` is that scalar with its graph (kept for the next product), a function that computes it anew, or its
    `fisher_factors`, the fastest for many products. Every tensor the policy depends on belongs into ``parameters``, a
    free-standing log_std too. vector [P] -> [P], flattened in the order of ``parameters``.
    """
    parameters, vector = tuple(parameters), vector.detach()
    if isinstance(kl, FisherFactors):
        product = _through_factors(kl, parameters, vector)
    else:
        value = kl() if callable(kl) else kl
        gradient = torch.autograd.grad(value, parameters, create_graph=True, materialize_grads=True)
        along = torch.cat([part.reshape(-1) for part in gradient]) @ vector
        product = torch.autograd.grad(along, parameters, retain_graph=True, materialize_grads=True)
    return torch.cat([part.reshape(-1) for part in product]) + damping * vector


def _through_factors(factors: FisherFactors, parameters: tuple[Tensor, ...], vector: Tensor) -> tuple[Tensor, ...]:
    """JᵀMJ v, right to left; J v is the derivative of Jᵀu · v in u, since Jᵀu is linear in u."""
    outputs, probes, pullback, slope = factors
    parts = [part.view_as(parameter) for part, parameter in zip(_split(vector, parameters), parameters, strict=True)]
    used = [(row, part) for row, part in zip(pullback, parts, strict=True) if row.requires_grad]
    rows, parts = zip(*used, strict=True)
    kept = {"retain_graph": True, "materialize_grads": True}
    pushed = torch.autograd.grad(rows, probes, parts, **kept)  # J v
    weighted = torch.autograd.grad(slope, outputs, pushed, **kept)  # M J v
    return torch.autograd.grad(outputs, parameters, weighted, **kept)


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


def _split(flat: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    sizes = [tensor.numel() for tensor in like]
    if flat.shape != (sum(sizes),):
        raise ValueError(f"vector has shape {list(flat.shape)}; the parameters need one flat vector of {sum(sizes)}")
    return flat.split(sizes)
