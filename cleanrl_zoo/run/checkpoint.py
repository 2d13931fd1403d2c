"""Checkpoints: one folder per boundary, tensors in safetensors, the rest in JSON, no pickle anywhere.

A checkpoint is written to a temporary folder, flushed to the disk and renamed, so that a kill at any moment leaves
either the old state or the new one. A third file holds the checksums of all the others: damage is told, never loaded.

Large arrays that only grow, as a replay buffer's, are handed over in segments. A segment is a file of its own beside
the checkpoints, named by its checksum; it is written once, later checkpoints refer to it, and it goes with the last
checkpoint that does.
"""

import dataclasses
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

TENSORS, STATE, CHECKSUMS = "tensors.safetensors", "state.json", "checksums.json"
SEGMENTS = "segments"  # the folder beside the checkpoints, and its table in CHECKSUMS


class DamagedCheckpoint(ValueError):
    """A checkpoint that is incomplete or was changed after it was written; the message is one line."""


@runtime_checkable
class Segment(Protocol):
    """A leaf of a state tree: arrays that never change again, read only where no earlier checkpoint has them.

    A segment is known by its path in the tree, so it stands in a dict, under a key that no other arrays ever get.
    """

    def arrays(self) -> dict[str, np.ndarray]: ...


@dataclasses.dataclass(frozen=True)
class StoredSegment:
    """A segment of a loaded checkpoint, read from its file when it is asked for."""

    name: str
    folder: Path = dataclasses.field(repr=False)

    def arrays(self) -> dict[str, np.ndarray]:
        return {key: tensor.numpy() for key, tensor in load_tensors((self.folder / self.name).read_bytes()).items()}


