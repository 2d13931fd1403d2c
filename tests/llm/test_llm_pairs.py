"""Preferences: read and refused, sampled, encoded so that a prompt is what a sampler starts from, scored."""

import json
import warnings
from types import SimpleNamespace

import pytest
import torch

from cleanrl_zoo.llm.models import LanguageModel
from cleanrl_zoo.llm.pairs import (
    Judged,
    Pair,
    PairSource,
    Preferences,
    encode,
    final_values,
    hold_out,
    kept_pairs,
    load_reward_model,
    read_judged,
    read_pairs,
    sample_pairs,
    save_reward_model,
    task_pairs,
    unpair,
    write_pairs,
)
from cleanrl_zoo.llm.sampler import Completions
from cleanrl_zoo.llm.source import PromptError
from cleanrl_zoo.llm.tasks import Example, make_task
from cleanrl_zoo.llm.tokenizer import byte_tokenizer, encode_prompts, pad_left, pad_right

PAD, END = 256, 257
QUESTION = [{"role": "user", "content": "Why?"}]


def answer(text):
    return {"role": "assistant", "content": text}


@pytest.fixture
def file(tmp_path):
    """Writes rows (or lines as they are) to a JSON-lines file and gives its name."""

    def write(*rows, name="pairs.jsonl"):
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
        return str(tmp_path / name)

    return write


def pair_row(**changes):
    row = {"prompt": "1+1=", "chosen": "2", "rejected": "3", **changes}
    return {name: value for name, value in row.items() if value is not None}


# Reading


def test_pairs_are_read_and_written(tmp_path, file):
    rows = [pair_row(), pair_row(prompt="é\n", chosen_score=2.5, rejected_score=-1)]
    assert read_pairs(file(*rows)) == [Pair("1+1=", "2", "3"), Pair("é\n", "2", "3")]
    pairs = read_pairs(file(rows[1]), scores=True)
    assert pairs == [Pair("é\n", "2", "3", 2.5, -1.0)]
    path = tmp_path / "new/pairs.jsonl"
    chat = Pair(QUESTION, "Because.", "No.", 1.0, 0.0)
    write_pairs(path, [*pairs, chat])
    assert read_pairs(str(path), scores=True) == [*pairs, chat]
    assert [entry.name for entry in path.parent.iterdir()] == ["pairs.jsonl"]
    other = pair_row(score_chosen=1, score_rejected=0.5)  # the other way to name them
    assert read_pairs(file(other), scores=True) == [Pair("1+1=", "2", "3", 1.0, 0.5)]


def test_chat_messages_become_a_chat_and_texts(file):
    forms = [
        pair_row(prompt=QUESTION, chosen="yes", rejected="no"),
        pair_row(prompt=QUESTION, chosen=[answer("yes")], rejected=[answer("no")]),
        pair_row(prompt=QUESTION, chosen=[*QUESTION, answer("yes")], rejected=[*QUESTION, answer("no")]),
        pair_row(prompt="Why?", chosen=[*QUESTION, answer("yes")], rejected=[*QUESTION, answer("no")]),
        pair_row(prompt="Why?", chosen=[answer("yes")], rejected="no"),
    ]
    assert read_pairs(file(*forms)) == [Pair(QUESTION, "yes", "no")] * 5
    judged = {"prompt": QUESTION, "completion": [answer("yes")], "label": 0}
    assert read_judged(file(judged)) == [Judged(QUESTION, "yes", False)]


def test_datasets_are_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [pair_row(), pair_row(prompt="2+2=", chosen="4")]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "data"))
    assert read_pairs(str(tmp_path / "data")) == [Pair("1+1=", "2", "3"), Pair("2+2=", "4", "3")]
    datasets.Dataset.from_list([pair_row(), pair_row(chosen="")]).save_to_disk(str(tmp_path / "bad"))
    with pytest.raises(ValueError, match="bad row 1: chosen is empty"):
        read_pairs(str(tmp_path / "bad"))


