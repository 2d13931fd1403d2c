"""Tasks for language models: where prompts come from, and what judges the completions.

| spec                                    | prompt → completion                                    | rewards         |
|-----------------------------------------|--------------------------------------------------------|-----------------|
| addition[:digits=2,reversed=true]       | `37+85=` → `221`, the sum's digits from the last       | correct         |
| countdown[:numbers=3,high=20]           | `2,5,7=19:` → `2*7+5`, each number once, + - * / ( )   | correct, format |
| reasoning_gym:NAME[:KEY=VALUE,…]        | a data set of the package reasoning-gym, its own score | score           |
| any name, with `prompts` (and `reward`) | rows of a JSON-lines file or a Hugging Face dataset    | the functions'  |

Options of every spec: `held_out`, how many prompts (for a file: which share) are kept for evaluation and never drawn
for training; `answer`, how the answer is read from a completion (`rewards.extract_answer`). A model that answers in
sentences gets `chat`, a `template` around the prompt, and an answer that is looked for:

    make_task("addition:digits=1,reversed=false,answer=last_number", chat=True, template="Calculate {prompt}")

so that "The sum of 1 + 4 is 5." is right. (SmolLM2-135M-Instruct, sampled at temperature 0.7: 15 of 64.)

Everything random comes from the generator that is passed in, one of the CPU; what is held out is the same in every run.
"""

import contextlib
import dataclasses
import difflib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Generator

from cleanrl_zoo.llm.prompts import Row, prompt_key, read_prompts, split_prompts
from cleanrl_zoo.llm.rewards import (
    ANSWERS,
    Prompt,
    Reward,
    RewardError,
    RewardFunction,
    answer_match,
    countdown_reward,
    expected_answer,
    extract_answer,
    load_rewards,
    one_line,
)

__all__ = ["Example", "RewardError", "Task", "make_task"]


@dataclass(frozen=True)
class Example:
    """A prompt, text or chat messages, and what its rewards need to know."""

    prompt: Prompt
    columns: dict[str, Any] = field(default_factory=dict)


class Source(Protocol):
    """Examples without any dressing. `rewards` judges them unless the user does; `max_length`: tokens of an answer."""

    held_out: list[Example]
    max_length: int

    def draw(self, n: int, generator: Generator) -> list[Example]: ...

    def solutions(self, examples: list[Example], generator: Generator, noise: float) -> list[str]: ...

    def rewards(self, answer: str) -> list[tuple[str, RewardFunction, tuple[str, ...]]]: ...


class Task:
    """Prompts, the rewards of completions, and example answers. Made by `make_task`.

    name: for folders and tables. reward_names: of the K components; the first one verifies the answer.
    max_length: tokens of a completion that an answer fits into.
    """

    def __init__(
        self,
        name: str,
        source: Source,
        rewards: list[tuple[str, RewardFunction, tuple[str, ...]]],
        answer: str = "whole",
        chat: bool = False,
        template: str | None = None,
        system: str | None = None,
    ) -> None:
        """rewards: label, function, and names of its components; without names it is called once to learn them."""
        self.name, self._source, self._answer = name, source, answer
        self._chat, self._template, self._system = chat, template, system
        self.max_length = source.max_length if answer == "whole" else max(64, source.max_length + 16)
        trial = self._dressed(source.held_out[0])
        self._rewards = [
            Reward(label, function, names) if names else Reward.probed(label, function, trial.prompt, trial.columns)
            for label, function, names in rewards
        ]
        self.reward_names = tuple(component for reward in self._rewards for component in reward.names)
        if len(set(self.reward_names)) < len(self.reward_names):
            raise ValueError(f"reward names {', '.join(self.reward_names)}: each must be there once; rename a function")

    def draw(self, n: int, generator: Generator) -> list[Example]:
        """`n` training prompts. The generator's state is all that decides which."""
        return [self._dressed(example) for example in self._source.draw(n, generator)]

    def held_out(self, n: int) -> list[Example]:
        """The first `n` held-out prompts, all of them where there are fewer. No training prompt is among them."""
        return [self._dressed(example) for example in self._source.held_out[:n]]

    def score(self, examples: list[Example], completions: list[str]) -> np.ndarray:
        """Rewards [B, K] in float64 of B completions; NaN: this sample cannot be scored (warned of once per reward).

        Raises:
            RewardError: when a reward function raises; one line that shows the sample.
            ValueError: when there are not as many examples as completions.
        """
        if len(examples) != len(completions):
            raise ValueError(f"{len(examples)} examples and {len(completions)} completions, must be equally many")
        scores = np.empty((len(examples), len(self.reward_names)))  # [B, K]
        for row, (example, completion) in enumerate(zip(examples, completions, strict=True)):
            text = extract_answer(completion, self._answer)
            scores[row] = [x for reward in self._rewards for x in reward(example.prompt, text, example.columns)]
        return scores

    def demonstrations(self, n: int, generator: Generator, noise: float = 0.0) -> list[tuple[Prompt, str]]:
        """`n` training prompts with right answers, for supervised training.

        noise: probability that an answer is replaced by a random one of the same form.

        Raises:
            ValueError: for a noise outside [0, 1], and where the prompts come without answers.
        """
        if not 0.0 <= noise <= 1.0:
            raise ValueError(f"noise is {noise}, must be from 0 to 1")
        examples = self._source.draw(n, generator)
        texts = self._source.solutions(examples, generator, noise)
        if self._answer == "tag":
            texts = [text if "<answer>" in text else f"<answer>{text}</answer>" for text in texts]
        return [(self._dressed(example).prompt, text) for example, text in zip(examples, texts, strict=True)]

    def _dressed(self, example: Example) -> Example:
        """The example with template, chat messages and system prompt."""
        if not (self._chat or self._template or self._system):
            return example
        prompt = example.prompt
        if isinstance(prompt, str):
            if self._template:
                prompt = self._template.replace("{prompt}", prompt)
            if self._chat or self._system:
                prompt = [{"role": "user", "content": prompt}]
        if self._system and prompt[0]["role"] != "system":
            prompt = [{"role": "system", "content": self._system}, *prompt]
        return Example(prompt, example.columns)


