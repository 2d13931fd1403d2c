"""Preferences: which of two completions of a prompt is better, or whether one is good; read, sampled, encoded.

A JSON-lines file or a Hugging Face dataset has one of these forms, as `prompts.read_prompts` reads them:

    {"prompt": ..., "chosen": ..., "rejected": ...}     and chosen_score, rejected_score where a loss asks for them
    {"prompt": ..., "completion": ..., "label": true}   unpaired: whether the completion is good

A prompt is text or a list of chat messages. A completion is the text that follows, or such a list: the assistant's
message, with or without those of the prompt before it.
"""

import itertools
import json
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Generator, Tensor

from cleanrl_zoo.llm.loading import load_language_model
from cleanrl_zoo.llm.models import LanguageModel
from cleanrl_zoo.llm.prompts import Row, prompt_key, read_prompts, split_prompts
from cleanrl_zoo.llm.rewards import Prompt, RewardError, one_line
from cleanrl_zoo.llm.sampler import Completions
from cleanrl_zoo.llm.source import PromptError, PromptSource
from cleanrl_zoo.llm.tasks import Task
from cleanrl_zoo.llm.tokenizer import encode_completions, encode_prompts, pad_left, pad_right

VALUE_HEAD = "value_head.safetensors"
SCORES = (("chosen_score", "rejected_score"), ("score_chosen", "score_rejected"))  # both ways are in use


@dataclass(frozen=True)
class Pair:
    """Two completions of a prompt, of which the first is better: by these scores, where there are any."""

    prompt: Prompt
    chosen: str
    rejected: str
    chosen_score: float = 1.0
    rejected_score: float = 0.0


@dataclass(frozen=True)
class Judged:
    """A completion of a prompt, and whether it is good."""

    prompt: Prompt
    completion: str
    label: bool


ItemT = TypeVar("ItemT", Pair, Judged)


# Files and datasets


def read_pairs(name: str, scores: bool = False) -> list[Pair]:
    """The pairs of a file or dataset; those whose two completions are equal are left out, with one warning.

    scores: whether they are needed. The chosen one's must be the higher.

    Raises:
        ValueError: one line with the line's number: a missing column, an empty completion, scores the wrong way round.
        ImportError: for a dataset without the package `datasets`.
    """
    rows = read_prompts(name)
    pairs = [_pair(row, scores, lambda index=index: _place(name, index)) for index, row in enumerate(rows)]
    different = [pair for pair in pairs if pair.chosen != pair.rejected]
    if len(different) < len(pairs):
        what = f"{len(pairs) - len(different)} of {len(pairs)} pairs have the same text as chosen and as rejected"
        if not different:
            raise ValueError(f"pairs {name}: {what}; there is nothing to learn from")
        warnings.warn(f"pairs {name}: {what}; they are left out", stacklevel=2)
    return different


def read_judged(name: str) -> list[Judged]:
    """The judged completions of a file or dataset; pairs are taken apart, as `unpair` does.

    Raises:
        ValueError, ImportError: as `read_pairs`.
    """
    rows = read_prompts(name)
    if not {"completion", "label"} & rows[0].keys() and {"chosen", "rejected"} & rows[0].keys():
        return unpair(read_pairs(name))
    return [_judged(row, lambda index=index: _place(name, index)) for index, row in enumerate(rows)]


def unpair(pairs: list[Pair]) -> list[Judged]:
    """Every pair as two judged completions, the chosen one good and the rejected one bad."""
    return [
        judged
        for pair in pairs
        for judged in (Judged(pair.prompt, pair.chosen, True), Judged(pair.prompt, pair.rejected, False))
    ]


