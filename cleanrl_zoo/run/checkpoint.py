"""Checkpoints: one folder per boundary, tensors in safetensors, the rest in JSON, no pickle anywhere.

A checkpoint is written to a temporary folder, flushed to the disk and renamed, so that a kill at any moment leaves
either the old state or the new one. A third file holds the checksums of the other two: damage is told, never loaded.
"""

import dataclasses
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

TENSORS, STATE, CHECKSUMS = "tensors.safetensors", "state.json", "checksums.json"


class DamagedCheckpoint(ValueError):
    """A checkpoint that is incomplete or was changed after it was written; the message is one line."""


def capture(value: Any) -> Any:
    """The state of `value` as a tree of dicts and lists with tensors, arrays, numbers and strings as leaves.

    Dataclasses give their fields, modules and other objects their `state_dict()`, generators their state.

    Raises:
        TypeError: for an object that holds state in no way known here.
    """
    if value is None or isinstance(value, bool | int | float | str | torch.Tensor | np.ndarray):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return capture(value.bit_generator.state)
    if hasattr(value, "state_dict"):
        return capture(dict(value.state_dict()))
    if dataclasses.is_dataclass(value):
        return {field.name: capture(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: capture(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [capture(item) for item in value]
    raise TypeError(f"{type(value).__name__} cannot be stored in a checkpoint: give it state_dict and load_state_dict")


def restore(value: Any, saved: Any) -> Any:
    """Puts what `capture` gave back into `value`; objects are filled in place, plain values are returned.

    In place, because compiled code and optimizers hold references to the very tensors.
    """
    if isinstance(value, torch.Generator):
        value.set_state(saved)
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = saved
    elif hasattr(value, "load_state_dict"):
        value.load_state_dict(saved)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            setattr(value, field.name, restore(getattr(value, field.name), saved[field.name]))
    elif isinstance(value, torch.Tensor):
        with torch.no_grad():
            value.copy_(saved)
    elif isinstance(value, dict):
        return {key: restore(value.get(key), item) for key, item in saved.items()}
    else:
        return saved
    return value


def save_checkpoint(folder: Path, tree: Any, keep: int = 2) -> None:
    """Writes `tree` (see `capture`) to `folder` atomically and keeps only the last `keep` checkpoints beside it."""
    tensors: dict[str, torch.Tensor] = {}
    state = json.dumps(_detach(tree, "", tensors)).encode()
    blob = save_tensors(tensors)
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in ((TENSORS, blob), (STATE, state))}
    temporary = folder.with_name(f".writing-{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for name, data in ((TENSORS, blob), (STATE, state), (CHECKSUMS, json.dumps(digests).encode())):
        with open(temporary / name, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    replaced = folder.with_name(f".old-{folder.name}")
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():  # the same step, reached again
        folder.rename(replaced)
    temporary.rename(folder)
    _flush_folder(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    for old in list_checkpoints(folder.parent)[:-keep]:
        shutil.rmtree(old)


def load_checkpoint(folder: Path) -> Any:
    """Reads the tree that `save_checkpoint` wrote.

    Raises:
        DamagedCheckpoint: when a file is missing, cut or edited.
    """
    try:
        digests = json.loads((folder / CHECKSUMS).read_bytes())
        data = {name: (folder / name).read_bytes() for name in (TENSORS, STATE)}
        for name, blob in data.items():
            if hashlib.sha256(blob).hexdigest() != digests[name]:
                raise DamagedCheckpoint(f"checkpoint {folder}: {name} does not match its checksum (cut or edited)")
        tensors = load_tensors(data[TENSORS])
        return _attach(json.loads(data[STATE]), tensors)
    except DamagedCheckpoint:
        raise
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"checkpoint {folder}: {Path(error.filename).name} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise DamagedCheckpoint(f"checkpoint {folder}: cannot be read ({type(error).__name__})") from None


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, oldest first."""
    return sorted(folder.glob("step_*"))


def _flush_folder(folder: Path) -> None:
    """Makes a rename in `folder` survive a power cut, where the system can."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_json(path: Path, content: Any) -> None:
    """Writes indented JSON to a temporary name and renames it."""
    temporary = path.with_name(f".writing-{path.name}")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.rename(path)


def _detach(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """The JSON form of a tree: each tensor or array goes into `tensors` and leaves its key behind."""
    if isinstance(value, torch.Tensor):
        tensors[path] = value.detach().cpu().contiguous().clone()
        return {"__tensor__": path}
    if isinstance(value, np.ndarray):
        tensors[path] = torch.from_numpy(np.array(value))
        return {"__numpy__": path}
    if isinstance(value, dict):
        return {str(key): _detach(item, f"{path}/{key}", tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [_detach(item, f"{path}/{index}", tensors) for index, item in enumerate(value)]
    return value


def _attach(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, dict):
        if "__tensor__" in value:
            return tensors[value["__tensor__"]]
        if "__numpy__" in value:
            return tensors[value["__numpy__"]].numpy()
        return {key: _attach(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [_attach(item, tensors) for item in value]
    return value
