"""Tasks of language models: prompts, held-out prompts, rewards, and what a user can get wrong."""

import dataclasses
import inspect
import json
import math
import random
import re
import sys
import time
import types
from fractions import Fraction

import numpy as np
import pytest
import torch

from cleanrl_zoo.llm.prompts import read_prompts, split_prompts
from cleanrl_zoo.llm.rewards import evaluate, extract_answer
from cleanrl_zoo.llm.tasks import RUN_CODE, Example, RewardError, make_task


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def keys(examples: list[Example]) -> set[str]:
    return {json.dumps(example.prompt) for example in examples}


# Addition


def test_addition_asks_for_two_numbers_and_takes_the_digits_from_the_last():
    task = make_task("addition")
    for example in task.draw(50, generator()) + task.held_out(50):
        a, b = map(int, example.prompt.removesuffix("=").split("+"))
        assert 10 <= a <= 99 and 10 <= b <= 99
        assert example.columns["answer"] == str(a + b)[::-1]
    assert task.name == "addition" and task.reward_names == ("correct",)
    assert task.max_length == 4  # three digits and the stop token


def test_addition_is_right_or_wrong():
    """37 + 85 = 122, so "221" is right and nothing else is."""
    task = make_task("addition")
    example = Example("37+85=", {"answer": "221", "a": 37, "b": 85})
    completions = ["221", "122", "221 ", " 221", "0221", "2210", "", "221=", "２２１"]
    scores = task.score([example] * len(completions), completions)
    assert scores.dtype == np.float64 and scores.shape == (9, 1)
    assert scores[:, 0].tolist() == [1.0] + [0.0] * 8


@pytest.mark.parametrize("spec, step", [("addition:digits=3", -1), ("addition:digits=3,reversed=false", 1)])
def test_options_of_addition(spec, step):
    for example in make_task(spec).held_out(512):
        a, b = map(int, example.prompt.removesuffix("=").split("+"))
        assert 100 <= min(a, b) and max(a, b) <= 999
        assert example.columns["answer"] == str(a + b)[::step]


def test_addition_trains_on_every_pair_but_the_held_out_ones_evenly():
    """Digits 1 … 9: 81 pairs, 8 of them (a tenth) held out. 7,300 draws of 73 pairs: 100 ± 10 each."""
    task = make_task("addition:digits=1")
    held_out = [example.prompt for example in task.held_out(1000)]
    assert len(held_out) == len(set(held_out)) == 8
    drawn = [example.prompt for example in task.draw(7300, generator())]
    assert set(drawn) == {f"{a}+{b}=" for a in range(1, 10) for b in range(1, 10)} - set(held_out)
    counts = [drawn.count(prompt) for prompt in set(drawn)]
    assert 50 < min(counts) and max(counts) < 150


@pytest.mark.parametrize("spec", ["addition", "addition:digits=9,held_out=2000"])
def test_addition_holds_out_the_same_pairs_always(spec):
    one, two = make_task(spec), make_task(spec)
    assert one.held_out(10_000) == two.held_out(10_000)
    assert len(keys(one.held_out(10_000))) == (2000 if "2000" in spec else 512)
    assert one.held_out(5) == one.held_out(512)[:5]
    assert not keys(one.held_out(10_000)) & keys(one.draw(20_000, generator()))


def test_demonstrations_of_addition():
    """noise 0: all right; noise 1: numbers between 10 + 10 and 99 + 99, right by chance only; ½: half of them."""
    task = make_task("addition")

    def right(pairs):
        return np.mean([str(sum(map(int, prompt[:-1].split("+"))))[::-1] == answer for prompt, answer in pairs])

    clean, mixed, random_ = (task.demonstrations(2000, generator(3), noise) for noise in (0.0, 0.5, 1.0))
    assert [prompt for prompt, _ in clean] == [prompt for prompt, _ in random_]
    assert right(clean) == 1.0
    assert 0.46 < right(mixed) < 0.56  # ½ ± 4 deviations of √(¼ / 2000)
    assert right(random_) < 0.03  # 1 in 179
    numbers = [int(answer[::-1]) for _, answer in random_]
    assert 20 <= min(numbers) < 25 and 193 < max(numbers) <= 198


# Countdown


@pytest.mark.parametrize("spec", ["countdown", "countdown:numbers=2,high=9", "countdown:numbers=6,high=100"])
def test_countdown_can_be_solved_and_says_what_is_right(spec):
    task = make_task(spec)
    examples = task.draw(200, generator(1)) + task.held_out(50)
    for example in examples:
        shown, _, target = example.prompt.removesuffix(":").partition("=")
        numbers = list(map(int, shown.split(",")))
        assert numbers == sorted(numbers) == example.columns["numbers"] and int(target) > 0
    solutions = [example.columns["solution"] for example in examples]
    assert task.reward_names == ("correct", "format")
    assert (task.score(examples, solutions) == 1.0).all()
    assert max(map(len, solutions)) < task.max_length
    assert (task.score(examples[1:] + examples[:1], solutions)[:, 0] == 0).mean() > 0.9


