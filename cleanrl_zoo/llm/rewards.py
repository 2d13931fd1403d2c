"""What a completion is worth: reward functions from anywhere, the answer inside a longer text, exact arithmetic.

A reward is any function `reward(prompt, completion, **columns)`: prompt as the model saw it (text or chat messages),
completion the text (or what `answer=` reads out of it), columns whatever the example carries beside its prompt. It
returns a number, or a dictionary of named numbers (several components, always the same names). A function without
`**columns` gets the columns that it names. None, NaN, an infinity or anything else that is no number means: this sample
cannot be scored.
"""

import importlib
import inspect
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

Prompt = str | list[dict[str, str]]
RewardFunction = Callable[..., Any]

ANSWERS = ("whole", "first_number", "last_number", "tag")  # how an answer can be read from a completion
SHOWN = 120  # characters of a prompt or completion in a message
LONGEST_EXPRESSION = 200  # characters; bounds the work that a completion can ask of `evaluate`


class RewardError(RuntimeError):
    """A reward function failed on a sample. The message is one line and shows the sample."""


def one_line(text: Any, limit: int = SHOWN) -> str:
    """`text` on one line, cut to `limit` characters."""
    line = " ".join(str(text).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


class Reward:
    """A reward function with the names of its components.

    label: how messages call it. names: one per component.
    """

    def __init__(self, label: str, function: RewardFunction, names: tuple[str, ...]):
        self.label, self.function, self.names = label, function, names
        self._wanted = _wanted_columns(function)
        self._reported = False  # one note on samples that cannot be scored is enough

    @classmethod
    def probed(cls, label: str, function: RewardFunction, prompt: Prompt, columns: dict[str, Any]) -> "Reward":
        """A reward whose names are found by one call with an empty completion, as a model may write one.

        A function that returns a number is called by its own name, one that returns a dictionary by its keys.

        Raises:
            ValueError: when the function raises, or its dictionary is empty or has keys that are not text.
        """
        reward = cls(label, function, (label.rpartition(":")[2],))
        try:
            value = reward._call(prompt, "", columns)
        except RewardError as error:
            raise ValueError(f"{error}; this was a trial before the run: it must take an empty completion") from None
        if isinstance(value, Mapping):
            if not value or not all(isinstance(name, str) and name for name in value):
                raise ValueError(f"reward {label}: returned a dictionary with keys {list(value)}; they must be names")
            reward.names = tuple(value)
        return reward

    def __call__(self, prompt: Prompt, completion: str, columns: dict[str, Any]) -> list[float]:
        """One number per name; NaN where the sample cannot be scored, with one warning for the first of them.

        Raises:
            RewardError: when the function raises, or returns other components than it did at first.
        """
        value = self._call(prompt, completion, columns)
        if isinstance(value, Mapping):
            alike, given = set(value) == set(self.names), ", ".join(map(str, value)) or "nothing"
            numbers = [_number(value.get(name)) for name in self.names]
        else:  # None instead of several components is fine, a number is not
            numbers = [_number(value)] * len(self.names)
            alike, given = len(numbers) == 1 or math.isnan(numbers[0]), one_line(value)
        if not alike:
            known = ", ".join(self.names)
            raise RewardError(
                f"reward {self.label}: returned {given}, at first {known}; for {_sample(prompt, completion)}"
            )
        if not self._reported and any(map(math.isnan, numbers)):
            self._reported = True
            warnings.warn(
                f"reward {self.label}: returned {one_line(repr(value))}, no number, for {_sample(prompt, completion)}; "
                "such samples are left out (further ones are not reported)",
                RuntimeWarning,
                stacklevel=3,
            )
        return numbers

    def _call(self, prompt: Prompt, completion: str, columns: dict[str, Any]) -> Any:
        # `completion` as a column is a demonstration's text
        passed = {
            name: value
            for name, value in columns.items()
            if name != "completion" and (self._wanted is None or name in self._wanted)
        }
        try:
            return self.function(prompt, completion, **passed)
        except Exception as error:
            what = one_line(f"{type(error).__name__}: {error}", 2 * SHOWN)
            raise RewardError(f"reward {self.label} raised {what}; for {_sample(prompt, completion)}") from error


def load_rewards(spec: str) -> list[tuple[str, RewardFunction]]:
    """The functions that "module:function" names, or several of them separated by commas, each with its own spec.

    Modules are installed ones or files of the working directory, which is added to the end of the import path.

    Raises:
        ValueError: one line, for a spec of another form, a module that cannot be imported, a missing function.
    """
    return [(part.strip(), _load_reward(part.strip())) for part in spec.split(",")]


def _load_reward(spec: str) -> RewardFunction:
    module_name, _, function_name = spec.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), function_name)):
        raise ValueError(f"reward {spec!r}: must be module:function, as in my_rewards:score; several with commas")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # to stay: a reward may import its neighbours when it is called
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            where = f"no module {module_name} is installed or in {os.getcwd()}"
            raise ValueError(f"reward {spec}: {where}; give module:function") from None
        raise ValueError(f"reward {spec}: importing {module_name} failed: {one_line(error)}") from None
    except Exception as error:
        what = one_line(f"{type(error).__name__}: {error}")
        raise ValueError(f"reward {spec}: importing {module_name} failed: {what}") from None
    function = getattr(module, function_name, None)
    if not callable(function):
        where = f"module {module_name} ({getattr(module, '__file__', None) or 'built in'})"
        problem = "has no function" if function is None else "has something that is no function as"
        raise ValueError(f"reward {spec}: {where} {problem} {function_name}")
    return function


