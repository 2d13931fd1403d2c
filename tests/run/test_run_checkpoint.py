import dataclasses
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from cleanrl_zoo.nn import Adam
from cleanrl_zoo.run.checkpoint import (
    CHECKSUMS,
    SEGMENTS,
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
     np.array([2**63 + 1], dtype=np.uint64), np.asfortranarray(np.arange(6.0).reshape(2, 3))],
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


@pytest.mark.parametrize("key", [1, "a/b"])
def test_keys_that_would_be_lost_are_refused(key):
    with pytest.raises(TypeError, match="keys are names"):
        capture({key: torch.zeros(1)})


def test_lists_of_objects_are_filled_in_place(tmp_path):
    """The objects stay those that others hold; plain lists, of whatever length, are what was saved."""

    def made(seed):
        torch.manual_seed(seed)
        return {"nets": [torch.nn.Linear(2, 1)], "noise": [torch.Generator().manual_seed(seed)], "curve": [[seed, 0.5]]}

    first, second = made(1), made(2)
    first["curve"].append([7, 0.25])
    save_checkpoint(tmp_path / "step_1", capture(first))
    (net,), (noise,) = second["nets"], second["noise"]
    back = restore(second, load_checkpoint(tmp_path / "step_1"))
    assert back["nets"][0] is net and torch.equal(net.weight, first["nets"][0].weight)
    assert back["noise"][0] is noise and noise.get_state().equal(first["noise"][0].get_state())
    assert back["curve"] == [[1, 0.5], [7, 0.25]]
    with pytest.raises(ValueError, match="a list of 1 objects was stored where one of 2 is"):
        restore([torch.Generator(), torch.Generator()], capture(first["noise"]))


def test_a_tensor_of_another_shape_is_refused_and_not_broadcast():
    with pytest.raises(ValueError, match="shape \\[1\\] was stored where one of \\[3\\]"):
        restore(torch.zeros(3), torch.ones(1))


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


# Segments


class Rows:
    """A store that only grows, in chunks of two rows; `read` counts how often each chunk was asked for."""

    def __init__(self, count):
        self.rows, self.read = np.arange(float(count)), {}

    def state_dict(self):
        full = len(self.rows) // 2
        return {"segments": {str(c): Chunk(self, c) for c in range(full)}, "rest": self.rows[2 * full :]}

    def load_state_dict(self, state):
        chunks = [segment.arrays()["rows"] for segment in state["segments"].values()]
        self.rows = np.concatenate([*chunks, state["rest"]])


@dataclasses.dataclass
class Chunk:
    store: Rows
    number: int

    def arrays(self):
        self.store.read[self.number] = self.store.read.get(self.number, 0) + 1
        return {"rows": self.store.rows[2 * self.number : 2 * self.number + 2]}


def loaded_rows(folder):
    return restore(Rows(0), load_checkpoint(folder)["rows"]).rows.tolist()


def save_rows(folder, store):
    save_checkpoint(folder, {"rows": capture(store), "step": len(store.rows)})


def segments_of(folder):
    return sorted(path.name for path in (folder / SEGMENTS).iterdir())


def test_a_segment_is_read_and_written_once(tmp_path):
    store = Rows(5)
    save_rows(tmp_path / "step_1", store)
    files = {name: (tmp_path / SEGMENTS / name).stat().st_mtime_ns for name in segments_of(tmp_path)}
    store.rows = np.arange(9.0)
    save_rows(tmp_path / "step_2", store)
    assert store.read == {0: 1, 1: 1, 2: 1, 3: 1}
    assert len(files) == 2 and len(segments_of(tmp_path)) == 4
    assert all((tmp_path / SEGMENTS / name).stat().st_mtime_ns == time for name, time in files.items())
    assert loaded_rows(tmp_path / "step_1") == [*range(5)] and loaded_rows(tmp_path / "step_2") == [*range(9)]
    fresh = restore(Rows(0), load_checkpoint(tmp_path / "step_2")["rows"])
    save_rows(tmp_path / "step_3", fresh)  # a resumed run refers to the same files
    assert fresh.read == {}


def test_segments_go_with_the_last_checkpoint_that_refers_to_them(tmp_path):
    for step in (1, 2, 3):
        store = Rows(2 * step)
        store.rows += 100 * step  # nothing in common, under other paths
        save_checkpoint(tmp_path / f"step_{step}", {f"rows{step}": capture(store)})
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step_2", "step_3"]
    assert len(segments_of(tmp_path)) == 2 + 3
    save_checkpoint(tmp_path / "step_4", {})
    save_checkpoint(tmp_path / "step_5", {})
    assert segments_of(tmp_path) == []