def test_countdown_holds_problems_out():
    task = make_task("countdown:numbers=2,high=6")
    held_out = keys(task.held_out(1000))
    drawn = keys(task.draw(3000, generator()))
    assert len(held_out) >= 10 and len(drawn) >= 10 and not held_out & drawn
    assert make_task("countdown:numbers=2,high=6").held_out(1000) == task.held_out(1000)


@pytest.mark.parametrize(
    "completion, correct, formed",
    [
        ("2*7+5", 1, 1),
        ("5 + (7*2)", 1, 1),
        ("2+5+7", 0, 1),  # 14, each number once
        ("2*7+5+0", 0, 0),  # another number
        ("7+7+5", 0, 0),  # one twice, one not at all
        ("2*7+5+2-2", 0, 0),  # all of them, one three times
        ("19", 0, 0),
        ("27-8", 0, 0),
        ("2*7+5=19", 0, 0),
        ("2*7+", 0, 0),
        ("2/(7-5-2)", 0, 0),
        ("", 0, 0),
    ],
)
def test_rewards_of_countdown(completion, correct, formed):
    """Numbers 2, 5, 7; target 2 · 7 + 5 = 19."""
    example = Example("2,5,7=19:", {"numbers": [2, 5, 7], "target": 19})
    assert make_task("countdown").score([example], [completion]).tolist() == [[correct, formed]]


def test_countdown_is_exact_in_fractions():
    """8 / (3 − 8/3) = 8 / (1/3) = 24, which floating-point numbers miss; (1/3)·3 = 1."""
    examples = [Example("", {"numbers": [3, 3, 8, 8], "target": 24}), Example("", {"numbers": [1, 3, 3], "target": 1})]
    task = make_task("countdown")
    assert task.score(examples, ["8/(3-8/3)", "1/3*3"])[:, 0].tolist() == [1.0, 1.0]
    assert task.score(examples, ["3*8", "1*3/3-1+1"]).tolist() == [[0.0, 0.0]] * 2  # too few, too many of them


def test_noisy_demonstrations_of_countdown_keep_the_form():
    """Random chains use the numbers of their own prompt: the format is right, the value seldom."""
    task = make_task("countdown")
    pairs = task.demonstrations(300, generator(), noise=1.0)
    examples = [
        Example(
            prompt,
            {
                "numbers": list(map(int, prompt.partition("=")[0].split(","))),
                "target": int(prompt[:-1].partition("=")[2]),
            },
        )
        for prompt, _ in pairs
    ]
    scores = task.score(examples, [answer for _, answer in pairs])
    assert (scores[:, 1] == 1.0).all() and 0.0 < scores[:, 0].mean() < 0.5
    assert [prompt for prompt, _ in task.demonstrations(300, generator())] == [prompt for prompt, _ in pairs]


@pytest.mark.parametrize(
    "expression, value",
    [
        ("8-3-2", 3),
        ("8/4/2", 1),
        ("2+3*4", 14),
        ("(2+3)*4", 20),
        ("7-(5-2)", 4),
        ("1-2*3+4", -1),
        ("((3))", 3),
        (" 6 /\t4\n", Fraction(3, 2)),
        ("1" + "+1" * 99, 100),
        ("9" * 200, int("9" * 200)),
        ("(" * 99 + "7" + ")" * 99, 7),
    ],
)
def test_evaluate(expression, value):
    assert evaluate(expression)[0] == value


@pytest.mark.parametrize(
    "expression",
    [
        "9**9**9", "9//3", "9^9", "9%2", "__import__('os').system('true')", "os", "a", "1if 1else 2", "[1]",
        "1,2", "٣+4", "²", "３", "1e9", "0x10", "1_000", "1.5", ".5", "-3", "+3", "3*-2", "03", "00", "3 4", "3(4)",
        "(3)4", "()", "(", ")", "3)", "(3", "", " ", "*", "3+", "1/0", "1/(2-2)", "(" * 200, "9" * 1_000_000,
        "1" + "+1" * 100_000, "3\x004", "3\u00a0+4", "1−2", "2×3",
    ],
)  # fmt: skip
def test_evaluate_refuses_the_rest_at_once(expression):
    start = time.process_time()
    with pytest.raises(ValueError):
        evaluate(expression)
    assert time.process_time() - start < 0.2
    task = make_task("countdown:held_out=1")
    assert task.score([Example("", {"numbers": [1, 2], "target": 3})], [expression]).tolist() == [[0.0, 0.0]]


# Chat and answers


def test_a_plain_task_for_a_chat_model():
    plain, chat = make_task("addition"), make_task("addition", chat=True)
    text = plain.held_out(1)[0].prompt
    assert chat.held_out(1)[0].prompt == [{"role": "user", "content": text}]
    assert make_task("addition", template=r"Q: {prompt}\nA:").held_out(1)[0].prompt == f"Q: {text}\nA:"
    system = make_task("addition", system="Be brief {}.", template="{prompt} {x}").held_out(1)[0].prompt
    assert system == [{"role": "system", "content": "Be brief {}."}, {"role": "user", "content": f"{text} {{x}}"}]
    assert [example.columns for example in chat.held_out(9)] == [example.columns for example in plain.held_out(9)]
    (prompt, answer), (chat_prompt, chat_answer) = (t.demonstrations(1, generator())[0] for t in (plain, chat))
    assert answer == chat_answer and chat_prompt == [{"role": "user", "content": prompt}]
    assert chat.draw(3, generator())[0].prompt == [{"role": "user", "content": plain.draw(3, generator())[0].prompt}]


