"""Completions sampled from a language model, with the log-probs that they were sampled by.

Each row of the batch is drawn by uniform numbers of its own, one per token, through the inverse of the distribution
function. So a sample does not depend on which other rows are in the batch, nor on when they end.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from cleanrl_zoo.llm.decoder import ROOM, Decoder, cache_name, decodes, next_logits
from cleanrl_zoo.llm.models import LanguageModel, context_length, import_transformers

CHECK_EVERY = 8  # tokens between two looks at how many rows have ended, where a look waits for the device


@dataclass
class Completions:
    """B prompts and what was sampled for them."""

    prompt_ids: Tensor  # [B, P] int64, padded on the left
    prompt_mask: Tensor  # [B, P] bool, True on real tokens
    ids: Tensor  # [B, L] int64, padded on the right
    mask: Tensor  # [B, L] bool, True on the tokens that the model wrote, its stop token included
    logprob: Tensor  # [B, L] log-prob with which each token was drawn, 0 where the mask is False
    truncated: Tensor  # [B] bool, True where no stop token came within the maximal length

    @property
    def tokens(self) -> Tensor:
        """Prompts and completions, [B, P+L]."""
        return torch.cat([self.prompt_ids, self.ids], 1)

    @property
    def attention_mask(self) -> Tensor:
        """True on all real tokens, [B, P+L]."""
        return torch.cat([self.prompt_mask, self.mask], 1)

    @property
    def lengths(self) -> Tensor:
        """Tokens of each completion, its stop token included, [B]."""
        return self.mask.sum(1)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Completions":
        """`function` applied to every tensor."""
        return Completions(*(function(getattr(self, field.name)) for field in fields(self)))

    def rows(self, index: Any) -> "Completions":
        """The rows that `index` picks (a slice, indices or a mask), without columns in which none has a token."""
        part = self.map(lambda tensor: tensor[index])
        left = int(part.prompt_mask.any(0).float().argmax()) if part.prompt_mask.any() else 0
        width = max(int(part.mask.any(0).sum()), 1)  # tokens stand without gaps
        return Completions(
            part.prompt_ids[:, left:], part.prompt_mask[:, left:], part.ids[:, :width], part.mask[:, :width],
            part.logprob[:, :width], part.truncated,
        )  # fmt: skip

    def widen(self, length: int, pad_id: int, prompt_length: int = 0) -> "Completions":
        """The same with completions padded to `length` columns, and prompts to `prompt_length`; never narrower."""
        left, right = max(prompt_length - self.prompt_ids.shape[1], 0), max(length - self.ids.shape[1], 0)
        pad = torch.nn.functional.pad
        return Completions(
            pad(self.prompt_ids, (left, 0), value=pad_id), pad(self.prompt_mask, (left, 0)),
            pad(self.ids, (0, right), value=pad_id), pad(self.mask, (0, right)), pad(self.logprob, (0, right)),
            self.truncated,
        )  # fmt: skip

    @staticmethod
    def cat(parts: list["Completions"], pad_id: int) -> "Completions":
        """The rows of all parts, one after the other, padded to the widest."""
        length, prompt_length = (max(getattr(part, name).shape[1] for part in parts) for name in ("ids", "prompt_ids"))
        parts = [part.widen(length, pad_id, prompt_length) for part in parts]
        return Completions(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(Completions)))


def sample(
    model: LanguageModel, prompt_ids: Tensor, prompt_mask: Tensor, group_size: int, max_length: int,
    stop_ids: tuple[int, ...], pad_id: int, noise: Tensor | None, temperature: float = 1.0, top_p: float = 1.0,
) -> Completions:  # fmt: skip
    """Samples `group_size` G completions of each of N prompts; row n·G + g is the g-th of prompt n.

    Every prompt goes through the model once, for its whole group. Rows that have ended leave the batch and the cache.

    Args:
        model: a model that takes transformers' dynamic cache; others are driven by `generate`.
        prompt_ids, prompt_mask: [N, P], padded on the left.
        max_length: the most tokens of a completion, its stop token included.
        stop_ids: tokens that end a completion.
        pad_id: stands after the end; it may be a stop token.
        noise: [N·G, max_length] uniform in [0, 1); not needed at temperature 0.
        temperature: divides the logits; 0 takes the likeliest token and records its log-prob at temperature 1.
        top_p: below 1, draws only from the smallest set of likeliest tokens with at least this probability (nucleus
            sampling, Holtzman et al. 2020); the log-probs are those within that set.

    Raises:
        ValueError: one line, for a prompt too long for the model's context, noise of another shape, bad settings.
    """
    _check(model, prompt_mask, group_size, max_length, noise, temperature, top_p)
    if model.model._is_stateful or cache_name(model) not in model.accepts:
        return generate(
            model, prompt_ids, prompt_mask, group_size, max_length, stop_ids, pad_id, noise, temperature, top_p
        )
    with torch.inference_mode():  # less to do per operation than without gradient, and its tensors can never have one:
        completions = _sample(
            model, prompt_ids, prompt_mask, group_size, max_length, stop_ids, pad_id, noise, temperature, top_p
        )
    return completions.map(torch.clone)  # so they leave as copies


def _sample(
    model: LanguageModel, prompt_ids: Tensor, prompt_mask: Tensor, group_size: int, max_length: int,
    stop_ids: tuple[int, ...], pad_id: int, noise: Tensor | None, temperature: float, top_p: float,
) -> Completions:  # fmt: skip
    device, prompt_mask = prompt_ids.device, prompt_mask.bool()
    group = torch.arange(len(prompt_ids), device=device).repeat_interleave(group_size)  # [N·G]
    logits, decoder = _read_prompts(model, prompt_ids, prompt_mask, group, max_length)  # [N, V]
    logits, prompt_ids, prompt_mask = logits[group], prompt_ids[group], prompt_mask[group]

    rows = torch.arange(len(group), device=device)  # [R] places in the result of the rows that are still in the batch
    running = torch.ones_like(rows, dtype=torch.bool)  # [R]
    stops = torch.tensor(stop_ids, dtype=torch.int64, device=device)
    ids = torch.full((len(group), max_length), pad_id, device=device)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    logprob = torch.zeros(ids.shape, dtype=_exact(logits.dtype), device=device)
    for t in range(max_length):
        token, drawn = draw(logits, None if noise is None else noise[rows, t], temperature, top_p)  # [R]
        ids[rows, t] = token.where(running, pad_id)
        logprob[rows, t] = drawn.where(running, 0.0)
        mask[rows, t] = running
        running = running & ~torch.isin(token, stops)
        if t + 1 == max_length:
            break
        if not _waits(device) or t % CHECK_EVERY == CHECK_EVERY - 1:
            left = int(running.sum())
            if left == 0:
                break
            if left <= 0.875 * len(rows):  # dropping rows copies the cache of the others once
                keep = running.nonzero().squeeze(1)
                decoder.keep(keep)
                rows, running, token = rows[keep], running[keep], token[keep]
        logits = decoder.next_logits(token)
    truncated = torch.zeros(len(group), dtype=torch.bool, device=device)
    truncated[rows] = running
    length = int(mask.any(0).sum())  # of the longest
    return Completions(prompt_ids, prompt_mask, ids[:, :length], mask[:, :length], logprob[:, :length], truncated)


@torch.no_grad()
def generate(
    model: LanguageModel, prompt_ids: Tensor, prompt_mask: Tensor, group_size: int, max_length: int,
    stop_ids: tuple[int, ...], pad_id: int, noise: Tensor | None, temperature: float = 1.0, top_p: float = 1.0,
) -> Completions:  # fmt: skip
    """As `sample`, and with the same draws, by the `generate` of transformers: slower, for any causal model."""
    _check(model, prompt_mask, group_size, max_length, noise, temperature, top_p)
    transformers = import_transformers()
    group = torch.arange(len(prompt_ids), device=prompt_ids.device).repeat_interleave(group_size)  # [B]
    prompt_ids, prompt_mask = prompt_ids[group], prompt_mask[group].bool()
    columns = []

    def take_drawn(ids: Tensor, logits: Tensor) -> Tensor:
        """Logits that leave greedy decoding no choice but the token drawn here."""
        step = ids.shape[1] - prompt_ids.shape[1]
        token, logprob = draw(logits, None if noise is None else noise[:, step], temperature, top_p)
        columns.append(logprob)
        return torch.full_like(logits, -torch.inf).scatter(1, token.unsqueeze(1), 0.0)

    settings, inner = transformers.GenerationConfig(), model.model
    own, inner.generation_config = inner.generation_config, settings  # the model's own would add penalties
    try:
        tokens = inner.generate(
            prompt_ids, attention_mask=prompt_mask.long(), logits_processor=[take_drawn], do_sample=False,
            max_new_tokens=max_length, eos_token_id=list(stop_ids), pad_token_id=pad_id, use_cache=True,
        )  # fmt: skip
    finally:
        inner.generation_config = own
    ids = tokens[:, prompt_ids.shape[1] :]  # [B, L]
    stopped = torch.isin(ids, torch.tensor(stop_ids, device=ids.device))
    mask = stopped.cumsum(1) - stopped.long() == 0  # up to the first stop token, which counts
    logprob = torch.stack(columns, 1).where(mask, 0.0)
    return Completions(prompt_ids, prompt_mask, ids.where(mask, pad_id), mask, logprob, ~stopped.any(1))


def draw(logits: Tensor, noise: Tensor | None, temperature: float = 1.0, top_p: float = 1.0) -> tuple[Tensor, Tensor]:
    """One token per row of `logits` [R, V] by uniform `noise` [R]: ids [R] and their log-probs [R].

    It is the first token whose cumulative probability exceeds the noise. The sums are in float64, so that the
    frequencies are the probabilities, and a token of probability 0 is never drawn.
    """
    logits = logits.to(_exact(logits.dtype))
    if temperature == 0:
        token = logits.argmax(-1)
        return token, logits.log_softmax(-1).gather(1, token.unsqueeze(1)).squeeze(1)
    logits = logits / temperature
    logits = logits - logits.amax(-1, keepdim=True)
    if top_p < 1:
        logits = _nucleus(logits, top_p)
    cumulative = logits.exp().cumsum(-1, dtype=torch.float64)  # [R, V], not divided by its last column
    total = cumulative[:, -1:]
    point = torch.minimum(
        noise.unsqueeze(1) * total, total.nextafter(torch.zeros_like(total))
    )  # [R, 1], below the total
    token = torch.searchsorted(cumulative, point, right=True).clamp(max=logits.shape[-1] - 1)  # NaN would run out
    logprob = logits.gather(1, token) - total.log()
    return token.squeeze(1), logprob.squeeze(1).to(logits.dtype)


def _nucleus(logits: Tensor, top_p: float) -> Tensor:
    """`logits` [R, V], −∞ outside the smallest set of likeliest tokens whose probability reaches `top_p`."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    weight = ordered.exp().to(torch.float64)
    before = weight.cumsum(-1) - weight  # of the likelier tokens
    ordered = ordered.masked_fill(before >= top_p * weight.sum(-1, keepdim=True), -torch.inf)
    return torch.empty_like(logits).scatter(-1, order, ordered)


