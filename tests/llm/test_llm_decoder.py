"""The decoder against transformers' own forward pass, and what it refuses to drive."""

import pytest
import torch

from cleanrl_zoo.llm.decoder import Decoder, cache_name, decodes, next_logits
from cleanrl_zoo.llm.models import LanguageModel, import_transformers
from cleanrl_zoo.llm.sampler import sample
from cleanrl_zoo.llm.tokenizer import pad_left

PROMPTS = pad_left([[5, 6, 7, 8, 9], [9, 3], [10, 11, 4, 12]], 0)
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip


def wide(name: str, **settings) -> LanguageModel:
    """Two key heads, each read by two query heads, wider than the model's width has room for; weights of size 0.3."""
    transformers = import_transformers()
    config = getattr(transformers, f"{name}Config")(
        vocab_size=31, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=24, max_position_embeddings=256, pad_token_id=0, bos_token_id=None, eos_token_id=1,
        **settings,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        for weight in model.parameters():
            torch.nn.init.normal_(weight, 0.0, 0.3)  # norms and biases, too
    return LanguageModel(model)


MODELS = {
    "llama": lambda: wide("Llama"),
    "biases": lambda: wide("Llama", attention_bias=True, mlp_bias=True),
    "tied": lambda: wide("Llama", tie_word_embeddings=True),
    "llama3": lambda: wide("Llama", rope_parameters=LLAMA3),
    "yarn": lambda: wide("Llama", rope_parameters=YARN),
    "mistral": lambda: wide("Mistral", sliding_window=None),
    "qwen2": lambda: wide("Qwen2"),
    "qwen3": lambda: wide("Qwen3"),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("padded", [True, False])
def test_every_step_is_the_models_own(name, padded):
    """Unequal groups; rows leave in the middle, then a whole prompt does. Every logit is that of the whole sequence."""
    model = MODELS[name]()
    assert decodes(model)
    ids, mask = PROMPTS[0], PROMPTS[1].bool()
    mask = mask if padded else torch.ones_like(mask)
    group = torch.tensor([2, 0, 1, 1, 0, 0])
    written = torch.randint(31, (6, 80), generator=torch.Generator().manual_seed(0))  # past the first room
    tokens, attention = torch.cat([ids[group], written], 1), torch.cat([mask[group], torch.ones(6, 80).bool()], 1)
    rows = torch.arange(6)
    with torch.no_grad():
        expected = model.model(**model.inputs(tokens, attention)).logits[:, ids.shape[1] :]  # [6, 80, V]
        cache = import_transformers().DynamicCache(config=model.config)
        next_logits(model, cache, **model.inputs(ids, mask))
        decoder = Decoder(model, cache, mask, group, 80)
        for t in range(80):
            logits = decoder.next_logits(written[rows, t])
            assert (logits - expected[rows, t]).abs().max() < 2e-5 * expected.abs().max()
            for step, left in {20: [0, 1, 2, 5], 40: [0, 2, 3], 70: [1]}.items():
                if t == step:
                    decoder.keep(torch.tensor(left))
                    rows = rows[left]
            assert len(decoder.row) <= 2 * len(rows)  # slots of the table
    assert rows.tolist() == [2]


def test_a_long_group_beside_short_ones_leaves_at_most_half_of_the_table_empty():
    model = MODELS["llama"]()
    ids = torch.randint(31, (9, 5), generator=torch.Generator().manual_seed(0))
    mask, group = torch.ones_like(ids).bool(), torch.tensor([*range(9), *[4] * 7])  # eight rows of prompt 4
    cache = import_transformers().DynamicCache(config=model.config)
    with torch.no_grad():
        next_logits(model, cache, **model.inputs(ids, mask))
        decoder = Decoder(model, cache, mask, group, 3)
        token = torch.arange(16)
        expected = model.model(torch.cat([ids[group], token[:, None]], 1)).logits[:, -1]
        assert (decoder.next_logits(token) - expected).abs().max() < 2e-5 * expected.abs().max()
    assert decoder.width == 2 and len(decoder.row) == 2 * (8 + 4) < 2 * 16


def test_adapters_and_new_weights_are_used():
    model = LanguageModel(wide("Llama").model, lora_rank=2)
    assert decodes(model)
    with torch.no_grad():
        for weight in model.trainable():  # B is zero at first
            weight.add_(0.2)
    completions = sample(model, *PROMPTS, 3, 20, (1,), 0, torch.rand(9, 20, generator=torch.Generator().manual_seed(0)))
    output = model.completion(completions.tokens, completions.attention_mask, completions.mask)
    assert (output.logprob - completions.logprob).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_other_dtypes_are_driven(dtype):
    model = wide("Llama")
    assert decodes(LanguageModel(model.model.to(getattr(torch, dtype))))


def test_what_it_cannot_drive_is_seen(family):
    """Windows, angles that move with the length, other layers, and a layer of a known kind that computes otherwise."""
    dynamic = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}
    others = [wide("Mistral", sliding_window=4), wide("Llama", rope_parameters=dynamic)]
    others += [LanguageModel(family(name)) for name in ("gpt2", "gemma2", "granite", "phi", "bloom")]
    altered = wide("Llama")
    altered.model.model.layers[1].register_forward_hook(lambda module, args, output: output + 0.1)
    for model in (*others, altered):
        assert not decodes(model), type(model.model).__name__
    noise = torch.rand(3, 20, generator=torch.Generator().manual_seed(0))
    completions = sample(altered, *PROMPTS, 1, 20, (1,), 0, noise)
    output = altered.completion(completions.tokens, completions.attention_mask, completions.mask)
    assert (output.logprob - completions.logprob).abs().max() < 1e-5
    assert cache_name(altered) in altered.accepts