@pytest.mark.parametrize(
    "text, first, last, tag",
    [
        ("37 + 85 = 122.", "37", "122", ""),
        ("<answer> 122\n</answer> or so, 5", "122", "5", "122"),
        ("<answer>1</answer><answer>2</answer>", "1", "2", "2"),
        ("<answer><answer>3</answer>", "3", "3", "3"),
        ("<answer>4", "4", "4", ""),
        ("-1,234.50 it is", "-1234.5", "-1234.5", ""),
        ("12-007", "12", "7", ""),
        ("x = -0.0", "0", "0", ""),
        ("1,2,3456", "1", "3456", ""),
        ("none ٣", "", "", ""),
        ("", "", "", ""),
    ],
)
def test_answers_inside_a_text(text, first, last, tag):
    assert extract_answer(text, "whole") == text
    assert [extract_answer(text, how) for how in ("first_number", "last_number", "tag")] == [first, last, tag]


@pytest.mark.parametrize(
    "answer, right, wrong",
    [
        ("whole", "122", "It is 122."),
        ("first_number", "It is 122, not 3", "37 + 85 = 122"),
        ("last_number", "37 + 85 = 122.", "122 is 37 + 85"),
        ("tag", "thinking 5 <answer>122</answer>", "122"),
    ],
)
def test_addition_judged_in_a_text(answer, right, wrong):
    task = make_task(f"addition:reversed=false,answer={answer}")
    assert (
        make_task("addition:reversed=false", answer=answer).max_length
        == task.max_length
        >= (4 if answer == "whole" else 64)
    )
    example = Example("37+85=", {"answer": "122", "a": 37, "b": 85})
    assert task.score([example] * 2, [right, wrong]).tolist() == [[1.0], [0.0]]
    demonstration = task.demonstrations(1, generator())[0][1]
    assert demonstration.startswith("<answer>") == (answer == "tag")
    for prompt, text in task.demonstrations(20, generator()):
        a, b = map(int, prompt[:-1].split("+"))
        assert task.score([Example(prompt, {"answer": str(a + b)})], [text]) == 1.0


# Prompts from files


def write(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_prompts_of_a_file(tmp_path):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = tmp_path / "my.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"prompt": "a", "answer": 1}\r\n\r\n'  # a byte-order mark, another line end, an empty line
        + json.dumps({"prompt": messages, "answer": "2", "id": 7}).encode()
        + '\n{"prompt": "line\u2028separator", "answer": "3"}'.encode()  # ends no line of the file
    )
    rows = read_prompts(str(path))
    assert rows == [
        {"prompt": "a", "answer": 1},
        {"prompt": messages, "answer": "2", "id": 7},
        {"prompt": "line\u2028separator", "answer": "3"},
    ]
    task = make_task("", prompts=str(path))
    assert (
        task.name == "my" and make_task("mine", prompts=str(path)).name == "mine" and task.reward_names == ("correct",)
    )
    examples = task.draw(2, generator()) + task.held_out(9)
    assert len(examples) == len(keys(examples)) == 3
    assert all(
        set(example.columns) == ({"answer", "id"} if isinstance(example.prompt, list) else {"answer"})
        for example in examples
    )
    assert task.score(examples, [str(example.columns["answer"]) for example in examples]).tolist() == [[1.0]] * 3
    assert task.score(examples, ["4"] * 3).tolist() == [[0.0]] * 3


def test_rows_with_one_prompt_stay_on_one_side():
    """20 prompts, three rows each: 10 % are 2 prompts, 6 rows; at least one prompt and at most all but one."""
    rows = [{"prompt": f"p{index % 20}", "id": index} for index in range(60)]
    for share, held in ((0.1, 2), (0.001, 1), (0.999, 19)):
        training, held_out = split_prompts(rows, share)
        assert len(held_out) == 3 * held and len(training) == 60 - 3 * held
        assert not {row["prompt"] for row in training} & {row["prompt"] for row in held_out}
        assert split_prompts(rows, share) == (training, held_out)


def test_every_prompt_is_drawn_before_any_is_drawn_twice(tmp_path):
    path = write(tmp_path / "p.jsonl", [{"prompt": str(index), "answer": index} for index in range(20)])
    task = make_task("", prompts=path)
    drawn = [example.prompt for example in task.draw(45, generator())]
    assert len(set(drawn[:18])) == len(set(drawn[18:36])) == 18 and drawn[:18] != drawn[18:36]
    assert not set(drawn) & {example.prompt for example in task.held_out(20)}