def write_pairs(path: Path, pairs: list[Pair]) -> None:
    """Writes JSON lines that `read_pairs` reads, to a temporary name that is then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".writing-{path.name}")
    lines = [json.dumps(vars(pair), ensure_ascii=False) + "\n" for pair in pairs]
    temporary.write_text("".join(lines), encoding="utf-8")
    temporary.rename(path)


def kept_pairs(path: Path, make: Callable[[], list[Pair]], write: bool) -> list[Pair]:
    """The pairs in the file `path`, or, the first time, those that `make` gives: a resumed run learns from the same."""
    if not path.exists():
        pairs = make()
        if write:
            write_pairs(path, pairs)
        return pairs
    return read_pairs(str(path), scores=True)


def hold_out(items: list[ItemT], held_out: str, read: Callable[[str], list[ItemT]]) -> tuple[list[ItemT], list[ItemT]]:
    """Items to train on and items held out, which share no prompt.

    held_out: the share of the prompts that is held out, or the name of a second file or dataset for `read`.

    Raises:
        ValueError: one line, for a share outside (0, 1), or when nothing is left to train on.
    """
    try:
        share = float(held_out)
    except ValueError:
        kept = read(held_out)
        keys = {prompt_key({"prompt": item.prompt}) for item in kept}
        training = [item for item in items if prompt_key({"prompt": item.prompt}) not in keys]
        if not training:
            raise ValueError(
                f"held-out pairs {held_out}: hold every prompt, so that none is left to train on"
            ) from None
        return training, kept
    parts = split_prompts([{"prompt": item.prompt, "item": item} for item in items], share)
    return tuple([row["item"] for row in part] for part in parts)


def _pair(row: Row, scores: bool, place: Callable[[], str]) -> Pair:
    prompt, (chosen, rejected) = _texts(row, ("chosen", "rejected"), place)
    if not scores:
        return Pair(prompt, chosen, rejected)
    names = next((names for names in SCORES if names[0] in row or names[1] in row), SCORES[0])
    values = [row.get(name) for name in names]
    for name, value in zip(names, values, strict=True):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            given = "has no" if value is None else f"{one_line(repr(value), 40)} is no number as"
            raise ValueError(f"{place()}: {given} column {name}; here each completion needs a score")
    if values[0] <= values[1]:
        raise ValueError(f"{place()}: {names[0]} is {values[0]}, must be above {names[1]}, which is {values[1]}")
    return Pair(prompt, chosen, rejected, *map(float, values))


def _judged(row: Row, place: Callable[[], str]) -> Judged:
    prompt, (completion,) = _texts(row, ("completion",), place)
    label = row.get("label")
    if label not in (True, False):
        given = "has no column label" if label is None else f"label is {one_line(repr(label), 40)}"
        raise ValueError(f"{place()}: {given}; it must be true (a good completion) or false")
    return Judged(prompt, completion, bool(label))


def _texts(row: Row, names: tuple[str, ...], place: Callable[[], str]) -> tuple[Prompt, list[str]]:
    """The prompt, a chat where a completion is one, and the completions' texts."""
    prompt, texts = row["prompt"], []
    missing = [name for name in names if row.get(name) is None]
    if missing:
        form = "prompt, completion and label" if names == ("completion",) else "prompt, chosen and rejected"
        raise ValueError(f"{place()}: has no column {' and no column '.join(missing)}; a row here has {form}")
    if isinstance(prompt, str) and any(isinstance(row[name], list) for name in names):
        prompt = [{"role": "user", "content": prompt}]
    for name in names:
        value = row[name]
        if isinstance(value, list):
            *before, last = value or [None]
            if not isinstance(last, dict) or last.get("role") != "assistant" or before not in ([], prompt):
                raise ValueError(
                    f"{place()}: {name} must be text, or chat messages: the assistant's, alone or after the prompt's"
                )
            value = last.get("content")
        if not isinstance(value, str):
            raise ValueError(f"{place()}: {name} is {one_line(repr(value), 40)}, must be text or chat messages")
        if not value:
            raise ValueError(f"{place()}: {name} is empty; a completion needs some text")
        texts.append(value)
    return prompt, texts


def _place(name: str, index: int) -> str:
    """Where the row `index` (from 0) of `read_prompts` stands."""
    path = Path(name).expanduser()
    if not path.is_file():
        return f"pairs {name} row {index}"
    with path.open(encoding="utf-8-sig") as lines:
        numbers = (number for number, line in enumerate(lines, 1) if line.strip())
        return f"pairs {name} line {next(itertools.islice(numbers, index, None))}"


# Pairs from a task