def make_task(
    spec: str,
    prompts: str | None = None,
    reward: str | None = None,
    *,
    held_out: str | float | None = None,
    answer: str | None = None,
    chat: bool = False,
    template: str | None = None,
    system: str | None = None,
) -> Task:
    """A task from the text that the command line gives.

    Args:
        spec: as in this module's table. With `prompts`, its name is free and names the task.
        prompts: a JSON-lines file, or a Hugging Face dataset (`prompts.read_prompts`), with a column `prompt`.
        reward: "module:function" called as `reward(prompt, completion, **columns)`, several with commas between; takes
            the place of the task's own. Without it, prompts need a column `answer`, and an equal answer gets 1.
        held_out: with `prompts`: the share that is held out (0.1 by default), or a second file or dataset. Also as an
            option of `spec`, where it is a number for the other tasks.
        answer: how the answer is read from a completion: whole, first_number, last_number, tag. Rewards see no more
            than that answer. Also as an option of `spec`.
        chat: makes a text prompt the user's message of a chat.
        template: text around a text prompt, with {prompt} in its place; a backslash and n stand for a new line.
        system: the system message of a chat; implies `chat`.

    Raises:
        ValueError: one line that says what was given and what is allowed.
        ImportError: one line, where a spec needs a package that is not installed.
    """
    kind, dataset, options = _parse(spec, named=prompts is not None)
    answer = options.pop("answer", answer or "whole")
    if answer not in ANSWERS:
        raise ValueError(f"task {spec}: answer is {answer!r}, must be {', '.join(ANSWERS)}")
    if template is not None and "{prompt}" not in template:
        raise ValueError(
            f"template {template!r}: must have {{prompt}} where the prompt goes, as in 'Q: {{prompt}}\\nA:'"
        )
    if prompts is not None:
        source: Source = _prompts_source(prompts, options.pop("held_out", held_out), spec, options)
    elif held_out is not None:
        raise ValueError(f"held_out {held_out}: goes with prompts from a file; write task {kind}:held_out=NUMBER")
    else:
        source = _built_in_source(spec, kind, dataset, options)
    if template is not None and any(not isinstance(example.prompt, str) for example in source.held_out):
        raise ValueError(f"template {template!r}: goes with prompts that are text; {prompts} has chat messages")
    if reward is not None:
        rewards = [(label, function, ()) for label, function in load_rewards(reward)]
    else:
        rewards = source.rewards(answer)
    template = template.replace("\\n", "\n") if template is not None else None
    return Task(spec or Path(str(prompts)).stem, source, rewards, answer, chat, template, system)


# The spec