def test_judged_rows_and_pairs_taken_apart(file):
    rows = [{"prompt": "a", "completion": "b", "label": True}, {"prompt": "a", "completion": "c", "label": False}]
    assert read_judged(file(*rows)) == [Judged("a", "b", True), Judged("a", "c", False)]
    assert read_judged(file(pair_row())) == [Judged("1+1=", "2", True), Judged("1+1=", "3", False)]
    pairs = [Pair("a", "b", "c"), Pair("d", "e", "f")]
    assert [(j.prompt, j.completion, j.label) for j in unpair(pairs)] == [
        ("a", "b", True), ("a", "c", False), ("d", "e", True), ("d", "f", False),
    ]  # fmt: skip


def test_equal_completions_are_counted_and_left_out_with_one_warning(file):
    name = file(pair_row(), pair_row(chosen="3"), pair_row(chosen="4"), pair_row(rejected="2"))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        pairs = read_pairs(name)
    assert [pair.chosen for pair in pairs] == ["2", "4"]
    assert len(seen) == 1 and "2 of 4 pairs have the same text" in str(seen[0].message)
    with pytest.raises(ValueError, match="1 of 1 pairs have the same text"):
        read_pairs(file(pair_row(chosen="3")))


REFUSED = {
    "no rejected": ({"rejected": None}, {}, "line 3: has no column rejected"),
    "neither": ({"chosen": None, "rejected": None}, {}, "line 3: has no column chosen and no column rejected"),
    "no prompt": ({"prompt": None}, {}, "line 3: has no prompt"),
    "empty": ({"rejected": ""}, {}, "line 3: rejected is empty"),
    "empty message": ({"chosen": [answer("")]}, {}, "line 3: chosen is empty"),
    "number": ({"chosen": 2}, {}, "line 3: chosen is 2, must be text or chat messages"),
    "user's message": ({"chosen": QUESTION}, {}, "line 3: chosen must be text, or chat messages"),
    "other prompt": ({"chosen": [*QUESTION, answer("2")]}, {}, "line 3: chosen must be text, or chat messages"),
    "no messages": ({"chosen": []}, {}, "line 3: chosen must be text, or chat messages"),
    "no score": ({}, {"scores": True}, "line 3: has no column chosen_score"),
    "half a score": ({"score_chosen": 1}, {"scores": True}, "line 3: has no column score_rejected"),
    "score is text": ({"chosen_score": "5", "rejected_score": 1}, {"scores": True}, "line 3: '5' is no number"),
    "score is NaN": ({"chosen_score": float("nan"), "rejected_score": 1}, {"scores": True}, "line 3: nan is no number"),
    "turned": ({"chosen_score": 1, "rejected_score": 1}, {"scores": True}, "line 3: chosen_score is 1, must be above"),
}


@pytest.mark.parametrize("changes, options, words", REFUSED.values(), ids=REFUSED)
def test_a_bad_row_is_one_line_with_its_number(file, changes, options, words):
    good = pair_row(chosen_score=1, rejected_score=0)
    with pytest.raises(ValueError, match=words) as caught:
        read_pairs(file(good, "", pair_row(**changes)), **options)  # line 2 is blank
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "row, words",
    [
        ({"prompt": "a", "completion": "b"}, "line 2: has no column label"),
        ({"prompt": "a", "completion": "b", "label": "good"}, "line 2: label is 'good'"),
        ({"prompt": "a", "label": True}, "line 2: has no column completion"),
        ({"prompt": "a", "completion": "", "label": True}, "line 2: completion is empty"),
    ],
)
def test_a_bad_judged_row_is_one_line_with_its_number(file, row, words):
    with pytest.raises(ValueError, match=words):
        read_judged(file({"prompt": "a", "completion": "b", "label": True}, row))


def test_held_out_pairs_share_no_prompt_with_the_others(file):
    pairs = [Pair(f"{i % 10}+", "2", str(i)) for i in range(10, 30)]  # two of each prompt
    training, held = hold_out(pairs, "0.2", read_pairs)
    assert len(training) == 16 and len(held) == 4 and {*training, *held} == set(pairs)
    assert not {pair.prompt for pair in training} & {pair.prompt for pair in held}
    assert hold_out(pairs, "0.2", read_pairs) == (training, held)
    name = file(pair_row(prompt="3+"), pair_row(prompt="new"))
    training, held = hold_out(pairs, name, read_pairs)
    assert [pair.prompt for pair in held] == ["3+", "new"] and len(training) == 18
    with pytest.raises(ValueError, match="none is left to train on"):
        hold_out([Pair("3+", "a", "b")], name, read_pairs)
    with pytest.raises(ValueError, match="held_out is 1.5"):
        hold_out(pairs, "1.5", read_pairs)