def sample_pairs(
    model: LanguageModel, source: PromptSource, count: int, generator: Generator, group_size: int = 8,
    temperature: float = 1.0, num_prompts: int = 64,
) -> list[Pair]:  # fmt: skip
    """`count` pairs that `model` wrote itself: of `group_size` completions the first of the best and of the worst.

    A prompt whose completions all have one reward gives none. Cut and empty completions are passed over, and those that
    cannot be scored. `generator` draws prompts and samples; the source's own is left as it is.

    Raises:
        PromptError: one line, when the pairs do not come together: the model is nearly always right or wrong.
    """
    pairs: list[Pair] = []
    draws, most = 0, 10 + 20 * math.ceil(count / num_prompts)
    while draws < (most if pairs else 10):
        draws += 1
        examples = source.task.draw(num_prompts, generator)
        noise = torch.rand(num_prompts, group_size, source.max_length, generator=generator)  # [P, G, L]
        completions, rewards = source.complete(model, examples, *source.encode(examples), noise, temperature)
        texts = source.texts(completions)
        total = source.total(rewards)  # [P, G]
        usable = ~total.isnan() & ~completions.truncated.view_as(total).to(total.device)
        usable &= torch.tensor([text != "" for text in texts]).view_as(total)
        best, worst = torch.where(usable, total, -torch.inf).max(1), torch.where(usable, total, torch.inf).min(1)  # [P]
        for row in (best.values > worst.values).nonzero().flatten().tolist():
            place = row * group_size
            pairs.append(
                Pair(
                    examples[row].prompt,
                    texts[place + int(best.indices[row])],
                    texts[place + int(worst.indices[row])],
                    float(best.values[row]),
                    float(worst.values[row]),
                )
            )
        if len(pairs) >= count:
            return pairs[:count]
    raise PromptError(
        f"{len(pairs)} of {count} pairs were found among {draws * num_prompts} prompts with {group_size} samples "
        "each: the model is nearly always right, or wrong, on this task; take another model, or give --pairs"
    )


def task_pairs(task: Task, count: int, generator: Generator) -> list[Pair]:
    """`count` pairs of the task's own: its right answer against a random one of the same form.

    Raises:
        ValueError: one line, for a task whose prompts come without answers.
    """
    pairs: list[Pair] = []
    while len(pairs) < count:
        same = Generator()
        same.set_state(generator.get_state())  # draws the same prompts
        wrong = task.demonstrations(count, same, 1.0)
        right = task.demonstrations(count, generator, 0.0)
        pairs += [
            Pair(prompt, good, bad)
            for (prompt, good), (other, bad) in zip(right, wrong, strict=True)
            if prompt == other and good != bad
        ]
        generator.set_state(same.get_state())
        if not pairs:
            raise ValueError(f"task {task.name}: its random answers are all right; give pairs in a file")
    return pairs[:count]


# Tokens