def capture(value: Any) -> Any:
    """The state of `value` as a tree of dicts and lists with tensors, arrays, numbers and strings as leaves.

    Dataclasses give their fields, modules and other objects their `state_dict()`, generators their state.

    Raises:
        TypeError: for an object that holds state in no way known here.
    """
    if value is None or isinstance(value, bool | int | float | str | torch.Tensor | np.ndarray | Segment):
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
        if odd := [key for key in value if not isinstance(key, str) or "/" in key]:
            raise TypeError(f"the key {odd[0]!r} cannot be stored in a checkpoint: keys are names without /")
        return {key: capture(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [capture(item) for item in value]
    raise TypeError(f"{type(value).__name__} cannot be stored in a checkpoint: give it state_dict and load_state_dict")


def restore(value: Any, saved: Any) -> Any:
    """Puts what `capture` gave back into `value`; objects are filled in place, plain values are returned.

    In place, because compiled code and optimizers hold references to the very tensors.

    Raises:
        ValueError: for a tensor of another shape, or another number of objects in a list.
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
        if value.shape != saved.shape:
            raise ValueError(f"a tensor of shape {list(saved.shape)} was stored where one of {list(value.shape)} is")
        with torch.no_grad():
            value.copy_(saved)
    elif isinstance(value, dict):
        return {key: restore(value.get(key), item) for key, item in saved.items()}
    elif isinstance(value, list | tuple) and _has_objects(value):
        if len(value) != len(saved):
            raise ValueError(f"a list of {len(saved)} objects was stored where one of {len(value)} is")
        return [restore(item, stored) for item, stored in zip(value, saved, strict=True)]
    else:
        return saved
    return value


def _has_objects(value: Any) -> bool:
    """Whether `value` is or holds something that what was saved cannot take the place of."""
    if isinstance(value, list | tuple | dict):
        return any(map(_has_objects, value.values() if isinstance(value, dict) else value))
    generator = isinstance(value, torch.Generator | np.random.Generator)
    return generator or hasattr(value, "load_state_dict") or dataclasses.is_dataclass(value)


def save_checkpoint(folder: Path, tree: Any, keep: int = 2) -> None:
    """Writes `tree` (see `capture`) to `folder` atomically and keeps only the last `keep` checkpoints beside it.

    Segments that the checkpoint before this one refers to, under the same path in its tree, are not written again.
    """
    tensors: dict[str, torch.Tensor] = {}
    segments: dict[str, Segment] = {}
    state = json.dumps(_detach(tree, "", tensors, segments)).encode()
    blob = save_tensors(tensors)
    digests: dict[str, Any] = {name: _digest(data) for name, data in ((TENSORS, blob), (STATE, state))}
    digests[SEGMENTS] = _write_segments(folder, segments)
    temporary = folder.with_name(f".writing-{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for name, data in ((TENSORS, blob), (STATE, state), (CHECKSUMS, json.dumps(digests).encode())):
        _write_flushed(temporary / name, data)
    replaced = folder.with_name(f".old-{folder.name}")
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():  # the same step, reached again
        folder.rename(replaced)
    temporary.rename(folder)
    _flush_folder(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    for old in list_checkpoints(folder.parent)[:-keep]:
        shutil.rmtree(old)
    _drop_segments(folder.parent)


def load_checkpoint(folder: Path) -> Any:
    """Reads the tree that `save_checkpoint` wrote; its segments are checked, and read when they are asked for.

    Raises:
        DamagedCheckpoint: when a file is missing, cut or edited.
    """
    try:
        digests = json.loads((folder / CHECKSUMS).read_bytes())
        data = {name: (folder / name).read_bytes() for name in (TENSORS, STATE)}
        for name, blob in data.items():
            if _digest(blob) != digests[name]:
                raise DamagedCheckpoint(f"checkpoint {folder}: {name} does not match its checksum (cut or edited)")
        segments = {}
        for path, name in digests.get(SEGMENTS, {}).items():
            segments[path] = StoredSegment(name, folder.parent / SEGMENTS)
            with open(segments[path].folder / name, "rb") as file:
                if f"{hashlib.file_digest(file, 'sha256').hexdigest()}.safetensors" != name:
                    raise DamagedCheckpoint(f"checkpoint {folder}: segment {name} does not match its checksum")
        return _attach(json.loads(data[STATE]), load_tensors(data[TENSORS]), segments)
    except DamagedCheckpoint:
        raise
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"checkpoint {folder}: {Path(error.filename).name} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise DamagedCheckpoint(f"checkpoint {folder}: cannot be read ({type(error).__name__})") from None


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, oldest first."""
    return sorted(folder.glob("step_*"))


def _write_segments(folder: Path, segments: dict[str, Segment]) -> dict[str, str]:
    """Writes those of `segments` that the checkpoint before `folder` does not have: the file name of each path."""
    if not segments:
        return {}
    place = folder.parent / SEGMENTS
    place.mkdir(parents=True, exist_ok=True)
    earlier = [path for path in list_checkpoints(folder.parent) if path.name < folder.name]
    known = (_segment_names(earlier[-1]) if earlier else None) or {}
    names = {}
    for path, segment in segments.items():
        if path in known and (place / known[path]).exists():
            names[path] = known[path]
            continue
        blob = save_tensors({key: torch.from_numpy(np.array(x, order="C")) for key, x in segment.arrays().items()})
        names[path] = f"{_digest(blob)}.safetensors"
        temporary = place / f".writing-{names[path]}"
        _write_flushed(temporary, blob)
        temporary.rename(place / names[path])
    _flush_folder(place)
    return names


def _drop_segments(folder: Path) -> None:
    """Removes the segments that no checkpoint in `folder` refers to; none, while one of these cannot be read."""
    place = folder / SEGMENTS
    if not place.exists():
        return
    used: set[str] = set()
    for checkpoint in list_checkpoints(folder):
        names = _segment_names(checkpoint)
        if names is None:
            return
        used.update(names.values())
    for path in place.iterdir():
        if path.name not in used:
            path.unlink()


def _segment_names(checkpoint: Path) -> dict[str, str] | None:
    """The segments that a checkpoint refers to, file name by path in its tree; None if it cannot be read."""
    try:
        return dict(json.loads((checkpoint / CHECKSUMS).read_bytes()).get(SEGMENTS, {}))
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _write_flushed(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


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


def _detach(value: Any, path: str, tensors: dict[str, torch.Tensor], segments: dict[str, Segment]) -> Any:
    """The JSON form of a tree: each tensor or array goes into `tensors`, each segment into `segments`, and leaves its
    key behind."""
    if isinstance(value, torch.Tensor):
        tensors[path] = value.detach().cpu().contiguous().clone()
        return {"__tensor__": path}
    if isinstance(value, np.ndarray):
        tensors[path] = torch.from_numpy(np.array(value, order="C"))
        return {"__numpy__": path}
    if isinstance(value, Segment):
        segments[path] = value
        return {"__segment__": path}
    if isinstance(value, dict):
        return {str(key): _detach(item, f"{path}/{key}", tensors, segments) for key, item in value.items()}
    if isinstance(value, list):
        return [_detach(item, f"{path}/{index}", tensors, segments) for index, item in enumerate(value)]
    return value


def _attach(value: Any, tensors: dict[str, torch.Tensor], segments: dict[str, StoredSegment]) -> Any:
    if isinstance(value, dict):
        if "__tensor__" in value:
            return tensors[value["__tensor__"]]
        if "__numpy__" in value:
            return tensors[value["__numpy__"]].numpy()
        if "__segment__" in value:
            return segments[value["__segment__"]]
        return {key: _attach(item, tensors, segments) for key, item in value.items()}
    if isinstance(value, list):
        return [_attach(item, tensors, segments) for item in value]
    return value
