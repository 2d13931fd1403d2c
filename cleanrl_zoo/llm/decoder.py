"""One token per row through a Llama-like model, behind prompts that transformers has read.

Transformers' layers spend more time in Python than in the products of a small model, and read the keys of a prompt once
for each of its samples. Here are the products alone, and the keys of a prompt are read once for its whole group: one
product of matrices, where every row would take a product of vectors (Hydragen, Juravsky et al. 2024).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cleanrl_zoo.llm.models import LanguageModel, import_transformers

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROTARY_TYPES = ("default", "linear", "llama3", "yarn")  # whose angles do not depend on the length of the sequence
TOLERANCE = {torch.bfloat16: 0.05, torch.float16: 0.01}  # of the trial, relative; 1e-4 for other dtypes
ROOM = 64  # columns by which a cache grows: long completions are rare, so the full length is never allocated at once


class Decoder:
    """Decodes R rows: holds keys and values of their prompts, and of the tokens that came since.

    S heads have keys, and Q query heads read each of them; they are as wide as D. Of N prompts each is kept once per
    line of the table in which the rows are laid out (`_arrange`): N lines of G slots while all groups are equal.

    Args:
        model: a model that `decodes`.
        cache: transformers' cache after the prompts, [N, S, P, D] of every layer.
        prompt_mask: [N, P] bool, True on real tokens.
        group: [R] int64, which prompt each row continues.
        max_length: the most tokens of a completion.
    """

    def __init__(self, model: LanguageModel, cache: Any, prompt_mask: Tensor, group: Tensor, max_length: int) -> None:
        trunk = model.model.model
        self.embed, self.layers, self.norm = trunk.embed_tokens, trunk.layers, trunk.norm
        self.head = model.model.get_output_embeddings()
        # Heads come first, so that the samples of a prompt are neighbours in every product.
        self.prompts = [_map(lambda x: x.transpose(0, 1).contiguous(), (x.keys, x.values)) for x in cache.layers]
        keys = self.prompts[0][0]  # [S, N, P, D]
        new = keys.new_empty(len(keys), len(group), 0, keys.shape[-1])
        self.since = [(new, new)] * len(self.prompts)  # each [S, R, room, D]
        self.length = 0  # tokens since the prompts
        self.start = prompt_mask.sum(1)[group]  # [R] the position of the first of them
        self.padding = None  # [N, P], −∞ where a prompt is padded, added to the scores
        if not prompt_mask.all():
            self.padding = keys.new_zeros(prompt_mask.shape).masked_fill_(~prompt_mask, -torch.inf)
        positions = torch.arange(prompt_mask.shape[1] + max_length, device=keys.device).unsqueeze(0)
        cos, sin = (x[0] for x in trunk.rotary_emb(keys, positions))  # [P + max_length, D]
        # A pair (a, b) = (x[i], x[i + D/2]) becomes (a cos − b sin, b cos + a sin): x·cos + x rolled by D/2 · (∓ sin).
        self.half = cos.shape[1] // 2
        self.cos, self.sin = cos, torch.cat([-sin[:, : self.half], sin[:, self.half :]], 1)
        self._arrange(group)

    def _arrange(self, group: Tensor) -> None:
        """Lays the rows out as a table of lines, each of them samples of one prompt; row r continues line `group[r]`.

        A line holds the largest group; where that left more than half of the slots empty it is as wide as the mean
        group, and a prompt with more samples has several lines. An empty slot repeats row 0, and what it computes is
        never read. Rows a b of prompt 0, c of 1: the lines (a b), (c a), so slot 0 1 2 and row 0 1 2 0.
        """
        lines, group, count = group.unique(return_inverse=True, return_counts=True)
        rows, self.width = torch.arange(len(group), device=group.device), int(count.max())
        if len(lines) * self.width > 2 * len(group):
            self.width = -(-len(group) // len(lines))
        needed = (count + self.width - 1) // self.width  # lines of each prompt
        order = group.argsort(stable=True)
        at = group[order]
        number = rows - (count.cumsum(0) - count)[at]  # of a row among those of its prompt
        self.slot = torch.empty_like(group)  # [R] where a row is in the table
        self.slot[order] = (needed.cumsum(0) - needed)[at] * self.width + number
        self.row = torch.zeros(int(needed.sum()) * self.width, dtype=torch.int64, device=group.device)
        self.row[self.slot] = rows  # [lines·width], which row is in a slot
        source = lines.repeat_interleave(needed)
        if not torch.equal(source, torch.arange(self.prompts[0][0].shape[1], device=group.device)):
            self.prompts = [_map(lambda x: x.index_select(1, source), pair) for pair in self.prompts]
            self.padding = None if self.padding is None else self.padding[source]

    def keep(self, rows: Tensor) -> None:
        """Goes on with `rows` [R'] alone, and with their prompts."""
        self.since = [_map(lambda x: x.index_select(1, rows), pair) for pair in self.since]
        self.start = self.start[rows]
        self._arrange(self.slot[rows] // self.width)

    def next_logits(self, token: Tensor) -> Tensor:
        """Logits [R, V] after `token` [R], which joins the cache."""
        x, position = self.embed(token), self.start + self.length  # [R, H], [R]
        cos, sin = self.cos[position].unsqueeze(1), self.sin[position].unsqueeze(1)  # [R, 1, D]
        self.length += 1
        for index, layer in enumerate(self.layers):
            x = x + self._attention(index, layer.self_attn, layer.input_layernorm(x), cos, sin)
            h, unit = layer.post_attention_layernorm(x), layer.mlp
            x = x + unit.down_proj(unit.act_fn(unit.gate_proj(h)) * unit.up_proj(h))
        return self.head(self.norm(x))

    def _attention(self, index: int, layer: nn.Module, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """What layer `index` adds to the residual stream, [R, H]: softmax over the prompt and what came since."""
        rows, dim = len(x), cos.shape[-1]
        query, key, value = (f(x).view(rows, -1, dim) for f in (layer.q_proj, layer.k_proj, layer.v_proj))
        if hasattr(layer, "q_norm"):  # Qwen 3
            query, key = layer.q_norm(query), layer.k_norm(key)
        heads = key.shape[1]  # S
        both = torch.cat([key, query], 1)  # [R, S + S·Q, D]
        both = torch.addcmul(both * cos, both.roll(self.half, -1), sin)
        query = (both[:, heads:] * layer.scaling).view(rows, heads, -1, dim).transpose(0, 1)  # [S, R, Q, D]
        keys, values = self._append(index, both[:, :heads].transpose(0, 1), value.transpose(0, 1))  # [S, R, t, D]

        prompt_keys, prompt_values = (x.flatten(0, 1) for x in self.prompts[index])  # [S·N, P, D]
        columns = prompt_keys.shape[1]  # P
        by_line = query.index_select(1, self.row).view(len(prompt_keys), -1, dim)  # [S·N, G·Q, D]
        scores = by_line @ prompt_keys.transpose(1, 2)  # [S·N, G·Q, P]
        if self.padding is not None:
            scores = scores.view(heads, len(self.padding), -1, columns) + self.padding.unsqueeze(1)  # [S, N, G·Q, P]
        scores = scores.view(heads, len(self.row), -1, columns).index_select(1, self.slot)  # [S, R, Q, P]
        scores = torch.cat([scores, query @ keys.transpose(2, 3)], -1)  # [S, R, Q, P + t]
        weights = scores.softmax(-1, torch.promote_types(x.dtype, torch.float32)).to(x.dtype)
        by_line = weights[..., :columns].index_select(1, self.row).view(len(prompt_values), -1, columns)
        read = (by_line @ prompt_values).view(heads, len(self.row), -1, dim).index_select(1, self.slot)  # [S, R, Q, D]
        read = read + weights[..., columns:] @ values
        return layer.o_proj(read.transpose(0, 1).reshape(rows, -1))

    def _append(self, index: int, *new: Tensor) -> list[Tensor]:
        """Keys and values [S, R, t, D] of layer `index` since the prompts, the new ones [S, R, D] included."""
        room = self.since[index][0].shape[2]
        if self.length > room:
            self.since[index] = _map(lambda x: nn.functional.pad(x, (0, 0, 0, ROOM)), self.since[index])
        for store, x in zip(self.since[index], new, strict=True):
            store[:, :, self.length - 1] = x
        return [store[:, :, : self.length] for store in self.since[index]]


def decodes(model: LanguageModel) -> bool:
    """Whether `Decoder` can drive the model: its layers are of a known kind, and a trial agrees with it.

    The trial is made once, and holds for copies in another dtype. Weights may change after it; a hook that is put on a
    layer later is not seen. A model in bfloat16 may fail it by rounding alone: then it is only slower.
    """
    if model.decodes is None:
        config = model.config
        rotary = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
        model.decodes = type(model.model).__name__ in ARCHITECTURES and rotary in ROTARY_TYPES and _agrees(model)
    return model.decodes


@torch.no_grad()
def _agrees(model: LanguageModel) -> bool:
    """Three rows of two prompts, one of them padded, against the model's own logits."""
    transformers = import_transformers()
    ids = torch.arange(8, device=model.device).view(2, 4) % model.config.vocab_size
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, 0] = False
    cache = transformers.DynamicCache(config=model.config)
    if any(type(layer) is not transformers.cache_utils.DynamicLayer for layer in cache.layers):
        return False  # windows
    expected = model.model(**model.inputs(ids, mask), use_cache=False).logits[:, -1]  # [2, V]
    next_logits(model, cache, **model.inputs(ids[:, :3], mask[:, :3]))
    group = torch.tensor([0, 1, 1], device=ids.device)
    try:
        error = Decoder(model, cache, mask[:, :3], group, 1).next_logits(ids[group, 3]) - expected[group]
    except AttributeError:  # layers of another version of transformers
        return False
    return bool(error.norm() <= TOLERANCE.get(error.dtype, 1e-4) * expected.norm())


def next_logits(model: LanguageModel, cache: Any, **inputs: Any) -> Tensor:
    """Transformers' logits [R, V] of the token after the last column; the cache takes the columns up."""
    if "logits_to_keep" in model.accepts:
        inputs["logits_to_keep"] = 1
    return model.model(**inputs, **{cache_name(model): cache}, use_cache=True).logits[:, -1]


def cache_name(model: LanguageModel) -> str:
    """What transformers calls the argument: the first name since 5.2x, the second before."""
    return "cache" if "cache" in model.accepts else "past_key_values"


def _map(function: Callable[[Tensor], Tensor], pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return function(pair[0]), function(pair[1])
