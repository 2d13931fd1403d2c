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
    """Decodes R rows: holds keys and values of their N prompts, and of the tokens that came since.

    S heads have keys, and Q query heads read each of them; they are as wide as D.

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
        self.hidden = None  # [N, P], −∞ on padding
        if not prompt_mask.all():
            self.hidden = keys.new_zeros(prompt_mask.shape).masked_fill_(~prompt_mask, -torch.inf)
        positions = torch.arange(prompt_mask.shape[1] + max_length, device=keys.device).unsqueeze(0)
        cos, sin = (x[0] for x in trunk.rotary_emb(keys, positions))  # [P + max_length, D]
        self.half = cos.shape[1] // 2  # rotate-half of the equations is a roll by it, with signs
        self.cos, self.sin = cos, torch.cat([-sin[:, : self.half], sin[:, self.half :]], 1)
        self._arrange(group)

    def _arrange(self, group: Tensor) -> None:
        """Lays the rows out as a table [N, G]: row r in `slot[r]`, and in a slot `row[slot]`, row 0 if it is empty."""
        self.group, rows = group, torch.arange(len(group), device=group.device)
        count = torch.bincount(group)  # [N]
        width, order = int(count.max()), group.argsort(stable=True)
        before = (count.cumsum(0) - count)[group[order]]  # rows of earlier prompts
        self.slot = torch.empty_like(group)  # [R]
        self.slot[order] = group[order] * width + rows - before
        self.row = torch.zeros(len(count) * width, dtype=torch.int64, device=group.device)  # [N·G]
        self.row[self.slot] = rows

    def keep(self, rows: Tensor) -> None:
        """Goes on with `rows` [R'] alone, and with their prompts."""
        prompts, group = self.group[rows].unique(return_inverse=True)  # [N'], [R']
        if len(prompts) < self.prompts[0][0].shape[1]:
            self.prompts = [_map(lambda x: x.index_select(1, prompts), pair) for pair in self.prompts]
            self.hidden = None if self.hidden is None else self.hidden[prompts]
        self.since = [_map(lambda x: x.index_select(1, rows), pair) for pair in self.since]
        self.start = self.start[rows]
        self._arrange(group)

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
        both = torch.cat([key, query], 1)  # [R, S + S·Q, D], pairs (i, i + D/2) turned by their angles:
        both = torch.addcmul(both * cos, both.roll(self.half, -1), sin)
        query = (both[:, heads:] * layer.scaling).view(rows, heads, -1, dim).transpose(0, 1)  # [S, R, Q, D]
        keys, values = self._append(index, both[:, :heads].transpose(0, 1), value.transpose(0, 1))  # [S, R, t, D]

        prompt_keys, prompt_values = (x.flatten(0, 1) for x in self.prompts[index])  # [S·N, P, D]
        table = query.index_select(1, self.row).view(len(prompt_keys), -1, dim)  # [S·N, G·Q, D]
        scores = table @ prompt_keys.transpose(1, 2)  # [S·N, G·Q, P]
        if self.hidden is not None:
            scores = scores.view(heads, *self.hidden.shape[:1], -1, self.hidden.shape[1]) + self.hidden.unsqueeze(1)
        width = scores.shape[-1]  # P
        scores = scores.view(heads, len(self.row), -1, width).index_select(1, self.slot)  # [S, R, Q, P]
        scores = torch.cat([scores, query @ keys.transpose(2, 3)], -1)  # [S, R, Q, P + t]
        weights = scores.softmax(-1, torch.promote_types(x.dtype, torch.float32)).to(x.dtype)
        table = weights[..., :width].index_select(1, self.row).view(len(prompt_values), -1, width)  # [S·N, G·Q, P]
        read = (table @ prompt_values).view(heads, len(self.row), -1, dim).index_select(1, self.slot)  # [S, R, Q, D]
        read = read + weights[..., width:] @ values
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
    """Whether `Decoder` can drive the model: its layers are of a known kind, and a trial, made once, agrees with it."""
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