def _waits(device: torch.device) -> bool:
    """Whether reading a number off the device would stop it."""
    return device.type != "cpu"


def _exact(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute probabilities in."""
    return torch.promote_types(dtype, torch.float32)


def _read_prompts(
    model: LanguageModel, prompt_ids: Tensor, prompt_mask: Tensor, group: Tensor, max_length: int
) -> "tuple[Tensor, Decoder | _PlainDecoder]":
    """Logits [N, V] of what follows the prompts, and what decodes their rows from there.

    Our own decoder lays keys and values out anew, so that transformers' cache ends here.
    """
    cache = _cache(model)
    logits = next_logits(model, cache, **model.inputs(prompt_ids, prompt_mask))
    decoder = (Decoder if decodes(model) else _PlainDecoder)(model, cache, prompt_mask, group, max_length)
    return logits, decoder


def _cache(model: LanguageModel) -> Any:
    """An empty cache as transformers makes it for the model, its plain layers replaced by ones that write in place."""
    import_transformers()
    from transformers.cache_utils import DynamicCache, DynamicLayer

    class RoomyLayer(DynamicLayer):
        """Keys and values with room for more columns: a token is written into it instead of copying all before it."""

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            new = (key_states, value_states)  # each [R, heads, columns, dim]
            if not self.is_initialized:
                self.device, self.is_initialized = key_states.device, True
                self.length, self.stores = 0, [x[:, :, :0] for x in new]
            start, self.length = self.length, self.length + key_states.shape[2]
            if self.length > self.stores[0].shape[2]:
                grown = [x.new_empty(*x.shape[:2], self.length + ROOM, x.shape[3]) for x in new]
                for old, store in zip(self.stores, grown, strict=True):
                    store[:, :, :start] = old[:, :, :start]
                self.stores = grown
            for store, x in zip(self.stores, new, strict=True):
                store[:, :, start : self.length] = x
            self.keys, self.values = (store[:, :, : self.length] for store in self.stores)
            return self.keys, self.values

        def reorder_cache(self, beam_idx: Tensor) -> None:
            self.stores = [store.index_select(0, beam_idx) for store in self.stores]
            self.keys, self.values = (store[:, :, : self.length] for store in self.stores)

    cache = DynamicCache(config=model.config)
    cache.layers = [RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


class _PlainDecoder:
    """As `Decoder`, by the forward pass of any model that takes transformers' cache."""

    def __init__(self, model: LanguageModel, cache: Any, prompt_mask: Tensor, group: Tensor, max_length: int) -> None:
        self.model, self.cache, prompt_mask = model, cache, prompt_mask[group]
        cache.reorder_cache(group)
        self.padded = not bool(prompt_mask.all())  # without padding no mask is needed, and attention is faster
        self.attention = torch.nn.functional.pad(prompt_mask.long(), (0, max_length), value=1)  # [R, P + max_length]
        self.length = prompt_mask.shape[1]  # columns of the cache
        self.position = prompt_mask.sum(1, keepdim=True)  # [R, 1] of the next token

    def keep(self, rows: Tensor) -> None:
        """Goes on with `rows` [R'] alone."""
        self.cache.reorder_cache(rows)
        self.attention, self.position = self.attention[rows], self.position[rows]

    def next_logits(self, token: Tensor) -> Tensor:
        """Logits [R, V] after `token` [R], which joins the cache."""
        self.length += 1
        attention = self.attention[:, : self.length] if self.padded else None
        inputs = {"input_ids": token.unsqueeze(1), "attention_mask": attention}
        if "position_ids" in self.model.accepts:
            inputs["position_ids"] = self.position
        self.position = self.position + 1
        return next_logits(self.model, self.cache, **inputs)


def _check(
    model: LanguageModel, prompt_mask: Tensor, group_size: int, max_length: int, noise: Tensor | None,
    temperature: float, top_p: float,
) -> None:  # fmt: skip
    if min(len(prompt_mask), group_size, max_length) < 1:
        raise ValueError(
            f"{len(prompt_mask)} prompts, group_size {group_size}, max_length {max_length}: each must be at least 1"
        )
    longest, context = int(prompt_mask.sum(1).max()), context_length(model)
    if longest + max_length > context:
        raise ValueError(
            f"the longest prompt has {longest} tokens; with max_length {max_length} that is more than the model's "
            f"context of {context}: shorten the prompt or lower max_length"
        )
    if not 0 <= temperature < torch.inf or not 0 < top_p <= 1:
        raise ValueError(f"temperature {temperature}, top_p {top_p}: give a temperature >= 0 and a top_p in (0, 1]")
    needed = (len(prompt_mask) * group_size, max_length)
    if temperature > 0 and (noise is None or tuple(noise.shape) != needed):
        shape = None if noise is None else list(noise.shape)
        raise ValueError(
            f"noise {shape} for {len(prompt_mask)} prompts, groups of {group_size}: it must be {list(needed)}"
        )