def test_made_pairs_are_made_once(tmp_path):
    path, made = tmp_path / "pairs.jsonl", []

    def make():
        made.append(1)
        return [Pair("a", "b", "c", 0.3, 0.1)]

    assert kept_pairs(path, make, write=True) == kept_pairs(path, make, write=True) == [Pair("a", "b", "c", 0.3, 0.1)]
    assert made == [1]
    kept_pairs(tmp_path / "none.jsonl", make, write=False)
    assert not (tmp_path / "none.jsonl").exists()


# Pairs of a task


class Written:
    """A source whose completions are written down: texts[P][G], one byte a token; None: cut, NaN reward by "?"."""

    max_length = 4
    tokenizer = byte_tokenizer()

    def __init__(self, texts):
        self.texts_of, self.draws = texts, 0
        self.task = SimpleNamespace(draw=self.draw)

    def draw(self, n, generator):
        self.draws += 1
        return [Example(f"{int(torch.randint(1000, (), generator=generator))}:") for _ in range(n)]

    def encode(self, examples):
        return pad_left(encode_prompts(self.tokenizer, [example.prompt for example in examples]), PAD)

    def complete(self, model, examples, prompt_ids, prompt_mask, noise, temperature):
        assert noise.shape == (len(examples), len(self.texts_of[0]), 4)
        flat = [text for row in self.texts_of for text in row]
        ids, mask = pad_right([[*text.encode(), END] for text in flat], PAD)
        truncated = torch.tensor(["cut" in text for text in flat])
        rewards = [float("nan") if "?" in text else float(text[0] in "12") * len(text) for text in flat]
        group = torch.arange(len(examples)).repeat_interleave(len(self.texts_of[0]))
        completions = Completions(prompt_ids[group], prompt_mask[group], ids, mask, torch.zeros(ids.shape), truncated)
        return completions, torch.tensor(rewards, dtype=torch.float64).view(len(examples), -1, 1)

    def texts(self, completions):
        return [text for row in self.texts_of for text in row]

    def total(self, rewards):
        return rewards.squeeze(-1)


def test_a_pair_is_the_best_against_the_worst_sample():
    """Rewards 1, 0, 2 | 0, 0, 0 | 2 (cut), 1, 1 | NaN, 1, 0: the second prompt gives none, nor the third."""
    texts = [["1", "x", "22"], ["a", "b", "c"], ["2cut", "1", "2"], ["?", "1", "y"]]
    source = Written(texts)
    generator = torch.Generator().manual_seed(0)
    pairs = sample_pairs(None, source, 4, generator, group_size=3, num_prompts=4)
    assert [(pair.chosen, pair.rejected, pair.chosen_score, pair.rejected_score) for pair in pairs] == [
        ("22", "x", 2, 0), ("1", "y", 1, 0),
    ] * 2  # fmt: skip
    assert source.draws == 2 and len({pair.prompt for pair in pairs}) == 4
    again = sample_pairs(None, Written(texts), 4, torch.Generator().manual_seed(0), group_size=3, num_prompts=4)
    assert again == pairs


def test_no_pairs_is_one_line():
    with pytest.raises(PromptError, match="0 of 2 pairs were found among 40 prompts with 2 samples each") as caught:
        sample_pairs(None, Written([["a", "b"]] * 4), 2, torch.Generator(), group_size=2, num_prompts=4)
    assert "\n" not in str(caught.value)


def test_pairs_of_the_task_itself():
    task, generator = make_task("addition"), torch.Generator().manual_seed(0)
    pairs = task_pairs(task, 20, generator)
    more = task_pairs(task, 20, generator)
    for pair in pairs:
        a, b = map(int, pair.prompt.rstrip("=").split("+"))
        assert pair.chosen == str(a + b)[::-1] != pair.rejected and pair.rejected.isdigit()
    assert len(pairs) == len({pair.prompt for pair in pairs}) == 20
    assert not {pair.prompt for pair in pairs} & {pair.prompt for pair in more}


