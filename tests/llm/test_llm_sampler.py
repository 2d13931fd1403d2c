"""Samples against the model's own log-probs, against known probabilities, and against Hugging Face's generate."""

import math

import pytest
import torch

from cleanrl_zoo.llm import decoder, sampler
from cleanrl_zoo.llm.models import LanguageModel
from cleanrl_zoo.llm.sampler import Completions, draw, generate, sample
from cleanrl_zoo.llm.tokenizer import pad_left

PROMPTS = pad_left([[5, 6, 7, 8, 9, 10, 11, 12], [9, 3], [10, 11, 4]], 0)


def uniform(*shape: int, seed: int = 0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


# --- one draw -----------------------------------------------------------------------------------------------------


def test_the_draw_inverts_the_distribution_function():
    """p = (.2, 0, .5, .3), so F = (.2, .2, .7, 1): noise in [0,.2) gives 0, in [.2,.7) gives 2, in [.7,1) gives 3."""
    logits = torch.tensor([0.2, 0.0, 0.5, 0.3], dtype=torch.float64).log().expand(7, 4)
    noise = torch.tensor([0.0, 0.1999, 0.2001, 0.6999, 0.7001, 0.9999, 1 - 2**-53], dtype=torch.float64)
    token, logprob = draw(logits, noise)
    assert token.tolist() == [0, 0, 2, 2, 3, 3, 3]
    expected = torch.tensor([0.2, 0.2, 0.5, 0.5, 0.3, 0.3, 0.3], dtype=torch.float64).log()
    assert (logprob - expected).abs().max() < 1e-12


def test_a_token_of_probability_zero_is_never_drawn():
    """At both ends of the vocabulary and between, with the extreme values that the noise can take."""
    logits = torch.full((4, 9), -torch.inf)
    logits[:, 3], logits[:, 5] = 0.3, -80.0  # e^−80 is below float32's resolution beside 1
    noise = torch.tensor([0.0, 0.5, 1 - 2**-24, 1.0])
    assert draw(logits, noise)[0].tolist() == [3, 3, 3, 3] or draw(logits, noise)[0][3] == 5
    everything = draw(logits.expand(4, 9)[:1].expand(5000, 9), uniform(5000))[0]
    assert set(everything.tolist()) == {3}


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_frequencies_are_the_probabilities(temperature):
    """χ² over 12 tokens with 11 degrees of freedom: above 31.3 with probability 0.001, for a fixed seed."""
    logits = torch.linspace(-2, 2, 12)
    count = 200_000
    token, logprob = draw(logits.expand(count, 12), uniform(count), temperature)
    expected = (logits.double() / temperature).softmax(0)
    observed = torch.bincount(token, minlength=12).double()
    assert ((observed - count * expected) ** 2 / (count * expected)).sum() < 31.3
    assert (logprob.double() - expected.log()[token]).abs().max() < 1e-6


def test_the_nucleus():
    """p = (.2, .5, .3): 0.75 is reached by the two likeliest, so .5/.8 and .3/.8 are left; at 0.5 one token is."""
    logits = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log().expand(4, 3)
    noise = torch.tensor([0.0, 0.62, 0.63, 0.99], dtype=torch.float64)
    token, logprob = draw(logits, noise, top_p=0.75)
    assert token.tolist() == [1, 1, 2, 2]
    assert (logprob.exp() - torch.tensor([0.625, 0.625, 0.375, 0.375], dtype=torch.float64)).abs().max() < 1e-12
    token, logprob = draw(logits, noise, top_p=0.49)
    assert token.tolist() == [1] * 4 and logprob.abs().max() < 1e-12


def test_temperature_zero_takes_the_likeliest_and_needs_no_noise():
    token, logprob = draw(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), None, 0)
    assert token.tolist() == [1, 0]
    assert (logprob + torch.tensor(1 + torch.e**-1).log()).abs().max() < 1e-6  # log softmax at temperature 1