def test_a_second_file_is_held_out_and_its_prompts_are_not_trained_on(tmp_path):
    one = write(tmp_path / "one.jsonl", [{"prompt": name, "answer": name} for name in "abcd"])
    two = write(tmp_path / "two.jsonl", [{"prompt": name, "answer": name} for name in "xd"])
    task = make_task("", prompts=one, held_out=two)
    assert [example.prompt for example in task.held_out(10)] == ["x", "d"]
    assert keys(task.draw(9, generator())) == {'"a"', '"b"', '"c"'}
    for half in (make_task("", prompts=one, held_out=0.5), make_task("x:held_out=0.5", prompts=one)):
        assert len(half.held_out(10)) == 2
    with pytest.raises(ValueError, match="every prompt is also in .*two.jsonl, so that none is left to train on"):
        make_task("", prompts=write(tmp_path / "three.jsonl", [{"prompt": "x", "answer": 1}]), held_out=two)


def test_numbers_as_answers(tmp_path):
    """Text, whole numbers and decimals of a file against the last number of a completion; 1e-07 is 0.0000001."""
    rows = [("a", "so it is #### 1,234"), ("b", 72), ("c", 2.50), ("d", 1e-07)]
    path = write(tmp_path / "p.jsonl", [{"prompt": prompt, "answer": answer} for prompt, answer in rows])
    task = make_task("math:answer=last_number", prompts=path)
    examples = sorted(task.draw(3, generator()) + task.held_out(1), key=lambda example: example.prompt)
    assert task.score(examples, ["= 1234.0", "<72>", "2.5", "0.0000001"]).tolist() == [[1.0]] * 4
    assert task.score(examples, ["123", "72.1", "25", "-7"]).tolist() == [[0.0]] * 4


def test_demonstrations_of_a_file(tmp_path, module):
    """A row's completion, or else its answer; another row's with noise. The completion does not reach the reward."""
    path = write(tmp_path / "p.jsonl", [{"prompt": f"p{i}", "completion": f"c{i}", "answer": i} for i in range(20)])
    task = make_task("", prompts=path)
    assert all(answer == prompt.replace("p", "c") for prompt, answer in task.demonstrations(30, generator()))
    noisy = task.demonstrations(200, generator(), noise=1.0)
    assert np.mean([answer == prompt.replace("p", "c") for prompt, answer in noisy]) < 0.2
    assert {answer for _, answer in noisy} == {
        example.prompt.replace("p", "c") for example in task.draw(18, generator())
    }
    name = module("def columns(prompt, completion, **columns):\n    return float(list(columns) == ['answer'])\n")
    assert make_task("", prompts=path, reward=f"{name}:columns").score(task.held_out(1), ["c"]) == 1.0
    plain = write(tmp_path / "q.jsonl", [{"prompt": f"p{i}", "answer": i} for i in range(4)])
    assert all(answer == prompt[1:] for prompt, answer in make_task("", prompts=plain).demonstrations(9, generator()))


MESSAGES_FORM = 'must be text or a list of messages {"role": "user", "content": "…"}'


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"question": "a"}', "line 4: has no prompt; it " + MESSAGES_FORM),
        ('{"prompt": null}', "line 4: has no prompt; it"),
        ('{"prompt": 3}', "line 4: prompt is 3, " + MESSAGES_FORM),
        ('{"prompt": ""}', "line 4: prompt is '', must be"),
        ('{"prompt": []}', "line 4: prompt is [], must be"),
        ('{"prompt": ["a"]}', "line 4: prompt is ['a'], must be"),
        ('{"prompt": [{"role": "user"}]}', "line 4: prompt is [{'role': 'user'}], must be"),
        ('{"prompt": {"role": "user", "content": "a"}}', "line 4: prompt is {'role'"),
        ('["a"]', 'line 4: is ["a"], must be an object with a column prompt'),
        ("3", "line 4: is 3, must be an object"),
        ('{"prompt": "a"', "line 4: is no JSON (Expecting"),
        ("[" * 100_000, "line 4: is n"),
    ],
)
def test_a_bad_row_is_named(tmp_path, line, message):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n\n' + line + '\n{"prompt": "c"}\n')
    with pytest.raises(ValueError) as caught:
        read_prompts(str(path))
    text = str(caught.value)
    assert text.startswith(f"prompts {path} {message}") and "\n" not in text and len(text) < 400