# Tokens


def test_a_batch_by_hand():
    pairs = [Pair("ab", "cd", "e", 3, 1), Pair("f", "g", "hij")]
    data = encode(byte_tokenizer(), pairs, END, 0, 64)
    a, b, c, d, e, f, g, h, i, j = range(97, 107)
    batch = data.batch(torch.tensor([1, 0]))
    assert batch.prompt_ids.tolist() == [[PAD, f], [PAD, f], [a, b], [a, b]]
    assert batch.prompt_mask.tolist() == [[False, True]] * 2 + [[True, True]] * 2
    assert batch.ids.tolist() == [[g, END, PAD, PAD], [h, i, j, END], [c, d, END, PAD], [e, END, PAD, PAD]]
    assert batch.mask.sum(1).tolist() == [2, 4, 3, 2] and not batch.truncated.any()
    assert data.lengths.tolist() == [3, 2, 2, 4] and data.total_lengths.tolist() == [5, 5]
    assert data.values.tolist() == [2, 1] and len(data) == 2 and data.each == 2 and data.dropped == 0
    assert data.rows(torch.tensor([1, 0])).tolist() == [2, 3, 0, 1]
    one = encode(byte_tokenizer(), unpair(pairs[:1]), END, 0, 64)
    assert one.values.tolist() == [1, 0] and one.each == 1
    assert one.batch(torch.tensor([1])).ids.tolist() == [[e, END]]


def test_rows_and_back():
    data = encode(byte_tokenizer(), [Pair("ab", "cd", "e"), Pair("f", "g", "hij")], END, 0, 64)
    again = Preferences.of(data.batch(torch.arange(2)), data.values, PAD)
    for name in ("prompts", "prompt_ends", "completions", "completion_ends", "values"):
        assert torch.equal(getattr(again, name), getattr(data, name)), name


def test_too_long_pairs_are_dropped_and_counted_or_keep_their_stop_token():
    """Three tokens at most, the stop token among them; a context of 6."""
    pairs = [Pair("p", "a", "b"), Pair("p", "abcd", "b"), Pair("p", "abc", "abd"), Pair("ppppp", "a", "b")]
    data = encode(byte_tokenizer(), pairs, END, 3, 6)
    assert len(data) == 1 and data.dropped == 3
    cut = encode(byte_tokenizer(), pairs, END, 3, 6, cut=True)
    # the second keeps two bytes and the stop token; the third's two completions are then equal; the fourth has no room
    assert len(cut) == 2 and cut.dropped == 2
    assert cut.batch(torch.tensor([1])).ids.tolist() == [[97, 98, END], [98, END, PAD]]
    assert encode(byte_tokenizer(), pairs[3:], END, 0, 7).lengths.tolist() == [2, 2]  # exactly the context
    with pytest.raises(ValueError, match="all 1 pairs are longer than the context of 6 tokens"):
        encode(byte_tokenizer(), pairs[3:], END, 0, 6)
    with pytest.raises(ValueError, match="all 2 completions are longer than 1 tokens"):
        encode(byte_tokenizer(), unpair(pairs[:1]), END, 1, 6)


def templated(template):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_a_chat_goes_through_the_template():
    tokenizer = templated(TEMPLATE)
    data = encode(tokenizer, [Pair(QUESTION, "So.", "No.")], END, 0, 64)
    batch = data.batch(torch.tensor([0]))
    assert bytes(batch.prompt_ids[0].tolist()) == b"<user>Why?\n<assistant>"
    assert bytes(batch.ids[0].tolist()[:-1]) == b"So."
    with pytest.raises(ValueError, match="no chat template"):
        encode(byte_tokenizer(), [Pair(QUESTION, "So.", "No.")], END, 0, 64)


def test_a_template_that_rewrites_the_prompt_is_refused():
    """It leaves the question out once there is an answer."""
    tokenizer = templated(
        "{% if add_generation_prompt %}" + TEMPLATE + "{% else %}{{ messages[-1].content }}{% endif %}"
    )
    with pytest.raises(ValueError, match=r"prompt 'Why\?': this model's chat template writes it otherwise") as caught:
        encode(tokenizer, [Pair(QUESTION, "So.", "No.")], END, 0, 64)
    assert "\n" not in str(caught.value)