@dataclass
class Preferences:
    """N prompts, each with two completions (row 2i the chosen one of pair i, row 2i+1 the rejected one) or with one.

    Ids lie end to end, so that long and short texts take no more room than they have tokens.
    """

    prompts: Tensor  # int32, of all prompts
    prompt_ends: Tensor  # [N]
    completions: Tensor  # int32, of all completions, each with its stop token
    completion_ends: Tensor  # [N] or [2N]
    values: Tensor  # [N] float64: by how much the chosen one's score is higher; unpaired: 1 good, 0 bad
    pad_id: int
    dropped: int = 0  # items that were too long
    ref_logprob: Tensor | None = None  # of each completion under the reference, summed over its tokens, once known

    @classmethod
    def of(cls, completions: Completions, values: Tensor, pad_id: int) -> "Preferences":
        """From rows as `batch` gives them, and a value for each prompt."""
        each = len(completions.ids) // len(values)
        ids, ends = completions.ids[completions.mask], completions.lengths.cumsum(0)
        prompt_ids, prompt_mask = completions.prompt_ids[::each], completions.prompt_mask[::each]
        prompts, prompt_ends = prompt_ids[prompt_mask], prompt_mask.sum(1).cumsum(0)
        return cls(prompts.int(), prompt_ends, ids.int(), ends, values, pad_id)

    def __len__(self) -> int:
        return len(self.prompt_ends)

    @property
    def each(self) -> int:
        """Completions of each prompt."""
        return len(self.completion_ends) // len(self)

    @property
    def lengths(self) -> Tensor:
        """Tokens of each completion, [N · each]."""
        return _lengths(self.completion_ends)

    @property
    def total_lengths(self) -> Tensor:
        """Tokens of each prompt with its longest completion, [N]."""
        return _lengths(self.prompt_ends) + self.lengths.view(len(self), -1).amax(1)

    def rows(self, index: Tensor) -> Tensor:
        """The rows of the completions of the prompts `index` [M], [M · each]."""
        return (index.unsqueeze(1) * self.each + torch.arange(self.each)).flatten()

    def batch(self, index: Tensor) -> Completions:
        """The prompts `index` [M] and their completions, M · each rows, padded."""
        prompts = _pieces(self.prompts, self.prompt_ends, index)
        ids, mask = pad_right(_pieces(self.completions, self.completion_ends, self.rows(index)), self.pad_id)
        prompt_ids, prompt_mask = (x.repeat_interleave(self.each, 0) for x in pad_left(prompts, self.pad_id))
        whole = torch.zeros(len(ids), dtype=torch.bool)  # none is cut without its stop token
        return Completions(prompt_ids, prompt_mask, ids, mask, torch.zeros(ids.shape), whole)


def encode(
    tokenizer: Any, items: list[Pair] | list[Judged], stop_id: int, max_length: int, context: int, cut: bool = False
) -> Preferences:
    """Ids of prompts and completions. Prompts are encoded by themselves, so that they are what a sampler starts from.

    Args:
        stop_id: ends every completion.
        max_length: the most tokens of a completion, its stop token included; 0: what the context leaves.
        context: the most tokens of prompt and completion together.
        cut: a longer completion loses its last tokens but keeps its stop token. Otherwise, and where the prompt leaves
            no room for one token and the stop token, the item is dropped and counted.

    Raises:
        ValueError: one line: a chat whose prompt is no prefix of prompt and answer, a chat without chat template, or
            nothing left.
    """
    if not items:
        raise ValueError("there are no pairs to learn from")
    paired = isinstance(items[0], Pair)
    texts = [(item.chosen, item.rejected) if paired else (item.completion,) for item in items]
    for item, (text, *_) in zip(items, texts, strict=True):
        if not isinstance(item.prompt, str):
            _check_prefix(tokenizer, item.prompt, text)
    prompts = encode_prompts(tokenizer, [item.prompt for item in items])
    each = 2 if paired else 1
    flat = encode_completions(tokenizer, [text for row in texts for text in row], stop_id)
    kept_prompts, kept, values = [], [], []
    for number, (item, prompt) in enumerate(zip(items, prompts, strict=True)):
        room = min(max_length or context, context - len(prompt))
        rows = flat[number * each : (number + 1) * each]
        if cut and room >= 2:
            rows = [row if len(row) <= room else [*row[: room - 1], stop_id] for row in rows]
        if any(len(row) > room for row in rows) or (paired and rows[0] == rows[1]):
            continue
        kept_prompts.append(prompt)
        kept += rows
        values.append(item.chosen_score - item.rejected_score if paired else float(item.label))
    what, dropped = "pairs" if paired else "completions", len(items) - len(kept_prompts)
    if not kept_prompts:
        limit = f"{max_length} tokens" if max_length else f"the context of {context} tokens"
        raise ValueError(
            f"all {dropped} {what} are longer than {limit}; raise --max-length or cut them by --overlong cut"
        )
    values = torch.tensor(values, dtype=torch.float64)
    return Preferences(*_flat(kept_prompts), *_flat(kept), values, tokenizer.pad_token_id, dropped)


def _check_prefix(tokenizer: Any, prompt: list[dict], answer: str) -> None:
    """ValueError where the chat template writes the prompt otherwise once an answer follows."""
    if not tokenizer.chat_template:
        return  # `encode_prompts` says so
    before = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template([*prompt, {"role": "assistant", "content": answer}], tokenize=False)
    if not whole.startswith(before):
        raise ValueError(
            f"prompt {one_line(prompt[-1]['content'], 40)!r}: this model's chat template writes it otherwise when an "
            "answer follows, so that it is no prefix of prompt and answer; give prompts as text"
        )


