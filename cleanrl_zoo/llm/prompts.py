"""Prompts from a JSON-lines file or a Hugging Face dataset.

Each row has a column `prompt`: text, or a list of chat messages {"role": ..., "content": ...}. Its other columns go to
the reward; `completion` is the text of a demonstration and goes to supervised training only.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from cleanrl_zoo.llm.rewards import one_line

Row = dict[str, Any]


def read_prompts(name: str) -> list[Row]:
    """The rows of a JSON-lines file, or of a Hugging Face dataset: a folder, or a name with an optional :CONFIG; each
    dataset with an optional @SPLIT (train otherwise).

    Raises:
        ValueError: one line, for a name that cannot be read, an empty file, a row without a prompt (with its number).
        ImportError: for a dataset without the package `datasets`.
    """
    path = Path(name).expanduser()
    try:
        is_file = path.is_file()
    except (OSError, ValueError):  # too long for a file's name, a zero byte
        is_file = False
    rows = list(_read_lines(name, path) if is_file else _read_dataset(name))
    if not rows:
        raise ValueError(f"prompts {name}: is empty; give one JSON object with a column prompt per line")
    return rows


def split_prompts(rows: list[Row], share: float) -> tuple[list[Row], list[Row]]:
    """Rows to train on and rows held out: a fixed share of the different prompts, at least one.

    Rows with the same prompt stay on the same side. The split depends on nothing but the rows.

    Raises:
        ValueError: for a share outside (0, 1), or fewer than two different prompts.
    """
    if not 0.0 < share < 1.0:
        raise ValueError(f"held_out is {share}, must be above 0 and below 1, or a second file or dataset")
    keys = list(map(prompt_key, rows))
    different = list(dict.fromkeys(keys))
    if len(different) < 2:
        raise ValueError("there is one prompt only, and one has to be held out; give a second file (--held-out)")
    count = min(max(1, round(share * len(different))), len(different) - 1)
    chosen = torch.randperm(len(different), generator=torch.Generator().manual_seed(0))[:count].tolist()
    held_out = {different[index] for index in chosen}
    training = [row for row, key in zip(rows, keys, strict=True) if key not in held_out]
    return training, [row for row, key in zip(rows, keys, strict=True) if key in held_out]


def prompt_key(row: Row) -> str:
    """Text that is equal for equal prompts."""
    return json.dumps(row["prompt"], sort_keys=True, default=str)


def _read_lines(name: str, path: Path) -> Iterator[Row]:
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                place = f"prompts {name} line {number}"
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise ValueError(
                        f"{place}: is no JSON ({one_line(error)}); one object per line is needed"
                    ) from None
                except RecursionError:
                    raise ValueError(f"{place}: is nested too deeply") from None
                yield _checked(row, place)
    except UnicodeDecodeError:
        raise ValueError(f"prompts {name}: is no text in UTF-8; a file must be JSON lines") from None
    except OSError as error:
        raise ValueError(f"prompts {name}: cannot be read ({error.strerror})") from None


def _read_dataset(name: str) -> Iterator[Row]:
    path_name, _, split = name.partition("@")
    folder = Path(path_name).expanduser()
    if not folder.is_dir() and (path_name.startswith((".", "/", "~")) or folder.suffix in (".jsonl", ".json", ".txt")):
        raise ValueError(f"prompts {name}: there is no such file or folder")
    try:
        import datasets
    except ImportError:
        raise ImportError(
            f"prompts {name}: is no file, and a dataset needs a package that is not installed: "
            "pip install -c constraints.txt -e '.[llm]'"
        ) from None
    try:
        if (folder / "dataset_dict.json").is_file():
            data = datasets.load_from_disk(str(folder))[split or "train"]
        elif (folder / "state.json").is_file():
            data = datasets.load_from_disk(str(folder))
        elif folder.is_dir():
            data = datasets.load_dataset(str(folder), split=split or "train")
        else:
            hub_name, _, config = path_name.partition(":")
            data = datasets.load_dataset(hub_name, config or None, split=split or "train")
    except Exception as error:
        what = one_line(f"{type(error).__name__}: {error}", 240)
        raise ValueError(f"prompts {name}: is no file, and no dataset that can be read ({what})") from None
    if "prompt" not in data.column_names:
        raise ValueError(f"prompts {name}: has no column prompt, only {', '.join(data.column_names)}")
    yield from _checked_rows(data, name)


def _checked_rows(data: Iterable[Row], name: str) -> Iterator[Row]:
    for number, row in enumerate(data):
        yield _checked(dict(row), f"prompts {name} row {number}")


def _checked(row: Any, place: str) -> Row:
    """`row` if it has a proper prompt, otherwise ValueError."""
    form = 'text or a list of messages {"role": "user", "content": "…"}'
    if not isinstance(row, dict):
        raise ValueError(f"{place}: is {one_line(json.dumps(row), 40)}, must be an object with a column prompt")
    if row.get("prompt") is None:
        raise ValueError(f"{place}: has no prompt; it must be {form}")
    prompt = row["prompt"]
    messages = isinstance(prompt, list) and all(
        isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        for message in prompt
    )
    if not prompt or not (isinstance(prompt, str) or messages):
        raise ValueError(f"{place}: prompt is {one_line(repr(prompt), 40)}, must be {form}")
    return row