def test_prompt_ids_are_a_prefix_even_where_the_whole_text_would_merge():
    """A tokenizer that knows "bc" as one token: "ab" + "cd" keeps the prompt as a sampler would have got it."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    vocab = {"<pad>": 0, "<eos>": 1, "a": 2, "b": 3, "c": 4, "d": 5, "bc": 6}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[("b", "c")]))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", eos_token="<eos>")
    assert tokenizer("abcd").input_ids == [2, 6, 5]
    batch = encode(tokenizer, [Pair("ab", "cd", "d")], 1, 0, 64).batch(torch.tensor([0]))
    assert batch.tokens.tolist() == [[2, 3, 4, 5, 1], [2, 3, 5, 1, 0]]


# Scores


def completions_of(prompts, texts, left=0, right=0):
    """Completions with `left` more columns of padding before and `right` behind."""
    prompt_ids, prompt_mask = pad_left(prompts, 0)
    ids, mask = pad_right(texts, 0)
    rows = Completions(prompt_ids, prompt_mask, ids, mask, torch.zeros(ids.shape), torch.zeros(len(ids)).bool())
    return rows.widen(ids.shape[1] + right, 0, prompt_ids.shape[1] + left)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_the_score_is_the_value_at_the_completions_own_last_token(family, name):
    """Against the plain hidden states of each text alone, without padding; also where it fills the context."""
    base = family(name, **({"n_positions": 7} if name == "gpt2" else {}))
    model = LanguageModel(base, value_head=True)
    torch.nn.init.normal_(model.value_head.weight, generator=torch.Generator().manual_seed(0))
    prompts, texts = [[5, 6, 7], [8]], [[9, 3, 4, 1], [11, 1]]
    expected = []
    with torch.no_grad():
        for prompt, text in zip(prompts, texts, strict=True):
            hidden = base(torch.tensor([prompt + text]), output_hidden_states=True).hidden_states[-1]
            expected.append(float(model.value_head(hidden[0, -1])))
        for left, right in ((0, 0), (3, 2)):
            scores = final_values(model, completions_of(prompts, texts, left, right), 0)
            assert scores.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert abs(expected[0] - expected[1]) > 1e-3


def test_a_reward_model_comes_back_with_its_head(tmp_path, llama):
    from cleanrl_zoo.llm.loading import load_language_model

    generator = torch.Generator().manual_seed(1)
    model, tokenizer, _ = load_language_model("tiny", value_head=True, generator=generator, width=16, layers=1, heads=2)
    torch.nn.init.normal_(model.value_head.weight, generator=generator)
    save_reward_model(model, tmp_path / "policy", tokenizer)
    loaded = load_reward_model(str(tmp_path / "policy"), tokenizer)
    rows = completions_of([[5, 6]], [[7, 8, END]])
    with torch.no_grad():
        assert torch.equal(final_values(loaded, rows, PAD), final_values(model, rows, PAD))
    assert not any(weight.requires_grad for weight in loaded.parameters())
    assert [path.name for path in (tmp_path / "policy").iterdir() if path.name.startswith(".")] == []
    (tmp_path / "policy/value_head.safetensors").unlink()
    with pytest.raises(ValueError, match="has no value_head.safetensors"):
        load_reward_model(str(tmp_path / "policy"), tokenizer)
    save_reward_model(model, tmp_path / "policy", tokenizer)
    other = byte_tokenizer()
    other.add_tokens(["new"])
    with pytest.raises(ValueError, match="its tokens are not the policy's"):
        load_reward_model(str(tmp_path / "policy"), other)


def test_pairs_count_as_episodes():
    source = PairSource("name")
    source.record(torch.tensor([1.0, 0.5]), torch.tensor([7, 9]))
    assert source.pop_episodes() == [(1.0, 7), (0.5, 9)] and source.pop_episodes() == []
    assert source.env_id == "name" and source.state_dict() == {} and "transformers" in source.versions()