# --- completions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stops", [(1,), (1, 2)])
def test_end_tokens_truncation_and_padding(chain, stops):
    """After 5: 1. After 6: 2, then 7, 8, 9, 9, …  The pad token is the end token 1, and the real one counts."""
    model = chain({5: {1: 1.0}, 6: {2: 1.0}, 2: {7: 1.0}, 7: {8: 1.0}, 8: {9: 1.0}, 9: {9: 1.0}, 4: {5: 1.0}})
    prompt_ids, prompt_mask = pad_left([[3, 4], [6], [9]], 1)
    completions = sample(model, prompt_ids, prompt_mask, 1, 5, stops, 1, None, 0)
    second = [2, 1, 1, 1, 1] if 2 in stops else [2, 7, 8, 9, 9]
    assert completions.ids.tolist() == [[5, 1, 1, 1, 1], second, [9, 9, 9, 9, 9]]
    lengths = [2, 1, 5] if 2 in stops else [2, 5, 5]
    assert completions.lengths.tolist() == lengths
    assert completions.mask.tolist() == [[t < length for t in range(5)] for length in lengths]
    assert completions.truncated.tolist() == [False, 2 not in stops, True]
    assert completions.logprob.abs().max() < 1e-6  # certain, and 0 beyond the end
    assert completions.tokens.shape == completions.attention_mask.shape == (3, 7)
    assert completions.attention_mask[1].tolist() == [False, True] + [t < lengths[1] for t in range(5)]


def test_an_end_token_at_the_last_place_is_no_truncation(chain):
    model = chain({5: {6: 1.0}, 6: {1: 1.0}, 7: {7: 1.0}})
    completions = sample(model, torch.tensor([[5], [7]]), torch.ones(2, 1).bool(), 1, 2, (1,), 0, None, 0)
    assert completions.ids.tolist() == [[6, 1], [7, 7]] and completions.truncated.tolist() == [False, True]
    short = sample(model, torch.tensor([[6]]), torch.ones(1, 1).bool(), 2, 9, (1,), 0, None, 0)
    assert short.ids.tolist() == [[1], [1]]  # as wide as the longest, not as max_length


def test_a_chain_is_sampled_by_its_probabilities(chain):
    """From 5: 6 with .25, 7 with .75; from 6 the end; from 7 the end with .5, else 6. Three outcomes, one truncated.

    P(6,END) = .25, P(7,END) = .375, P(7,6 …) = .375, where two tokens are allowed. χ² above 13.8: probability .001.
    """
    model = chain({5: {6: 0.25, 7: 0.75}, 6: {1: 1.0}, 7: {1: 0.5, 6: 0.5}})
    count = 20_000
    completions = sample(model, torch.tensor([[5]]), torch.ones(1, 1).bool(), count, 2, (1,), 0, uniform(count, 2))
    outcomes = completions.ids[:, 0] * 10 + completions.ids[:, 1]
    observed = torch.tensor([(outcomes == value).sum() for value in (61, 71, 76)]).double()
    expected = count * torch.tensor([0.25, 0.375, 0.375], dtype=torch.float64)
    assert observed.sum() == count and ((observed - expected) ** 2 / expected).sum() < 13.8
    assert completions.truncated.sum() == observed[2]
    logprob = (expected / count).log()[(outcomes == 71).long() + 2 * (outcomes == 76)]
    assert (completions.logprob.sum(1).double() - logprob).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["gpt2", "llama", "bloom", "gemma2", "granite", "phi"])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.4])
