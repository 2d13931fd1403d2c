"""Log-probabilities and entropies (nats) of tokens, without copies of logits that are as wide as the vocabulary.

Left to autograd, the log-softmax of [B, L, V] logits keeps one more array of their size, and its backward pass makes
two. Here only one number per token is kept, the log-normaliser log Σ exp, and the backward pass recomputes the
softmax from it piece by piece. ``linear_logprobs`` does the same for the head's product as well, so that no array of
tokens × vocabulary exists at any time.

The temperature divides the logits. Half-precision inputs are computed, and results returned, in float32; gradients have
their inputs' types. There is no second derivative.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

# Bytes of logits worked on at a time: what stays in a CPU's cache, or keeps a GPU busy.
PIECE_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}
MAX_ROWS = 1024  # of one piece in linear_logprobs; fewer columns than rows would slow its matrix products
EXCLUDED = -1e4  # log-probability of a logit of −inf: its exp is 0 still, and 0 times it is 0 and not NaN


def token_logprobs(logits: Tensor, ids: Tensor, temperature: float = 1.0, chunk: int | None = None) -> Tensor:
    """log softmax(logits / temperature) at the given tokens: logits [B, L, V], ids [B, L] -> [B, L].

    ``chunk`` is the number of positions (of dimension L) worked on at a time, by default what takes some megabytes.
    Raises ValueError for shapes that do not fit, ids outside the vocabulary, a temperature or chunk that is not
    positive.
    """
    _check(logits, ids, temperature, chunk)
    return _FromLogits.apply(logits, ids.long(), temperature, chunk)


def token_entropy(logits: Tensor, temperature: float = 1.0, chunk: int | None = None) -> Tensor:
    """Entropy of softmax(logits / temperature): [B, L, V] -> [B, L]. A logit of −inf excludes its token.

    ``chunk`` and errors as for ``token_logprobs``.
    """
    _check(logits, None, temperature, chunk)
    return _FromLogits.apply(logits, None, temperature, chunk)


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    temperature: float = 1.0,
    chunk: int | None = None,
    entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """log softmax(hidden @ weightᵀ / temperature) at the given tokens, without ever holding the logits.

    hidden [R, H] (or [B, L, H]): the rows that count and no others; weight [V, H] of the head; ids [R] (or [B, L]).
    Returns the log-probs, shaped like ids; with ``entropy`` the pair (logprob, entropy), from one pass. Both can be
    differentiated, in hidden and in weight, whichever needs it; the logits are computed a second time for that.
    ``chunk`` is the number of rows worked on at a time, by default at most 1,024; the vocabulary is always taken in
    pieces of some megabytes. Raises ValueError for shapes that do not fit, ids outside the vocabulary, a temperature
    or chunk that is not positive.
    """
    if weight.dim() != 2 or hidden.shape[-1:] != weight.shape[1:]:
        raise ValueError(
            f"hidden has shape {list(hidden.shape)} and weight {list(weight.shape)}; give [..., H] and [V, H]"
        )
    _check(hidden, ids, temperature, chunk, vocabulary=len(weight))
    logprob, spread = _FromHidden.apply(
        hidden.reshape(-1, hidden.shape[-1]), weight, ids.reshape(-1).long(), temperature, chunk, entropy
    )
    return (logprob.view_as(ids), spread.view_as(ids)) if entropy else logprob.view_as(ids)


class _FromLogits(torch.autograd.Function):
    """The log-probs of ids [..., L] from logits [..., L, V]; without ids, the entropies."""

    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor, ids: Tensor | None, temperature: float, chunk: int | None) -> Tensor:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        normaliser = torch.empty(logits.shape[:-1], dtype=dtype, device=logits.device)  # [..., L]
        result = torch.empty_like(normaliser)
        for part in _positions(logits, chunk):
            z = logits[..., part, :].to(dtype) / temperature
            if ids is not None:
                chosen = z.gather(-1, ids[..., part, None]).squeeze(-1)
            normaliser[..., part], spread = _normaliser_and_entropy(z, -1, entropy=ids is None)
            result[..., part] = spread if ids is None else chosen - normaliser[..., part]
        ctx.save_for_backward(logits, ids, normaliser, None if ids is not None else result)
        ctx.temperature, ctx.chunk = temperature, chunk
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, ids, normaliser, entropy = ctx.saved_tensors
        grad = grad / ctx.temperature
        grad_logits = torch.empty_like(logits)
        for part in _positions(logits, ctx.chunk):
            own = grad_logits[..., part, :]
            z = own if own.dtype == normaliser.dtype else torch.empty_like(own, dtype=normaliser.dtype)
            torch.div(logits[..., part, :], ctx.temperature, out=z).sub_(normaliser[..., part, None])
            if ids is None:
                _logit_gradient(z, -1, None, grad[..., part], entropy[..., part])
            else:
                _logit_gradient(z, -1, grad[..., part])
                z.scatter_add_(-1, ids[..., part, None], grad[..., part, None])
            if z is not own:
                own.copy_(z)
        return grad_logits, None, None, None


class _FromHidden(torch.autograd.Function):
    """Log-probs [R] and, where asked, entropies [R] from hidden [R, H] and the head's weight [V, H]."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        temperature: float,
        chunk: int | None,
        entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        x = hidden.to(_dtype(hidden, weight)) / temperature  # [R, H]
        chosen = x.new_zeros(len(x))  # logit of the chosen token
        # Of every piece of the vocabulary. Made before the loop: small arrays that outlive a step, allocated between
        # large ones that do not, would scatter the heap and take a multiple of the memory.
        pieces = math.ceil(len(weight) / _piece_shape(x, weight, chunk)[1])
        parts, spreads = x.new_empty(2, pieces, len(x))
        for piece, rows, columns, _, z in _pieces(x, weight, chunk):
            index, inside = _index(ids[rows], columns)
            chosen[rows] += torch.where(inside, z.gather(0, index), 0.0).squeeze(0)
            parts[piece, rows], spread = _normaliser_and_entropy(z, 0, entropy)
            if entropy:
                spreads[piece, rows] = spread
        normaliser = parts.logsumexp(0)  # [R]
        total = None
        if entropy:
            # The entropy of a choice in two steps: first the piece, then the token within it.
            share = parts - normaliser  # log-probability of the piece
            total = (share.exp() * (spreads - share)).sum(0)
        ctx.save_for_backward(hidden, weight, ids, normaliser, total)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.set_materialize_grads(False)
        return chosen - normaliser, total

    @staticmethod
    @once_differentiable
    def backward(
        ctx: FunctionCtx, grad_logprob: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, ids, normaliser, entropy = ctx.saved_tensors
        x = hidden.to(normaliser.dtype) / ctx.temperature
        if grad_logprob is None:
            grad_logprob = torch.zeros_like(normaliser)
        grad_x = torch.zeros_like(x) if ctx.needs_input_grad[0] else None
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for _, rows, columns, head, z in _pieces(x, weight, ctx.chunk):
            own = grad_logprob[rows]
            z.sub_(normaliser[rows])
            if grad_entropy is None:
                _logit_gradient(z, 0, own)
            else:
                _logit_gradient(z, 0, own, grad_entropy[rows], entropy[rows])
            index, inside = _index(ids[rows], columns)
            z.scatter_add_(0, index, torch.where(inside, own, 0.0))
            if grad_x is not None:
                grad_x[rows].addmm_(z.t(), head)
            if grad_weight is not None:
                if rows.start == 0:  # a piece's gradient is complete after its rows: it is written once, and in place
                    slab = grad_weight[columns] if weight.dtype == x.dtype else torch.empty_like(head)
                slab.addmm_(z, x[rows], beta=float(rows.start > 0))
                if rows.stop >= len(x) and weight.dtype != x.dtype:
                    grad_weight[columns] = slab
        grad_hidden = None if grad_x is None else (grad_x / ctx.temperature).to(hidden.dtype)
        return grad_hidden, grad_weight, None, None, None, None


def _piece_shape(x: Tensor, weight: Tensor, chunk: int | None) -> tuple[int, int]:
    """Rows, and columns of the vocabulary, whose logits are in memory at a time."""
    height = max(min(chunk or MAX_ROWS, len(x)), 1)
    return height, min(max(_piece_bytes(x) // (height * x.element_size()), 1), len(weight))


def _pieces(x: Tensor, weight: Tensor, chunk: int | None) -> Iterator[tuple[int, slice, slice, Tensor, Tensor]]:
    """(number of the piece of the vocabulary, rows, columns, weight[columns], logits [v, r]), rows innermost.

    Logits stand vocabulary first, which is the faster product: both factors are read along their rows. They share one
    buffer: use them, or write over them, before the next.
    """
    height, width = _piece_shape(x, weight, chunk)
    buffer = x.new_empty(height * width)
    for piece, columns in enumerate(_slices(len(weight), width)):
        head = weight[columns].to(x.dtype)  # [v, H]
        for rows in _slices(len(x), height):
            block = x[rows]  # [r, H]
            z = buffer[: len(head) * len(block)].view(len(head), len(block))
            yield piece, rows, columns, head, torch.mm(head, block.t(), out=z)


def _positions(logits: Tensor, chunk: int | None) -> list[slice]:
    """Slices of the sequence, the last dimension but one, so that a slice of the logits has some megabytes."""
    if chunk is None:
        length = max(logits.shape[-2], 1)
        chunk = max(_piece_bytes(logits) * length // max(logits.numel() * logits.element_size(), 1), 1)
    return _slices(logits.shape[-2], chunk)


def _slices(size: int, step: int) -> list[slice]:
    """At least one slice, an empty one for size 0, so that what a loop prepares is prepared."""
    return [slice(start, min(start + step, size)) for start in range(0, max(size, 1), step)]


def _normaliser_and_entropy(z: Tensor, dim: int, entropy: bool) -> tuple[Tensor, Tensor | None]:
    """log Σ exp over ``dim``, the vocabulary, and where asked the entropy of the softmax. z is overwritten."""
    highest = z.amax(dim)
    z.sub_(highest.unsqueeze(dim))
    if not entropy:
        return highest + z.exp_().sum(dim).log(), None
    weights = z.clamp_(min=EXCLUDED).exp()
    total = weights.sum(dim)
    return highest + total.log(), total.log() - weights.mul_(z).sum(dim) / total


def _logit_gradient(
    logp: Tensor,
    dim: int,
    grad_logprob: Tensor | None,
    grad_entropy: Tensor | None = None,
    entropy: Tensor | None = None,
) -> None:
    """Overwrite log-probs by the gradient in their logits, short of the + grad_logprob at the chosen token itself.

    That is −p g for the log-prob and −p (log p + entropy) g for the entropy.
    """
    if grad_entropy is None:
        logp.exp_().mul_(-grad_logprob.unsqueeze(dim))
        return
    p = logp.clamp_(min=EXCLUDED).exp()
    logp.add_(entropy.unsqueeze(dim)).mul_(-grad_entropy.unsqueeze(dim))
    if grad_logprob is not None:
        logp.sub_(grad_logprob.unsqueeze(dim))
    logp.mul_(p)


def _index(ids: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Where in a piece of the vocabulary the chosen tokens stand, and whether they do: [1, r] each."""
    local = (ids - columns.start).unsqueeze(0)
    width = columns.stop - columns.start
    return local.clamp(0, width - 1), (local >= 0) & (local < width)


def _check(
    inputs: Tensor, ids: Tensor | None, temperature: float, chunk: int | None, vocabulary: int | None = None
) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; it must be positive")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is {chunk}; it must be at least 1, or None")
    if inputs.dim() < 2:
        raise ValueError(f"logits or hidden rows have shape {list(inputs.shape)}; give [..., L, V] or [..., R, H]")
    if ids is None:
        return
    if inputs.shape[:-1] != ids.shape:
        raise ValueError(
            f"shapes are {list(inputs.shape)} and ids {list(ids.shape)}; ids need all dimensions but the last"
        )
    vocabulary = inputs.shape[-1] if vocabulary is None else vocabulary
    if ids.numel() > 0 and bool(((ids < 0) | (ids >= vocabulary)).any()):
        raise ValueError(f"ids reach from {int(ids.min())} to {int(ids.max())}; the vocabulary is 0 … {vocabulary - 1}")


def _dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)


def _piece_bytes(x: Tensor) -> int:
    return PIECE_BYTES["cpu" if x.device.type == "cpu" else "cuda"]