def _wanted_columns(function: RewardFunction) -> set[str] | None:
    """The columns that `function` can take after prompt and completion; None: any."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # written in C
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {parameter.name for parameter in parameters[2:]}


def _number(value: Any) -> float:
    """`value` as a finite float, otherwise NaN. Text is no number, even "1"."""
    if value is None or isinstance(value, str | bytes):
        return math.nan
    try:
        number = float(value)
    except Exception:  # a list, a tensor of several elements, an integer of a thousand digits
        return math.nan
    return number if math.isfinite(number) else math.nan


def _sample(prompt: Prompt, completion: str) -> str:
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    return f"prompt '{one_line(text)}', completion '{one_line(completion)}'"


# Answers

_NUMBER = re.compile(r"(?:(?<![0-9])-)?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")
_TAG = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)


def extract_answer(completion: str, answer: str) -> str:
    """The answer in a completion; "" where there is none.

    answer: "whole": the completion as it is. "first_number", "last_number": the first or last number of the text (sign,
    decimals and thousands separators allowed), in plain form: "-1,234.50" gives "-1234.5". "tag": the text of the last
    <answer>…</answer>, without blanks around it.
    """
    if answer == "whole":
        return completion
    if answer == "tag":
        found = _TAG.findall(completion)
        return found[-1].strip() if found else ""
    found = _NUMBER.findall(completion)
    return _plain_number(found[0 if answer == "first_number" else -1]) if found else ""


def _plain_number(text: str) -> str:
    whole, _, decimals = text.lstrip("-").replace(",", "").partition(".")
    plain = ".".join(filter(None, (whole.lstrip("0") or "0", decimals.rstrip("0"))))
    return f"-{plain}" if text.startswith("-") and plain != "0" else plain


def expected_answer(value: Any, answer: str) -> str:
    """What `extract_answer` should give where `value` (text or a number) is the right answer; "" where it cannot."""
    text = f"{Decimal(repr(value)):f}" if isinstance(value, float) else str(value)  # 1e-07 as 0.0000001
    return text.strip() if answer == "tag" else extract_answer(text, answer)


def answer_match(answer: str) -> RewardFunction:
    """A reward: 1 where the answer read from the completion is the one in the column `answer`, otherwise 0.

    answer: as in `extract_answer`. Numbers are compared in plain form: "1,234.0" is 1234.
    """

    def correct(prompt: Prompt, completion: str, **columns: Any) -> float:
        return float(completion == expected_answer(columns["answer"], answer))

    return correct


# Arithmetic

_TOKEN = re.compile(r"0|[1-9][0-9]*|[-+*/()]")
_RANK = {"+": 1, "-": 1, "*": 2, "/": 2}


def evaluate(expression: str) -> tuple[Fraction, list[int]]:
    """The exact value of an arithmetic expression, and its numbers in their order.

    Whole numbers in plain digits, + - * /, brackets and blanks; no signs, no powers, no leading zeros. At most 200
    characters. Nothing is ever run as code, and no input takes more than a moment.

    Raises:
        ValueError: for anything else, and for a division by zero.
    """
    if len(expression) > LONGEST_EXPRESSION:
        raise ValueError(f"an expression has at most {LONGEST_EXPRESSION} characters, this one {len(expression)}")
    values: list[Fraction] = []
    waiting: list[str] = []  # operators and opening brackets whose right side is not complete
    numbers: list[int] = []
    number_next = True
    for token in _tokens(expression):
        if number_next and token.isdigit():
            numbers.append(int(token))
            values.append(Fraction(numbers[-1]))
            number_next = False
        elif number_next and token == "(":
            waiting.append(token)
        elif not number_next and token in _RANK:
            while waiting and _RANK.get(waiting[-1], 0) >= _RANK[token]:
                _apply(waiting.pop(), values)
            waiting.append(token)
            number_next = True
        elif not number_next and token == ")" and "(" in waiting:
            while waiting[-1] != "(":
                _apply(waiting.pop(), values)
            waiting.pop()
        else:
            raise ValueError(f"{token} is not expected here")
    if number_next or "(" in waiting:
        raise ValueError("the expression is not complete")
    while waiting:
        _apply(waiting.pop(), values)
    return values[0], numbers


def _tokens(expression: str) -> list[str]:
    tokens, place = [], 0
    while place < len(expression):
        if expression[place] in " \t\r\n":
            place += 1
            continue
        found = _TOKEN.match(expression, place)
        if found is None:
            raise ValueError(f"{expression[place]!r} is not allowed")
        tokens.append(found.group())
        place = found.end()
    return tokens


def _apply(sign: str, values: list[Fraction]) -> None:
    """Replaces the last two values by their sum, difference, product or quotient."""
    right, left = values.pop(), values.pop()
    if sign == "/" and right == 0:
        raise ValueError("division by zero")
    values.append(
        left + right if sign == "+" else left - right if sign == "-" else left * right if sign == "*" else left / right
    )


def countdown_reward(prompt: Prompt, completion: str, numbers: list[int], target: int) -> dict[str, float]:
    """format: an expression that uses each number exactly once; correct: its value is the target as well."""
    try:
        value, used = evaluate(completion)
    except ValueError:
        return {"correct": 0.0, "format": 0.0}
    formed = sorted(used) == sorted(numbers)
    return {"correct": float(formed and value == target), "format": float(formed)}