def test_the_samplers_logprobs_are_the_trainers(family, name, temperature, monkeypatch):
    """Ratio 1 for an unchanged policy at any temperature, with ragged prompts and ends, over a sliding window, past
    the cache's first room."""
    for room in (sampler, decoder):
        monkeypatch.setattr(room, "ROOM", 10)
    model = LanguageModel(family(name, vocab=70))
    completions = sample(model, *PROMPTS, 6, 40, (1, 2), 0, uniform(18, 40, seed=1), temperature)
    lengths = completions.lengths
    assert lengths.max() > 30 and (lengths.min() < 10 or temperature < 1)
    output = model.completion(completions.tokens, completions.attention_mask, completions.mask, temperature)
    assert (output.logprob - completions.logprob).abs().max() < 1e-5
    assert completions.logprob.dtype == torch.float32 and completions.logprob[completions.mask].max() < 0


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 0}])
def test_generate_draws_the_same(family, name, settings):
    model = LanguageModel(family(name))
    model.model.generation_config.repetition_penalty = 5.0  # the model's own settings must not count
    ours, theirs = (f(model, *PROMPTS, 3, 20, (1, 2), 0, uniform(9, 20), **settings) for f in (sample, generate))
    for field in ("prompt_ids", "prompt_mask", "ids", "mask", "truncated"):
        assert torch.equal(getattr(ours, field), getattr(theirs, field)), field
    assert (ours.logprob - theirs.logprob).abs().max() < 1e-5
    assert model.generation_config.repetition_penalty == 5.0


def test_a_model_without_such_a_cache_is_driven_by_generate(family, monkeypatch):
    monkeypatch.setattr(sampler, "_sample", None)
    model = LanguageModel(family("mamba"))
    completions = sample(model, *PROMPTS, 2, 12, (1, 2), 0, uniform(6, 12), 0.8)
    output = model.completion(completions.tokens, completions.attention_mask, completions.mask, 0.8)
    assert (output.logprob - completions.logprob).abs().max() < 1e-5 and completions.lengths.sum() > 12


def test_a_sample_does_not_depend_on_its_company(family):
    """Prompt 1's group of four, alone, among the others, and as two groups of two; in float64, so that rounding does
    not turn a draw."""
    model = LanguageModel(family("llama").double())
    noise = uniform(12, 40)
    whole = sample(model, *PROMPTS, 4, 40, (1, 2), 0, noise).rows(slice(4, 8))
    ids, mask = PROMPTS[0][1:2], PROMPTS[1][1:2]
    alone = sample(model, ids, mask, 4, 40, (1, 2), 0, noise[4:8])
    halves = [sample(model, ids, mask, 2, 40, (1, 2), 0, noise[rows]) for rows in (slice(4, 6), slice(6, 8))]
    for other in (alone, Completions.cat(halves, 0)):
        width = other.ids.shape[1]
        assert torch.equal(other.ids, whole.ids[:, :width]) and torch.equal(other.mask, whole.mask[:, :width])
        assert whole.mask[:, width:].sum() == 0
        assert (other.logprob - whole.logprob[:, :width]).abs().max() < 1e-12


@pytest.mark.parametrize("name", ["llama", "phi"])  # by our own decoder, and by transformers' layers
def test_one_prefill_per_prompt_and_ended_rows_leave(family, name):
    model = LanguageModel(family(name))
    model.decodes = name == "llama"
    shapes = []  # of the tokens that go in
    model.model.base_model.embed_tokens.register_forward_pre_hook(
        lambda module, args: shapes.append(tuple(args[0].shape))
    )
    completions = sample(model, *PROMPTS, 4, 90, (1, 2), 0, uniform(12, 90))
    assert shapes[0] == (3, 8) and shapes[1][0] <= 12
    steps = [math.prod(shape) for shape in shapes[1:]]  # one token per row
    running = [(completions.lengths > t + 1).sum().item() for t in range(len(steps))]
    assert all(alive <= rows for rows, alive in zip(steps, running, strict=True))
    assert sum(steps) <= 1.2 * sum(running)
    assert len(shapes) == completions.ids.shape[1]  # no step after the last token


def test_looking_seldom_gives_the_same(family, monkeypatch):
    """On a device that would have to be waited for, ended rows stay for some tokens; the result is the same."""
    model = LanguageModel(family("llama").double())
    expected = sample(model, *PROMPTS, 4, 40, (1, 2), 0, uniform(12, 40))
    monkeypatch.setattr(sampler, "_waits", lambda device: True)
    other = sample(model, *PROMPTS, 4, 40, (1, 2), 0, uniform(12, 40))
    for field in ("ids", "mask", "truncated"):
        assert torch.equal(getattr(expected, field), getattr(other, field))