def _flat(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """All ids end to end, and where each row ends."""
    ends = torch.tensor([len(row) for row in rows]).cumsum(0)
    return torch.tensor([token for row in rows for token in row], dtype=torch.int32), ends


def _lengths(ends: Tensor) -> Tensor:
    return ends.diff(prepend=ends.new_zeros(1))


def _pieces(flat: Tensor, ends: Tensor, index: Tensor) -> list[list[int]]:
    """The rows `index`, as lists."""
    stops = ends[index]
    starts = stops - _lengths(ends)[index]
    return [flat[start:stop].tolist() for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]


# Scores of a reward model


def save_reward_model(model: LanguageModel, folder: Path, tokenizer: Any) -> None:
    """Writes the model's folder (`LanguageModel.save`) and its value head beside the weights."""
    model.save(folder, tokenizer)
    temporary = folder / f".writing-{VALUE_HEAD}"
    save_file({name: value.contiguous() for name, value in model.value_head.state_dict().items()}, temporary)
    temporary.rename(folder / VALUE_HEAD)


def load_reward_model(name: str, tokenizer: Any, dtype: str = "float32", device: str = "cpu") -> LanguageModel:
    """A frozen model with the value head that was saved with it, for completions of a policy with this `tokenizer`.

    Raises:
        ValueError: one line: no such folder, no value head in it, tokens that are not the policy's.
    """
    model, other, _ = load_language_model(name, dtype, device, value_head=True)
    path = Path(name).expanduser() / VALUE_HEAD
    if not path.is_file():
        raise ValueError(f"reward model {name}: has no {VALUE_HEAD}; give the policy folder of a run of llm_reward.py")
    head = load_file(path)
    if {key: value.shape for key, value in head.items()} != {
        k: v.shape for k, v in model.value_head.state_dict().items()
    }:
        raise ValueError(f"reward model {name}: {VALUE_HEAD} is not that of this model")
    model.value_head.load_state_dict(head)
    if other.get_vocab() != tokenizer.get_vocab():
        raise ValueError(f"reward model {name}: its tokens are not the policy's; give one trained from the same family")
    return model.requires_grad_(False)


def final_values(model: LanguageModel, completions: Completions, pad_id: int) -> Tensor:
    """The value of prompt and completion as a whole, [B]: of the state at each completion's own last token.

    One column is added, so that there is a place behind the last token, before which that state is the newest.
    """
    wide = completions.widen(completions.ids.shape[1] + 1, pad_id)
    behind = torch.arange(wide.mask.shape[1], device=wide.mask.device) == completions.lengths.unsqueeze(1)  # [B, L+1]
    return model.completion(wide.tokens, wide.attention_mask, behind, value=True).value.sum(1)


# For a run


class PairSource:
    """Stands in a run where environments stand: pairs that were learned from are counted as episodes.

    Their return is 1 where the model agreed with the pair before it learned from it, 0 where not, ½ for a tie.
    """

    exact_state = True
    max_episode_steps = None
    cut_episodes = 0
    engine = "transformers"
    errors = (PromptError, RewardError)

    def __init__(self, name: str) -> None:
        self.env_id = name
        self._episodes: list[tuple[float, int]] = []

    def versions(self) -> dict[str, str]:
        """Versions of the libraries that decide the numbers."""
        return {name: metadata.version(name) for name in ("transformers", "tokenizers")}

    def record(self, right: Tensor, lengths: Tensor) -> None:
        """Counts pairs: agreement [M] and tokens [M]."""
        self._episodes += list(zip(right.tolist(), lengths.tolist(), strict=True))

    def pop_episodes(self) -> list[tuple[float, int]]:
        """The pairs recorded since the last call."""
        episodes, self._episodes = self._episodes, []
        return episodes

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Nothing is random here."""

    def close(self) -> None:
        """Nothing is held open."""
