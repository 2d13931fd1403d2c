"""Prompts in, scores out: what a run with a language model draws, encodes, samples, counts, and shows."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from cleanrl_zoo.llm import Example, PromptSource, load_language_model, make_task
from cleanrl_zoo.llm.evaluation import HeldOut, evaluate_held_out, sample_table, write_samples
from cleanrl_zoo.llm.source import PromptError
from cleanrl_zoo.run.distributed import World


@pytest.fixture
def model():
    generator = torch.Generator().manual_seed(0)
    return load_language_model("tiny", generator=generator, width=16, layers=1, heads=2)


def source_of(model, task="addition", seed=1, **settings):
    _, tokenizer, stop_ids = model
    settings = {"max_length": 0, "context": 256, "ranks": World(), **settings}
    return PromptSource(make_task(task), tokenizer, torch.Generator().manual_seed(seed), stop_ids=stop_ids, **settings)


def scored(source, score):
    """`source` whose task pays score(text) for one reward."""
    source.task.score = lambda examples, texts: np.array([[score(text)] for text in texts])
    return source


# Encoding


def test_prompts_stand_at_the_right_with_padding_before_them(model):
    source, tokenizer = source_of(model), model[1]
    ids, mask = source.encode([Example("7+12="), Example("a"), Example("123+4=")])
    assert mask.tolist() == [[0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1], [1, 1, 1, 1, 1, 1]]
    assert ids[0].tolist() == [tokenizer.pad_token_id, *b"7+12="] and ids[1, -1] == ord("a")


def test_a_prompt_that_leaves_no_room_is_refused_in_one_line(model):
    """6 tokens and 4 of the completion fit into 10, 7 do not."""
    source = source_of(model, context=10)
    source.encode([Example("123456")])
    with pytest.raises(PromptError, match="'1234567' has 7 tokens; with --max-length 4 .* context of 10") as error:
        source.encode([Example("12"), Example("1234567")])
    assert "\n" not in str(error.value) and isinstance(error.value, source.errors)
    with pytest.raises(PromptError, match="'1234567'"):
        source.encode_demonstrations([("1234567", "1")])


def test_demonstrations_end_with_the_stop_token_and_are_cut_without_it(model):
    source, (_, tokenizer, stop_ids) = source_of(model), model
    batch = source.encode_demonstrations([("1+2=", "3"), ("10+2=", "21"), ("5=", "1234"), ("5=", "12345")])
    pad, stop = tokenizer.pad_token_id, stop_ids[0]
    assert batch.ids.tolist() == [[51, stop, pad, pad], [50, 49, stop, pad], [49, 50, 51, 52], [49, 50, 51, 52]]
    assert batch.mask.sum(1).tolist() == [2, 3, 4, 4] and batch.truncated.tolist() == [False, False, True, True]
    assert batch.prompt_mask.sum(1).tolist() == [4, 5, 2, 2] and bool(batch.prompt_mask[:, -1].all())
    assert source.texts(batch) == ["3", "21", "1234", "1234"]


def test_the_length_of_a_completion_is_the_tasks_own_unless_given(model):
    assert source_of(model).max_length == 4 and source_of(model, "addition:digits=3").max_length == 5
    assert source_of(model, max_length=9).max_length == 9


# Drawing


def test_what_is_drawn_follows_from_the_generator_which_is_the_whole_state(model):
    source, other = source_of(model), source_of(model, seed=2)
    source.draw(3)
    other.load_state_dict({key: value.clone() for key, value in source.state_dict().items()})
    expected, ids, mask = source.draw(5)
    found, same_ids, same_mask = other.draw(5)
    assert [example.prompt for example in expected] == [example.prompt for example in found]
    assert torch.equal(ids, same_ids) and torch.equal(mask, same_mask)
    assert [e.prompt for e in source.draw(5)[0]] != [e.prompt for e in expected]
    held_out = [example.prompt for example in source.held_out(4)[0]]
    assert held_out == [example.prompt for example in other.held_out(9)[0][:4]]


# Scoring


def test_a_groups_completions_are_scored_with_their_own_prompt(model):
    """Rows n·G + g belong to prompt n: of 1+2= and 10+11=, completed by 3, 12, 12 and 3, 12, 3."""
    source = source_of(model)
    examples = [Example("1+2=", {"answer": "3"}), Example("10+11=", {"answer": "12"})]
    pairs = [(example.prompt, text) for example in examples for text in ("3", "12", "12")]
    rewards = source.score(examples, source.encode_demonstrations(pairs), group_size=3)
    assert rewards.tolist() == [[1.0], [0.0], [0.0], [0.0], [1.0], [1.0]] and rewards.dtype == torch.float64


def test_the_total_is_the_weighted_sum_and_a_missing_part_is_missing(model):
    rewards = torch.tensor([[[1.0, 0.5], [0.0, 1.0]], [[math.nan, 1.0], [1.0, 1.0]]], dtype=torch.float64)
    weighted = source_of(model, "countdown", weights=(1.0, 0.2)).total(rewards)
    assert weighted.tolist()[0] == pytest.approx([1.1, 0.2]) and weighted[1, 0].isnan() and weighted[1, 1] == 1.2
    assert source_of(model, "countdown").total(rewards)[0].tolist() == [1.5, 1.0]
    with pytest.raises(ValueError, match="--reward-weights has 3 numbers; the task's rewards are correct, format"):
        source_of(model, "countdown", weights=(1.0, 1.0, 1.0))


def test_completions_are_counted_as_episodes_once(model):
    source = source_of(model)
    source.record(torch.tensor([1.0, math.nan, 0.0]), torch.tensor([2, 3, 4]))
    assert source.pop_episodes() == [(1.0, 2), (0.0, 4)] and source.pop_episodes() == []


# Sampling


class Twice(World):
    """One rank of several, all of which have what this one has."""

    def gather(self, tensor):
        return torch.cat([tensor] * self.size)


def completed(model, ranks):
    """Four prompts with three completions each, paid by their length."""
    source = scored(source_of(model, ranks=ranks), lambda text: float(len(text)))
    noise = torch.rand(4, 3, 4, generator=torch.Generator().manual_seed(2))
    return source.complete(model[0], *source.draw(4), noise, 0.7)


def test_groups_are_sampled_scored_and_as_wide_as_they_may_be(model):
    completions, rewards = completed(model, World())
    assert completions.ids.shape == (12, 4) and rewards.shape == (4, 3, 1) and rewards.dtype == torch.float64
    texts = source_of(model).texts(completions)
    assert rewards.flatten().tolist() == [float(len(text)) for text in texts] and len(set(texts)) > 6
    prompts = completions.prompt_ids.view(4, 3, -1)
    assert torch.equal(prompts[:, 0], prompts[:, 2]) and not torch.equal(prompts[0], prompts[1])


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_samples_its_share_and_samples_do_not_depend_on_the_number_of_ranks(model, rank):
    whole, rewards = completed(model, World())
    both, their_rewards = completed(model, Twice(rank, 2))
    share = slice(6 * rank, 6 * rank + 6)
    assert both.ids.shape == (12, 4) and torch.equal(both.ids[:6], both.ids[6:])
    assert torch.equal(both.ids[:6], whole.ids[share]) and torch.equal(both.mask[:6], whole.mask[share])
    torch.testing.assert_close(both.logprob[:6], whole.logprob[share], rtol=0, atol=1e-5)
    assert torch.equal(their_rewards[:2], rewards[2 * rank : 2 * rank + 2])


def test_the_stop_token_is_no_part_of_a_text(model):
    source, stop = source_of(model), model[2][0]
    batch = source.encode_demonstrations([("1=", "ab")])
    assert batch.ids[0, 2] == stop and source.texts(batch) == ["ab"]


# Evaluation


def test_two_evaluations_differ_by_the_model_alone(model):
    source = scored(source_of(model), lambda text: float(len(text)))
    first, second = (evaluate_held_out(model[0], source, 10, seed=5) for _ in range(2))
    assert first.texts == second.texts and len(first.texts) == 10
    source.draw(7)  # neither training prompts nor the size of the batch change it
    assert evaluate_held_out(model[0], source, 10, seed=5, batch=3).texts == first.texts
    assert evaluate_held_out(model[0], source, 6, seed=5).texts == first.texts[:6]
    assert evaluate_held_out(model[0], source, 10, seed=6).texts != first.texts
    assert first.total.tolist() == [float(len(text)) for text in first.texts]
    assert ((first.lengths >= 1) & (first.lengths <= 4)).all()
    with torch.no_grad():
        model[0].model.lm_head.weight.mul_(-1)
    assert evaluate_held_out(model[0], source, 10, seed=5).texts != first.texts


def test_an_evaluation_leaves_the_training_prompts_alone(model):
    source = source_of(model)
    before = source.generator.get_state()
    evaluate_held_out(model[0], source, 8, seed=5)
    assert torch.equal(source.generator.get_state(), before) and source.pop_episodes() == []


def held_out():
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2="}]
    examples = [Example("1+2="), Example(chat), Example("5+5=\n")]
    rewards = torch.tensor([[1.0, 0.5], [0.0, math.nan], [0.25, 1.0]], dtype=torch.float64)
    return HeldOut(examples, ["3", "22 — or\n4", "01"], rewards, rewards.sum(1), torch.tensor([2, 9, 3]))


def test_the_table_shows_rewards_prompt_and_completion_in_one_line_each():
    lines = sample_table(held_out(), ("correct", "format"), 2).splitlines()
    assert len(lines) == 2 and [word in lines[0] for word in ("correct 1", "format 0.5", '"1+2="', '"3"')] == [True] * 4
    assert '"2+2="' in lines[1] and '"22 — or\\n4"' in lines[1] and "Be brief" not in lines[1]
    assert len(sample_table(held_out(), ("correct", "format"), 9).splitlines()) == 3


def test_samples_are_written_as_json_lines(tmp_path):
    write_samples(tmp_path / "samples", 1234, held_out(), ("correct", "format"), 2)
    (path,) = (tmp_path / "samples").iterdir()
    assert path.name == "step_000000001234.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows[0] == {"prompt": "1+2=", "completion": "3", "rewards": {"correct": 1.0, "format": 0.5}}
    assert rows[1]["completion"] == "22 — or\n4" and rows[1]["prompt"][-1]["content"] == "2+2="
    assert len(rows) == 2


def test_a_completion_that_was_not_scored_has_no_number(tmp_path):
    write_samples(tmp_path, 1, held_out(), ("correct", "format"), 2)
    row = json.loads((tmp_path / "step_000000000001.jsonl").read_text().splitlines()[1], parse_constant=pytest.fail)
    assert row["rewards"] == {"correct": 0.0, "format": None}


def test_samples_are_there_whole_or_not_at_all(tmp_path, monkeypatch):
    """A process that dies between writing and renaming leaves no file of that name; the next one overwrites."""

    def dies(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", dies)
    with pytest.raises(KeyboardInterrupt):
        write_samples(tmp_path, 1, held_out(), ("correct", "format"), 1)
    assert list(tmp_path.glob("step_*")) == []
    monkeypatch.undo()
    write_samples(tmp_path, 1, held_out(), ("correct", "format"), 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000000000001.jsonl"]