@pytest.mark.parametrize("rank", [0, 2])
def test_a_bfloat16_copy_records_what_it_sampled_by(family, rank):
    model = LanguageModel(family("llama"), lora_rank=rank)
    cast = model.sampler_copy("bfloat16")
    completions = sample(cast, *PROMPTS, 4, 30, (1, 2), 0, uniform(12, 30))
    assert completions.logprob.dtype == torch.float32
    inputs = (completions.tokens, completions.attention_mask, completions.mask)
    own = (cast.completion(*inputs).logprob - completions.logprob)[completions.mask].abs()
    trainer = (model.completion(*inputs).logprob - completions.logprob)[completions.mask].abs()
    assert 1e-4 < trainer.mean() < 0.2 and own.mean() < 0.1


def test_what_cannot_be_sampled_is_told_in_one_line(llama):
    ids, mask = PROMPTS
    with pytest.raises(
        ValueError, match="longest prompt has 8 tokens; with max_length 249 that is more .* context of 256"
    ):
        sample(llama, ids, mask, 1, 249, (1,), 0, uniform(3, 249))
    with pytest.raises(ValueError, match=r"noise \[3, 5\] for 3 prompts, groups of 2: it must be \[6, 5\]"):
        sample(llama, ids, mask, 2, 5, (1,), 0, uniform(3, 5))
    with pytest.raises(ValueError, match="temperature -1"):
        sample(llama, ids, mask, 2, 5, (1,), 0, uniform(6, 5), -1)
    with pytest.raises(ValueError, match="temperature nan"):
        sample(llama, ids, mask, 2, 5, (1,), 0, uniform(6, 5), torch.nan)
    for function, group_size, length in ((sample, 0, 5), (sample, 2, 0), (generate, 2, 0)):
        with pytest.raises(ValueError, match=f"3 prompts, group_size {group_size}, max_length {length}: .* at least 1"):
            function(llama, ids, mask, group_size, length, (1,), 0, uniform(6, 5))
    with pytest.raises(ValueError, match="0 prompts"):
        sample(llama, ids[:0], mask[:0], 2, 5, (1,), 0, uniform(6, 5))
    with pytest.raises(ValueError, match="top_p 0"):
        generate(llama, ids, mask, 2, 5, (1,), 0, uniform(6, 5), 1.0, 0)


def test_rows_cat_and_widen(llama):
    parts = [sample(llama, *pad_left(rows, 0), 1, length, (1,), 0, uniform(len(rows), length))
             for rows, length in (([[5, 6, 7]], 4), ([[8], [9]], 6))]  # fmt: skip
    whole = Completions.cat(parts, 0)
    length = max(part.ids.shape[1] for part in parts)
    assert whole.tokens.shape == (3, 3 + length) and whole.truncated.shape == (3,)
    assert whole.prompt_ids.tolist() == [[5, 6, 7], [0, 0, 8], [0, 0, 9]]
    assert torch.equal(whole.lengths, torch.cat([part.lengths for part in parts]))
    assert torch.equal(whole.rows([1, 2]).logprob[:, : parts[1].ids.shape[1]], parts[1].logprob)
    wide = whole.widen(10, 29, prompt_length=5)
    assert wide.ids[:, length:].unique().tolist() == [29] and wide.mask.sum() == whole.mask.sum()
    assert wide.prompt_ids[0].tolist() == [29, 29, 5, 6, 7] and wide.prompt_mask[0].tolist() == [False] * 2 + [True] * 3
    inputs = ((x.tokens, x.attention_mask, x.mask) for x in (whole, wide))
    narrow, padded = (llama.completion(*x).logprob for x in inputs)
    assert (narrow - padded[:, :length]).abs().max() < 1e-5