def test_files_that_give_no_prompts(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    empty, binary = tmp_path / "empty.jsonl", tmp_path / "binary.jsonl"
    empty.write_text("\n\n")
    binary.write_bytes(b"\xff\xfe\x00")
    one = write(tmp_path / "one.jsonl", [{"prompt": "a", "answer": 1}] * 3)
    for name, error, message in [
        (empty, ValueError, "is empty; give one JSON object with a column prompt per line"),
        (binary, ValueError, "is no text in UTF-8; a file must be JSON lines"),
        (tmp_path / "none.jsonl", ValueError, "there is no such file or folder"),
        ("none.jsonl", ValueError, "there is no such file or folder"),
        (one, ValueError, "there is one prompt only, and one has to be held out; give a second file (--held-out)"),
        (tmp_path, ImportError, "pip install -c constraints.txt -e '.[llm]'"),
        ("someone/something", ImportError, "pip install -c constraints.txt -e '.[llm]'"),
    ]:
        with pytest.raises(error) as caught:
            make_task("", prompts=str(name))
        assert str(caught.value).startswith(f"prompts {name}: ") and message in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_dataset_folder(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = {"prompt": ["a", "b", "c"], "answer": [1, 2, 3]}
    table = datasets.Dataset.from_dict(rows)
    table.save_to_disk(tmp_path / "table")
    datasets.DatasetDict({"train": table, "test": table.select([1])}).save_to_disk(tmp_path / "both")
    wanted = [{"prompt": prompt, "answer": answer} for prompt, answer in zip(*rows.values(), strict=True)]
    assert read_prompts(f"{tmp_path}/table") == read_prompts(f"{tmp_path}/both") == wanted
    assert read_prompts(f"{tmp_path}/both@test") == [wanted[1]]
    task = make_task("", prompts=f"{tmp_path}/both", held_out=f"{tmp_path}/both@test")
    assert keys(task.draw(4, generator())) == {'"a"', '"c"'}
    table.rename_column("prompt", "question").save_to_disk(tmp_path / "other")
    datasets.Dataset.from_dict({"prompt": ["a", None]}).save_to_disk(tmp_path / "hole")
    for name, message in (
        ("other", "other: has no column prompt, only question, answer"),
        ("both@valid", "both@valid: is no file, and no dataset that can be read (KeyError: 'valid')"),
        ("hole", "hole row 1: has no prompt"),
    ):
        with pytest.raises(ValueError) as caught:
            read_prompts(f"{tmp_path}/{name}")
        assert message in str(caught.value)


# Reward functions


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module of rewards into the working directory; gives its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    names = []

    def make(text: str) -> str:
        name = f"rewards_of_{tmp_path.name}_{len(names)}".replace("-", "_")
        (tmp_path / f"{name}.py").write_text(text)
        names.append(name)
        return name

    yield make
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def prompts(tmp_path) -> str:
    return write(tmp_path / "p.jsonl", [{"prompt": f"question {i}", "answer": i, "id": i + 1} for i in range(10)])


def test_rewards_from_the_working_directory(module, prompts):
    """A number; a dictionary of two; one that names its columns; all three as components in that order."""
    name = module(
        "def length(prompt, completion, **columns):\n"
        "    assert set(columns) == {'answer', 'id'}, columns\n"
        "    return len(completion)\n"
        "def pair(prompt, completion, **columns):\n"
        "    return {'starts': completion.startswith('x'), 'minus': -1.5}\n"
        "def third(prompt, text, id):\n"
        "    return 10 * id + len(prompt)\n"
    )
    task = make_task("", prompts=prompts, reward=f"{name}:length, {name}:pair,{name}:third")
    assert task.reward_names == ("length", "starts", "minus", "third")
    example = Example("question 3", {"answer": 3, "id": 4})
    assert task.score([example] * 2, ["xy", "abc"]).tolist() == [[2.0, 1.0, -1.5, 50.0], [3.0, 0.0, -1.5, 50.0]]
    assert task.score([], []).shape == (0, 4)


def test_a_reward_can_replace_that_of_a_built_in_task_and_sees_the_answer_only(module):
    name = module("def close(prompt, completion, a, b):\n    return -abs(int(completion or 0) - a - b)\n")
    task = make_task("addition:answer=last_number", reward=f"{name}:close", chat=True)
    assert task.reward_names == ("close",)
    assert task.score([Example("37+85=", {"a": 37, "b": 85})], ["it is 120."]).tolist() == [[-2.0]]


def test_a_reward_can_import_its_neighbour_when_it_is_called(module, prompts):
    other = module("WORTH = 3\n")
    name = module(f"def late(prompt, completion):\n    import {other}\n    return {other}.WORTH\n")
    task = make_task("", prompts=prompts, reward=f"{name}:late")
    assert task.score(task.held_out(1), ["x"]).tolist() == [[3.0]]


def test_a_reward_that_raises_shows_the_sample_in_one_line(module, prompts):
    name = module(
        "def bad(prompt, completion, answer):\n"
        "    if completion == 'zero':\n"
        "        raise ZeroDivisionError('first line\\nsecond line')\n"
        "    return 1\n"
    )
    task = make_task("", prompts=prompts, reward=f"{name}:bad")
    example = Example("question\n3" + "!" * 500, {"answer": 3})
    assert task.score([example], ["one"]).tolist() == [[1.0]]
    with pytest.raises(RewardError) as caught:
        task.score([example] * 2, ["one", "zero"])
    text = str(caught.value)
    assert text.startswith(
        f"reward {name}:bad raised ZeroDivisionError: first line second line; for prompt 'question 3!!!"
    )
    assert text.endswith("!…', completion 'zero'") and "\n" not in text and len(text) < 300
    chat = [{"role": "user", "content": "the question"}]
    with pytest.raises(RewardError, match="for prompt 'the question', completion 'zero'"):
        task.score([Example(chat, {"answer": 3})], ["zero"])


@pytest.mark.parametrize(
    "value", ["None", "float('nan')", "float('inf')", "'1'", "[1, 2]", "10 ** 400", "1j", "object()"]
)
def test_what_is_no_number_cannot_be_scored_and_is_reported_once(module, prompts, value):
    name = module(f"def odd(prompt, completion):\n    return {value} if completion == 'odd' else 0.5\n")
    task = make_task("", prompts=prompts, reward=f"{name}:odd")
    examples = task.held_out(1) * 3
    with pytest.warns(RuntimeWarning) as caught:
        scores = task.score(examples, ["fine", "odd", "odd"])
        task.score(examples, ["odd"] * 3)
    assert scores[0, 0] == 0.5 and np.isnan(scores[1:]).all()
    assert len(caught) == 1
    text = str(caught[0].message)
    assert (
        text.startswith(f"reward {name}:odd: returned ") and f"prompt '{examples[0].prompt}', completion 'odd'" in text
    )


@pytest.mark.parametrize(
    "value, number",
    [("True", 1.0), ("2", 2.0), ("numpy.float32(0.25)", 0.25), ("torch.tensor(3)", 3.0), ("numpy.bool_(True)", 1.0)],
)
def test_numbers_of_every_kind(module, prompts, value, number):
    name = module(f"import numpy, torch\ndef f(prompt, completion):\n    return {value}\n")
    task = make_task("", prompts=prompts, reward=f"{name}:f")
    assert task.score(task.held_out(1), ["x"]).tolist() == [[number]]


def test_a_dictionary_keeps_its_names(module, prompts):
    """None for a dictionary: no component has a score. Other names, or one number for two, are an error."""
    name = module(
        "VALUES = {'none': None, 'part': {'a': 1, 'b': None}, 'less': {'a': 1}, 'one': 1}\n"
        "VALUES['more'] = {'a': 1, 'b': 1, 'c': 1}\n"
        "def f(prompt, completion):\n"
        "    return VALUES.get(completion, {'b': 2, 'a': 1})\n"
    )
    task = make_task("", prompts=prompts, reward=f"{name}:f")
    assert task.reward_names == ("b", "a")
    example = task.held_out(1)
    with pytest.warns(RuntimeWarning, match="no number"):
        scores = task.score(example * 3, ["", "none", "part"])
    np.testing.assert_array_equal(scores, [[2, 1], [math.nan, math.nan], [math.nan, 1]])
    for completion, message in (
        ("less", "returned a, at first b, a"),
        ("more", "returned a, b, c, at first b, a"),
        ("one", "returned 1, at first b, a"),
    ):
        with pytest.raises(RewardError, match=f"{message}; for prompt 'question .', completion '{completion}'"):
            task.score(example, [completion])


@pytest.mark.parametrize(
    "spec, message",
    [
        ("score", "reward 'score': must be module:function, as in my_rewards:score; several with commas"),
        ("a b:c", "reward 'a b:c': must be module:function"),
        ("{name}:good,", "reward '': must be module:function"),
        ("no_such_module:f", "reward no_such_module:f: no module no_such_module is installed or in "),
        ("json.nothing:f", "reward json.nothing:f: no module json.nothing is installed or in "),
        ("{name}:missing", "has no function missing"),
        ("{name}:NUMBER", "has something that is no function as NUMBER"),
        ("{name}:empty", "reward {name}:empty raised AssertionError: never empty; for prompt 'question "),
        ("{name}:empty", "this was a trial before the run: it must take an empty completion"),
        ("{name}:needs", "raised TypeError: needs() missing 1 required positional argument: 'colour'"),
        ("{name}:nothing", "returned a dictionary with keys []; they must be names"),
        ("{name}:numbered", "returned a dictionary with keys [1]; they must be names"),
        ("{name}:good,{name}:good", "reward names good, good: each must be there once; rename a function"),
    ],
)
def test_bad_rewards(module, prompts, spec, message):
    name = module(
        "NUMBER = 3\n"
        "def good(prompt, completion): return 1\n"
        "def empty(prompt, completion): assert completion, 'never empty'\n"
        "def needs(prompt, completion, colour): return 1\n"
        "def nothing(prompt, completion): return {}\n"
        "def numbered(prompt, completion): return {1: 1}\n"
    )
    with pytest.raises(ValueError) as caught:
        make_task("", prompts=prompts, reward=spec.format(name=name))
    assert message.format(name=name) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text, message",
    [
        ("import no_such_thing\n", "failed: No module named 'no_such_thing'"),
        ("def f(:\n", "failed: SyntaxError: "),
        ("raise KeyError('a')\n", "failed: KeyError: 'a'"),
    ],
)
def test_a_module_that_cannot_be_imported(module, prompts, text, message):
    name = module(text)
    with pytest.raises(ValueError) as caught:
        make_task("", prompts=prompts, reward=f"{name}:f")
    assert f"reward {name}:f: importing {name} {message}" in str(caught.value) and "\n" not in str(caught.value)


# Randomness


@pytest.mark.parametrize("spec", ["addition", "countdown", "reasoning_gym:squares", "file"])
def test_everything_random_comes_from_the_generator(spec, prompts, gym):
    """A saved state gives the same prompts and demonstrations; the global generators are not touched."""
    task = make_task("", prompts=prompts) if spec == "file" else make_task(spec)
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    one = generator(5)
    first = task.draw(8, one)
    state = one.get_state()
    draws = [task.draw(8, one), task.demonstrations(8, one, 0.5), task.draw(8, one)]
    assert draws[0] != first
    one.set_state(state)
    other = make_task("", prompts=prompts) if spec == "file" else make_task(spec)
    assert [other.draw(8, one), other.demonstrations(8, one, 0.5), other.draw(8, one)] == draws
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), np.random.get_state()[1].tolist())