def test_segments_stay_while_a_checkpoint_cannot_be_read(tmp_path):
    """Perhaps its table can be mended by hand; nothing that it may need is thrown away."""
    save_rows(tmp_path / "step_1", Rows(4))
    (tmp_path / "step_1" / CHECKSUMS).write_text("{")
    save_checkpoint(tmp_path / "step_2", {})
    assert len(segments_of(tmp_path)) == 2
    save_checkpoint(tmp_path / "step_3", {})
    assert segments_of(tmp_path) == []


def test_a_lost_segment_is_written_again(tmp_path):
    store = Rows(4)
    save_rows(tmp_path / "step_1", store)
    (tmp_path / SEGMENTS / segments_of(tmp_path)[0]).unlink()
    save_rows(tmp_path / "step_2", store)
    assert sorted(store.read.values()) == [1, 2] and loaded_rows(tmp_path / "step_2") == [0, 1, 2, 3]


def test_a_run_that_went_another_way_gets_segments_of_its_own(tmp_path):
    """Resumed from step 1 when step 2 existed: what step 2 had under the same path is not taken for the new one's."""
    save_rows(tmp_path / "step_1", Rows(2))
    save_rows(tmp_path / "step_2", Rows(4))
    other = Rows(4)
    other.rows[2:] = 77.0
    save_rows(tmp_path / "step_2", other)
    assert loaded_rows(tmp_path / "step_2") == [0, 1, 77, 77]


@pytest.mark.parametrize("damage", ["cut", "edit", "remove", "empty"])
def test_a_damaged_segment_is_told_in_one_line(tmp_path, damage):
    store = Rows(2)
    save_rows(tmp_path / "step_1", store)
    store.rows = np.arange(4.0)
    save_rows(tmp_path / "step_2", store)
    names = [json.loads((tmp_path / f"step_{i}" / CHECKSUMS).read_text())[SEGMENTS] for i in (1, 2)]
    (new,) = set(names[1].values()) - set(names[0].values())
    path = tmp_path / SEGMENTS / new
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes({"cut": content[:-8], "edit": content, "empty": b""}[damage])
    with pytest.raises(DamagedCheckpoint) as error:
        load_checkpoint(tmp_path / "step_2")
    assert "\n" not in str(error.value) and new in str(error.value) and "step_2" in str(error.value)
    assert loaded_rows(tmp_path / "step_1") == [0, 1]  # the one before is whole


def test_a_kill_at_any_moment_leaves_a_checkpoint_that_loads(tmp_path, monkeypatch):
    """Every call that changes the disk is once the one at which the process dies."""
    calls = ["fsync", "rename", "unlink", "rmtree"]
    finished = 0
    for moment in range(60):
        folder, store = tmp_path / str(moment), Rows(3)
        for step in (1, 2):
            save_rows(folder / f"step_{step}", store)
            store.rows = np.arange(len(store.rows) + 2.0)
        left = moment

        def dying(function):
            def call(*args, **kwargs):
                nonlocal left
                left -= 1
                if left < 0:
                    raise KeyboardInterrupt
                return function(*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            for module, name in zip((os, Path, Path, shutil), calls, strict=True):
                patch.setattr(module, name, dying(getattr(module, name)))
            try:
                save_rows(folder / "step_3", store)
                finished += 1
            except KeyboardInterrupt:
                pass
        last = list_checkpoints(folder)[-1]
        assert loaded_rows(last) == [*range(7 if last.name == "step_3" else 5)]
        save_rows(folder / "step_3", store)
        save_rows(folder / "step_4", store)
        assert loaded_rows(folder / "step_4") == loaded_rows(folder / "step_3") == [*range(7)]
        assert sorted(os.listdir(folder)) == [SEGMENTS, "step_3", "step_4"] and len(segments_of(folder)) == 3
        if finished == 2:
            break
    assert finished == 2 and moment > 10


def test_a_checkpoint_without_a_table_of_segments_loads(tmp_path):
    """As they were written before there were segments."""
    save_checkpoint(tmp_path / "step_1", {"x": 1})
    digests = json.loads((tmp_path / "step_1" / CHECKSUMS).read_text())
    del digests[SEGMENTS]
    (tmp_path / "step_1" / CHECKSUMS).write_text(json.dumps(digests))
    assert load_checkpoint(tmp_path / "step_1") == {"x": 1}
    save_rows(tmp_path / "step_2", Rows(4))
    assert len(segments_of(tmp_path)) == 2
