import dataclasses
import json
import os

import numpy as np
import pytest
import torch

from cleanrl_zoo.nn import Adam
from cleanrl_zoo.run.checkpoint import (
    CHECKSUMS,
    STATE,
    TENSORS,
    DamagedCheckpoint,
    capture,
    list_checkpoints,
    load_checkpoint,
    restore,
    save_checkpoint,
)


@dataclasses.dataclass
class State:
    net: torch.nn.Linear
    optimizer: Adam
    obs: np.ndarray
    torch_generator: torch.Generator
    numpy_generator: np.random.Generator
    scale: torch.Tensor
    step: int = 0
    best: float = -np.inf
    note: str | None = None


def make_state(seed: int) -> State:
    torch.manual_seed(seed)
    net = torch.nn.Linear(3, 2)
    return State(
        net,
        Adam(net.parameters()),
        np.random.default_rng(seed).normal(size=(2, 3)),
        torch.Generator().manual_seed(seed),
        np.random.default_rng(seed),
        torch.full((1,), float(seed), dtype=torch.float64),
    )


def test_a_whole_state_goes_through_the_disk(tmp_path):
    first = make_state(1)
    first.optimizer.step([torch.ones(2, 3), torch.ones(2)], torch.tensor(0.1))
    torch.rand(5, generator=first.torch_generator)
    first.numpy_generator.normal(size=5)
    first.step, first.best, first.note = 7, 0.1 + 0.2, "ω"
    save_checkpoint(tmp_path / "step_1", capture(first))

    second = make_state(2)
    weight, moment = second.net.weight, second.optimizer.exp_avg[0]
    second = restore(second, load_checkpoint(tmp_path / "step_1"))
    assert second.net.weight is weight and second.optimizer.exp_avg[0] is moment  # filled in place
    assert torch.equal(first.net.weight, weight) and torch.equal(first.optimizer.exp_avg[0], moment)
    assert torch.equal(first.optimizer.steps, second.optimizer.steps)
    assert np.array_equal(first.obs, second.obs) and torch.equal(first.scale, second.scale)
    assert (second.step, second.best, second.note) == (7, 0.1 + 0.2, "ω")
    assert torch.equal(torch.rand(9, generator=first.torch_generator), torch.rand(9, generator=second.torch_generator))
    assert np.array_equal(first.numpy_generator.normal(size=9), second.numpy_generator.normal(size=9))


@pytest.mark.parametrize(
    "array",
    [np.zeros((0, 2)), np.array(3.5), np.arange(6, dtype=np.uint8).reshape(2, 3)[:, ::2], np.array([True, False]),
     np.array([2**63 + 1], dtype=np.uint64)],
)  # fmt: skip
def test_arrays_keep_type_shape_and_content(tmp_path, array):
    save_checkpoint(tmp_path / "step_1", {"x": capture(array)})
    loaded = load_checkpoint(tmp_path / "step_1")["x"]
    assert loaded.dtype == array.dtype and loaded.shape == array.shape and np.array_equal(loaded, array)


def test_the_saved_tree_is_a_copy(tmp_path):
    tensor = torch.zeros(3)
    save_checkpoint(tmp_path / "step_1", {"a": tensor, "b": tensor})  # shared memory is stored twice
    tensor.fill_(1)
    assert load_checkpoint(tmp_path / "step_1")["b"].sum() == 0


def test_two_are_kept_and_nothing_else_is_left(tmp_path):
    for step in (1, 2, 3, 3):
        save_checkpoint(tmp_path / f"step_{step}", {"step": step})
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step_2", "step_3"]
    assert sorted(os.listdir(tmp_path)) == ["step_2", "step_3"]
    assert sorted(os.listdir(tmp_path / "step_3")) == sorted([CHECKSUMS, STATE, TENSORS])


@pytest.mark.parametrize("name", [TENSORS, STATE, CHECKSUMS])
@pytest.mark.parametrize("damage", ["cut", "edit", "remove", "empty"])
def test_damage_is_told_in_one_line(tmp_path, name, damage):
    folder = tmp_path / "step_1"
    save_checkpoint(folder, {"x": torch.arange(100.0), "step": 1})
    content = bytearray((folder / name).read_bytes())
    if damage == "remove":
        (folder / name).unlink()
    elif damage == "edit":
        content[len(content) // 2] ^= 1
        (folder / name).write_bytes(content)
    else:
        (folder / name).write_bytes(content[: len(content) // 2] if damage == "cut" else b"")
    with pytest.raises(DamagedCheckpoint) as error:
        load_checkpoint(folder)
    assert "\n" not in str(error.value) and str(folder) in str(error.value)


def test_a_kill_while_writing_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    save_checkpoint(tmp_path / "step_1", {"step": 1})

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path / "step_2", {"step": 2})
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step_1"]
    monkeypatch.undo()
    save_checkpoint(tmp_path / "step_2", {"step": 2})  # the half-written folder is no obstacle
    assert load_checkpoint(tmp_path / "step_2") == {"step": 2}


def test_unknown_objects_are_refused():
    with pytest.raises(TypeError, match="object cannot be stored"):
        capture({"x": object()})


def test_no_code_can_hide_in_a_checkpoint(tmp_path):
    """Only JSON and safetensors are read: a pickle in place of either is damage."""
    folder = tmp_path / "step_1"
    save_checkpoint(folder, {"x": torch.zeros(1)})
    import hashlib

    evil = b"cposix\nsystem\n(S'touch /tmp/evil'\ntR."
    (folder / TENSORS).write_bytes(evil)
    digests = json.loads((folder / CHECKSUMS).read_text())
    digests[TENSORS] = hashlib.sha256(evil).hexdigest()
    (folder / CHECKSUMS).write_text(json.dumps(digests))
    with pytest.raises(DamagedCheckpoint):
        load_checkpoint(folder)