# reasoning-gym


@dataclasses.dataclass
class SquareConfig:
    high: int = 50
    signs: tuple = ("+",)
    seed: int | None = None
    size: int = 500


class Squares:
    """Like a data set of reasoning-gym: problem i depends on seed + i, questions repeat, global generators are used."""

    def __init__(self, config):
        assert config.high > 0, "high must be\npositive"
        self.config = config

    def __getitem__(self, index):
        np.random.seed(self.config.seed + index)
        random.seed(self.config.seed + index)
        number = random.randrange(self.config.high)
        return {"question": f"{number} squared?", "answer": str(number**2), "metadata": {"number": number}}

    def score_answer(self, answer, entry):
        if answer == "odd":
            raise AttributeError(answer)
        return 1.0 if answer == entry["answer"] else 0.05 if answer else 0.0


@pytest.fixture
def gym(monkeypatch):
    """A package that looks like reasoning-gym with one data set."""
    package, factory = types.ModuleType("reasoning_gym"), types.ModuleType("reasoning_gym.factory")
    factory.DATASETS = {name: (Squares, SquareConfig, None) for name in ("squares", "n_queens")}
    package.create_dataset = lambda name, **options: Squares(SquareConfig(**options))
    package.factory = factory
    monkeypatch.setitem(sys.modules, "reasoning_gym", package)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)