def _parse(spec: str, named: bool) -> tuple[str, str, dict[str, str]]:
    """Name, data set (of reasoning_gym) and options of `spec`; named: any name will do."""
    kind, _, rest = spec.partition(":")
    dataset = ""
    if kind == "reasoning_gym" and not named:
        dataset, _, rest = rest.partition(":")
    elif not named and kind not in BUILT_IN:
        near = difflib.get_close_matches(kind, [*BUILT_IN, "reasoning_gym"], 1)
        hint = f", nearest: {near[0]}" if near else ""
        raise ValueError(
            f"unknown task {spec!r}{hint}; allowed are {', '.join(BUILT_IN)} and reasoning_gym:NAME, each with "
            ":key=value,…, or any name with prompts from a file"
        )
    options: dict[str, str] = {}
    for part in rest.split(",") if rest else []:
        key, equals, value = (text.strip() for text in part.partition("="))
        if not (key and equals and value):
            raise ValueError(f"task {spec}: {part!r} is no option; options are key=value with commas between")
        if key in options:
            raise ValueError(f"task {spec}: {key} is given twice")
        options[key] = value
    return kind, dataset, options


def _whole(value: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) <= 9):
        raise ValueError("must be a whole number")
    return int(value)


def _flag(value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise ValueError("must be true or false")
    return value.lower() == "true"


def _built_in_source(spec: str, kind: str, dataset: str, options: dict[str, str]) -> Source:
    try:
        if kind == "reasoning_gym":
            own = _read({name: options.pop(name) for name in REASONING_GYM if name in options}, REASONING_GYM)
            return ReasoningGym(dataset, options, **own)
        make, readers = BUILT_IN[kind]
        return make(**_read(options, readers))
    except ValueError as error:
        raise ValueError(f"task {spec}: {error}") from None


def _read(options: dict[str, str], readers: dict[str, Callable[[str], Any]]) -> dict[str, Any]:
    """The options' values, each read by its reader."""
    values = {}
    for name, text in options.items():
        if name not in readers:
            raise ValueError(f"unknown option {name}; allowed are {', '.join(sorted([*readers, 'answer']))}")
        try:
            values[name] = readers[name](text)
        except ValueError as error:
            raise ValueError(f"{name} is {text}, {error}") from None
    return values


def _prompts_source(prompts: str, held_out: str | float | None, spec: str, options: dict[str, str]) -> "Prompts":
    if options:
        raise ValueError(f"task {spec}: unknown option {sorted(options)[0]}; with prompts: answer, held_out")
    rows = read_prompts(prompts)
    share = 0.1 if held_out is None else _share(held_out)
    if share is None:
        kept_out = read_prompts(str(held_out))
        keys = set(map(prompt_key, kept_out))  # a prompt in both files is for evaluation
        rows = [row for row in rows if prompt_key(row) not in keys]
        if not rows:
            raise ValueError(f"prompts {prompts}: every prompt is also in {held_out}, so that none is left to train on")
    else:
        try:
            rows, kept_out = split_prompts(rows, share)
        except ValueError as error:
            raise ValueError(f"prompts {prompts}: {error}") from None
    return Prompts(prompts, rows, kept_out)


def _share(held_out: str | float) -> float | None:
    """The number that `held_out` is; None: it is a file's name."""
    try:
        return float(held_out)
    except ValueError:
        return None


# Sources


class Addition:
    """The sum of two numbers of `digits` digits: `37+85=`, answered by its digits from the last (`221`) or the first.

    From the last digit on, each digit of a sum follows from what is already written.
    held_out: pairs kept for evaluation; by default a tenth of all, at most 512.
    """

    def __init__(self, digits: int = 2, reversed: bool = True, held_out: int | None = None) -> None:
        if not 1 <= digits <= 9:
            raise ValueError(f"digits is {digits}, must be from 1 to 9")
        self.low = 10 ** (digits - 1)
        self.count = 9 * self.low  # different numbers
        self.reversed, self.max_length = reversed, digits + 2  # the sum and the stop token
        pairs = self.count**2
        number = min(512, pairs // 10) if held_out is None else held_out
        if not 1 <= number < min(pairs, 100_000):
            raise ValueError(f"held_out is {number}, must be from 1 to {min(pairs, 100_000) - 1}")
        chosen = _distinct(pairs, number)
        self.held_out = self._examples(chosen)
        # the r-th pair that is not held out is pair r plus the held-out ones before it
        self._shift = chosen.sort().values - torch.arange(number)

    def draw(self, n: int, generator: Generator) -> list[Example]:
        """Pairs, each as likely as any other, independent of each other."""
        rank = torch.randint(self.count**2 - len(self.held_out), (n,), generator=generator)
        return self._examples(rank + torch.searchsorted(self._shift, rank, right=True))

    def solutions(self, examples: list[Example], generator: Generator, noise: float) -> list[str]:
        """The answers; a random one is that of a number between the smallest and the largest sum."""
        sums = torch.tensor([example.columns["a"] + example.columns["b"] for example in examples], dtype=torch.int64)
        smallest, largest = 2 * self.low, 2 * (10 * self.low - 1)
        other = torch.randint(smallest, largest + 1, (len(examples),), generator=generator)
        replaced = torch.rand(len(examples), generator=generator) < noise
        return [self._written(number) for number in torch.where(replaced, other, sums).tolist()]

    def rewards(self, answer: str) -> list[tuple[str, RewardFunction, tuple[str, ...]]]:
        return [("addition", answer_match(answer), ("correct",))]

    def _examples(self, pairs: torch.Tensor) -> list[Example]:
        first = (pairs // self.count + self.low).tolist()
        second = (pairs % self.count + self.low).tolist()
        return [
            Example(f"{a}+{b}=", {"answer": self._written(a + b), "a": a, "b": b})
            for a, b in zip(first, second, strict=True)
        ]

    def _written(self, number: int) -> str:
        return str(number)[::-1] if self.reversed else str(number)


def _distinct(size: int, count: int) -> torch.Tensor:
    """`count` different numbers below `size`, in random order, always the same ones."""
    generator = Generator().manual_seed(0)
    if size <= 2**20:
        return torch.randperm(size, generator=generator)[:count]
    chosen: dict[int, None] = {}
    while len(chosen) < count:
        chosen.update(dict.fromkeys(torch.randint(size, (count,), generator=generator).tolist()))
    return torch.tensor(list(chosen)[:count])


class Countdown:
    """Reach a target with each of some numbers once: `2,5,7=19:`, answered for instance by `2*7+5`.

    numbers: how many there are, each from 1 to `high`, shown in rising order. Every target is one that a chain of
    operations with whole, positive intermediate values reaches, at most 999 unless by a sum.
    held_out: problems kept for evaluation; by default 512, fewer where there are few problems.
    """

    def __init__(self, numbers: int = 3, high: int = 20, held_out: int | None = None) -> None:
        for name, value, least, most in (("numbers", numbers, 2, 6), ("high", high, 1, 999)):
            if not least <= value <= most:
                raise ValueError(f"{name} is {value}, must be from {least} to {most}")
        self.numbers, self.high = numbers, high
        self.max_length = numbers * (len(str(high)) + 3) + 1  # a number, a sign, two brackets; the stop token
        looked_at = 4 * (held_out or 512) + 64
        different = {example.prompt: example for example in self._problems(looked_at, Generator().manual_seed(0))}
        most = len(different) // 2  # the rest is left to train on
        number = min(512, most) if held_out is None else held_out
        if not 1 <= number <= min(most, 100_000):
            few = f"; these settings have few different problems, so at most {most} here" if number > most else ""
            raise ValueError(f"held_out is {number}, must be from 1 to 100000{few}")
        self.held_out = list(different.values())[:number]
        self._kept = {example.prompt for example in self.held_out}

    def draw(self, n: int, generator: Generator) -> list[Example]:
        """Random problems; those that are held out are drawn anew."""
        examples: list[Example] = []
        while len(examples) < n:
            drawn = self._problems(n - len(examples), generator)
            examples += [example for example in drawn if example.prompt not in self._kept]
        return examples

    def solutions(self, examples: list[Example], generator: Generator, noise: float) -> list[str]:
        """The solution that made each problem; a random answer is another chain with the same numbers."""
        order = torch.rand(len(examples), self.numbers, generator=generator).argsort(1).tolist()
        choices = torch.rand(len(examples), self.numbers - 1, generator=generator).tolist()
        replaced = (torch.rand(len(examples), generator=generator) < noise).tolist()
        texts = []
        for row, example in enumerate(examples):
            shuffled = [example.columns["numbers"][index] for index in order[row]]
            texts.append(_chain(shuffled, choices[row])[0] if replaced[row] else example.columns["solution"])
        return texts

    def rewards(self, answer: str) -> list[tuple[str, RewardFunction, tuple[str, ...]]]:
        return [("countdown", countdown_reward, ("correct", "format"))]

    def _problems(self, n: int, generator: Generator) -> list[Example]:
        numbers = torch.randint(1, self.high + 1, (n, self.numbers), generator=generator).tolist()
        choices = torch.rand(n, self.numbers - 1, generator=generator).tolist()
        examples = []
        for row in range(n):
            solution, target = _chain(numbers[row], choices[row])
            shown = sorted(numbers[row])
            prompt = f"{','.join(map(str, shown))}={target}:"
            examples.append(Example(prompt, {"numbers": shown, "target": target, "solution": solution}))
        return examples


def _chain(numbers: list[int], choices: list[float]) -> tuple[str, int]:
    """An expression that takes the numbers in turn, and its value; `choices` in [0, 1) pick among fitting signs."""
    text, value, is_sum = str(numbers[0]), numbers[0], False
    for number, choice in zip(numbers[1:], choices, strict=True):
        fits = {"+": True, "-": value > number, "*": value * number <= 999, "/": value % number == 0}
        signs = [sign for sign, possible in fits.items() if possible]
        sign = signs[int(choice * len(signs))]
        if is_sum and sign in "*/":
            text = f"({text})"
        text, is_sum = f"{text}{sign}{number}", sign in "+-"
        value = {"+": value + number, "-": value - number, "*": value * number, "/": value // number}[sign]
    return text, value


class ReasoningGym:
    """A data set of reasoning-gym, judged by its own `score_answer`; a completion on which that raises gets 0.

    The package makes problem i from (seed 0, i), so that data sets with other seeds share most of their problems. Of
    problems 0 … `size` − 1 the first `held_out` are held out and the others drawn for training, except those whose
    question is a held-out one's.
    run_code: must be true for the data sets whose scorers run a completion as Python, `RUN_CODE`.
    """

    max_length = 256
    tries = 1000  # of finding a question that is not held out

    def __init__(
        self, name: str, options: dict[str, str], held_out: int = 128, size: int = 20_000, run_code: bool = False
    ) -> None:
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError:
            raise ImportError(
                "task reasoning_gym needs a package that is not installed: pip install -c constraints.txt -e '.[llm]'"
            ) from None
        if name not in DATASETS:
            near = difflib.get_close_matches(name, DATASETS, 3)
            hint = f"nearest: {', '.join(near)}" if near else f"it has {one_line(', '.join(sorted(DATASETS)), 2000)}"
            raise ValueError(f"reasoning-gym has no data set {name!r}; {hint}")
        if name in RUN_CODE and not run_code:
            raise ValueError(
                "its scorer runs parts of completions as Python code; add run_code=true if you accept that"
            )
        if not 1 <= held_out < size:
            raise ValueError(
                f"held_out is {held_out}, must be from 1 to {size - 1}, so that some of size {size} are left"
            )
        allowed = {item.name for item in dataclasses.fields(DATASETS[name][1])} - {"seed"}
        unknown = sorted(set(options) - allowed)
        if unknown:
            names = ", ".join(sorted(allowed | {"answer", *REASONING_GYM}))
            raise ValueError(f"unknown option {unknown[0]}; allowed are {names}")
        values = {key: _value(value) for key, value in options.items()}
        self._name, self._size = name, size
        try:
            with _global_generators_kept():
                self._dataset = reasoning_gym.create_dataset(name, seed=0, size=size, **values)
            self.held_out = [self._example(index) for index in range(held_out)]
        except Exception as error:
            raise ValueError(f"not possible: {one_line(error) or type(error).__name__}") from None
        self._kept = {example.prompt for example in self.held_out}

    def draw(self, n: int, generator: Generator) -> list[Example]:
        """Problems, each as likely as any other.

        Raises:
            ValueError: when no question can be found that is not held out.
        """
        return [self._new(generator) for _ in range(n)]

    def solutions(self, examples: list[Example], generator: Generator, noise: float) -> list[str]:
        """The answers; a random one is that of another problem."""
        others = self.draw(len(examples), generator) if noise > 0 else examples
        replaced = (torch.rand(len(examples), generator=generator) < noise).tolist()
        chosen = [other if swap else own for own, other, swap in zip(examples, others, replaced, strict=True)]
        for example in chosen:
            if not isinstance(example.columns["answer"], str):
                raise ValueError(f"task reasoning_gym:{self._name}: its problems come without answers to show")
        return [example.columns["answer"] for example in chosen]

    def rewards(self, answer: str) -> list[tuple[str, RewardFunction, tuple[str, ...]]]:
        return [(f"reasoning_gym:{self._name}", self._score, ("score",))]

    def _score(self, prompt: Prompt, completion: str, entry: dict[str, Any], **columns: Any) -> float:
        try:
            with _global_generators_kept():
                return float(self._dataset.score_answer(answer=completion, entry=entry))
        except Exception:  # several scorers raise on text of a form that they do not expect
            return 0.0

    def _new(self, generator: Generator) -> Example:
        for _ in range(self.tries):
            index = torch.randint(len(self.held_out), self._size, (), generator=generator)
            example = self._example(int(index))
            if example.prompt not in self._kept:
                return example
        raise ValueError(f"task reasoning_gym:{self._name}: nearly all its questions are held out; lower held_out")

    def _example(self, index: int) -> Example:
        with _global_generators_kept():
            entry = self._dataset[index]
        return Example(entry["question"], {"answer": entry["answer"], "entry": entry})


# In reasoning-gym 0.1.25, these scorers call `eval`, or sympy's parser, which does.
RUN_CODE = frozenset(
    "binary_matrix countdown intermediate_integration n_queens polynomial_multiplication puzzle24 simple_integration "
    "spiral_matrix string_insertion".split()
)
REASONING_GYM = {"held_out": _whole, "size": _whole, "run_code": _flag}  # options that are not the data set's


@contextlib.contextmanager
def _global_generators_kept() -> Iterator[None]:
    """Restores the global generators of Python and numpy, which some of that package's data sets seed."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _value(text: str) -> Any:
    """A data set's option: a number, true, false, or text; several of them with | between are a list."""
    if "|" in text:
        return [_value(part) for part in text.split("|")]
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for read in (int, float):
        with contextlib.suppress(ValueError):
            return read(text)
    return text


class Prompts:
    """Rows of a file or dataset. A demonstration is the column `completion`, or else `answer`."""

    max_length = 256

    def __init__(self, name: str, rows: list[Row], held_out: list[Row]) -> None:
        self._name = name
        self._examples, self.held_out = list(map(_example, rows)), list(map(_example, held_out))

    def draw(self, n: int, generator: Generator) -> list[Example]:
        """Rows in random order: each once before any is there twice."""
        order: list[int] = []
        while len(order) < n:
            order += torch.randperm(len(self._examples), generator=generator).tolist()
        return [self._examples[index] for index in order[:n]]

    def solutions(self, examples: list[Example], generator: Generator, noise: float) -> list[str]:
        """The rows' own texts; a random one is another row's."""
        other = torch.randint(len(self._examples), (len(examples),), generator=generator).tolist()
        replaced = (torch.rand(len(examples), generator=generator) < noise).tolist()
        chosen = [self._examples[other[row]] if replaced[row] else example for row, example in enumerate(examples)]
        return [self._solution(example) for example in chosen]

    def rewards(self, answer: str) -> list[tuple[str, RewardFunction, tuple[str, ...]]]:
        for example in (*self._examples, *self.held_out):
            given = example.columns.get("answer")
            if not _is_text(given) or not expected_answer(given, answer):
                form = "with a number" if answer.endswith("number") else "of text or a number"
                raise ValueError(
                    f"prompts {self._name}: the prompt {one_line(example.prompt, 40)!r} has no column answer {form} to "
                    "compare with; add one, or give a reward module:function"
                )
        return [("answer", answer_match(answer), ("correct",))]

    def _solution(self, example: Example) -> str:
        for name in ("completion", "answer"):
            if _is_text(example.columns.get(name)):
                return str(example.columns[name])
        raise ValueError(
            f"prompts {self._name}: the prompt {one_line(example.prompt, 40)!r} has no column completion (or answer), "
            "which supervised training needs"
        )


def _example(row: Row) -> Example:
    columns = {name: value for name, value in row.items() if name != "prompt"}
    if "answer" not in columns and _is_text(columns.get("completion")):
        columns["answer"] = columns["completion"]  # a file of demonstrations says what is right
    return Example(row["prompt"], columns)


def _is_text(value: Any) -> bool:
    """Whether `value` can be written as an answer."""
    return isinstance(value, str | int | float) and not isinstance(value, bool) and value != ""


BUILT_IN: dict[str, tuple[Callable[..., Source], dict[str, Callable[[str], Any]]]] = {
    "addition": (Addition, {"digits": _whole, "reversed": _flag, "held_out": _whole}),
    "countdown": (Countdown, {"numbers": _whole, "high": _whole, "held_out": _whole}),
}