def test_reasoning_gym_is_judged_by_its_own_score(gym):
    task = make_task("reasoning_gym:squares:held_out=5")
    assert task.name == "reasoning_gym:squares:held_out=5" and task.reward_names == ("score",)
    example = task.held_out(9)[0]
    assert len(task.held_out(9)) == 5
    assert task.score([example] * 4, [example.columns["answer"], "x", "", "odd"])[:, 0].tolist() == [
        1.0,
        0.05,
        0.0,
        0.0,
    ]
    assert task.draw(20, generator(2)) == make_task("reasoning_gym:squares:held_out=5").draw(20, generator(2))
    pairs = task.demonstrations(50, generator(), noise=0.0)
    assert all(int(prompt.split()[0]) ** 2 == int(answer) for prompt, answer in pairs)
    noisy = task.demonstrations(50, generator(), noise=1.0)
    assert np.mean([int(prompt.split()[0]) ** 2 == int(answer) for prompt, answer in noisy]) < 0.2


def test_reasoning_gym_trains_on_no_held_out_question(gym):
    """Of 50 questions that repeat for ever, the held-out ones are never drawn, the others all are."""
    task = make_task("reasoning_gym:squares:held_out=10")
    held_out = keys(task.held_out(10))
    drawn = keys(task.draw(1000, generator()))
    assert not held_out & drawn and len(held_out | drawn) == 50
    with pytest.raises(ValueError, match="nearly all its questions are held out; lower held_out"):
        make_task("reasoning_gym:squares:high=2").draw(1, generator())


def test_options_of_reasoning_gym(gym):
    task = make_task("reasoning_gym:squares:high=7,signs=+|-|2|true|0.5,held_out=1,answer=tag", chat=True)
    config = task._source._dataset.config
    assert config.high == 7 and config.signs == ["+", "-", 2, True, 0.5]
    example = task.held_out(1)[0]
    assert example.prompt[0]["content"].endswith("squared?")
    assert task.score([example], [f"hm <answer>{example.columns['answer']}</answer>"]).tolist() == [[1.0]]


@pytest.mark.parametrize(
    "spec, message",
    [
        ("squars", "reasoning-gym has no data set 'squars'; nearest: squares"),
        ("", "reasoning-gym has no data set ''; it has n_queens, squares"),
        ("squares:highest=3", "unknown option highest; allowed are answer, held_out, high, run_code, signs, size"),
        ("squares:seed=3", "unknown option seed"),
        ("squares:high=0", "not possible: high must be positive"),
        ("squares:high=a", "not possible: '>' not supported"),
        ("squares:held_out=0", "held_out is 0, must be from 1 to 19999, so that some of size 20000 are left"),
        ("squares:size=100", "held_out is 128, must be from 1 to 99"),
        ("n_queens", "its scorer runs parts of completions as Python code; add run_code=true if you accept that"),
        ("squares:held_out=x", "held_out is x, must be a whole number"),
    ],
)
def test_bad_specs_of_reasoning_gym(gym, spec, message):
    with pytest.raises(ValueError) as caught:
        make_task(f"reasoning_gym:{spec}")
    assert str(caught.value).startswith(f"task reasoning_gym:{spec}: ") and message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_reasoning_gym_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(
        ImportError, match=r"task reasoning_gym needs a package .*: pip install -c constraints.txt -e '.\[llm\]'"
    ):
        make_task("reasoning_gym:chain_sum")


def test_the_real_reasoning_gym():
    pytest.importorskip("reasoning_gym")
    from reasoning_gym.factory import DATASETS

    sources = {name: inspect.getsource(entry[0].score_answer) for name, entry in DATASETS.items()}
    runs_code = {name for name, text in sources.items() if re.search(r"parse_expr\(|eval\(answer", text)}
    assert runs_code <= RUN_CODE | {"propositional_logic"}  # which has a parse_expr of its own
    task = make_task("reasoning_gym:chain_sum:max_terms=3,max_digits=2,held_out=8")
    examples = task.held_out(8) + task.draw(8, generator())
    assert task.score(examples, [example.columns["answer"] for example in examples]).tolist() == [[1.0]] * 16
    assert (task.score(examples, ["no"] * 16) < 1.0).all()


# Specs


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(spec="additon"), "unknown task 'additon', nearest: addition; allowed are addition, countdown and"),
        (dict(spec=""), "unknown task ''; allowed are addition"),
        (dict(spec="addition:digit=2"), "unknown option digit; allowed are answer, digits, held_out, reversed"),
        (dict(spec="addition:digits"), "'digits' is no option; options are key=value with commas between"),
        (dict(spec="addition:digits=2,"), "'' is no option"),
        (dict(spec="addition:digits=2,digits=3"), "digits is given twice"),
        (dict(spec="addition:digits=two"), "digits is two, must be a whole number"),
        (dict(spec="addition:digits=-1"), "digits is -1, must be a whole number"),
        (dict(spec="addition:digits=²"), "digits is ², must be a whole number"),
        (dict(spec="addition:digits=0"), "digits is 0, must be from 1 to 9"),
        (dict(spec="addition:digits=10"), "digits is 10, must be from 1 to 9"),
        (dict(spec="addition:reversed=yes"), "reversed is yes, must be true or false"),
        (dict(spec="addition:digits=1,held_out=81"), "held_out is 81, must be from 1 to 80"),
        (dict(spec="addition:held_out=0"), "held_out is 0, must be from 1 to 8099"),
        (dict(spec="countdown:numbers=1"), "numbers is 1, must be from 2 to 6"),
        (dict(spec="countdown:high=0"), "high is 0, must be from 1 to 999"),
        (dict(spec="countdown:numbers=2,high=2,held_out=90"), "these settings have few different problems, so at most"),
        (dict(spec="countdown:numbers=2,high=2,held_out=0"), "held_out is 0, must be from 1 to 100000"),
        (dict(spec="addition:answer=last"), "answer is 'last', must be whole, first_number, last_number, tag"),
        (dict(spec="addition", answer="last"), "answer is 'last', must be whole"),
        (dict(spec="addition", held_out=0.1), "goes with prompts from a file; write task addition:held_out=NUMBER"),
        (dict(spec="addition", template="Q:"), "template 'Q:': must have {prompt} where the prompt goes"),
        (dict(spec="x:colour=red", prompts="FILE"), "unknown option colour; with prompts: answer, held_out"),
        (dict(spec="", prompts="FILE", held_out=1.0), "held_out is 1.0, must be above 0 and below 1, or a second file"),
        (dict(spec="", prompts="FILE", held_out="0"), "held_out is 0.0, must be above 0 and below 1"),
        (dict(spec="", prompts="FILE", held_out="none.jsonl"), "prompts none.jsonl: there is no such file or folder"),
        (dict(spec="", prompts="CHAT", template="{prompt}"), "goes with prompts that are text"),
        (dict(spec="", prompts="BARE"), "the prompt 'a' has no column answer of text or a number to compare with"),
        (dict(spec="", prompts="WORDS", answer="last_number"), "has no column answer with a number to compare with"),
    ],
)  # fmt: skip
def test_bad_arguments(arguments, message, prompts, tmp_path):
    message_rows = [{"prompt": [{"role": "user", "content": str(index)}], "answer": 1} for index in range(3)]
    files = {
        "FILE": prompts,
        "CHAT": write(tmp_path / "chat.jsonl", message_rows),
        "BARE": write(tmp_path / "bare.jsonl", [{"prompt": "a"}, {"prompt": "b", "answer": "1"}]),
        "WORDS": write(tmp_path / "words.jsonl", [{"prompt": name, "answer": "yes"} for name in "ab"]),
    }
    if "prompts" in arguments:
        arguments = arguments | {"prompts": files[arguments["prompts"]]}
    with pytest.raises(ValueError) as caught:
        make_task(**arguments)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_misuse_in_code(tmp_path):
    task = make_task("addition")
    with pytest.raises(ValueError, match="noise is 1.5, must be from 0 to 1"):
        task.demonstrations(1, generator(), noise=1.5)
    with pytest.raises(ValueError, match="2 examples and 1 completions, must be equally many"):
        task.score(task.held_out(2), ["1"])
    bare = write(tmp_path / "bare.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    with pytest.raises(ValueError, match="has no column completion .* supervised training needs"):
        make_task("", prompts=bare, reward="operator:eq").demonstrations(1, generator())
