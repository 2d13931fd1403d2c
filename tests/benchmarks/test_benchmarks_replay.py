"""benchmarks/replay_speed.py at a small size: what it times is done, and what it says follows from what it found."""

import json

import pytest
import replay_speed
import report


@pytest.fixture
def small(monkeypatch):
    for name, value in (("SIZE", 3000), ("BATCH", 16), ("ROUNDS", 2), ("FRAMES", 64)):
        monkeypatch.setattr(replay_speed, name, value)


def test_the_record_and_its_table(small, tmp_path, capsys):
    assert replay_speed.main(["--results", str(tmp_path), "--force"]) == 0
    record = json.loads((tmp_path / "speed/replay.json").read_text())
    assert [name for name, *_ in record["times"]["frames"]] == ["uniform", "proportional"]
    assert all(0 < fastest <= middle for kind in ("small", "frames") for _, middle, fastest in record["times"][kind])
    assert all(seconds > 0 for seconds in record["checkpoints"].values()) and len(record["checkpoints"]) == 4
    text = capsys.readouterr().out
    assert (tmp_path / "speed/replay.md").read_text() == text
    assert "[replay](speed/replay.md)" in report.speed_block(tmp_path / "speed", tmp_path / "README.md")


def test_the_ratios_by_hand():
    rows = [(replay_speed.PROPORTIONAL, 200.0, 190.0), (replay_speed.PYTHON, 2600.0, 2500.0)]
    frames = [("uniform", 100.0, 90.0), ("proportional", 125.0, 99.0)]
    record = {"times": {"small": rows, "frames": frames}, "checkpoints": {"one": 0.5}, "commit": "a" * 40,
              "dirty": True, "machine": {"cpu": "X", "system": "Y"}, "versions": {"torch": "1"}}  # fmt: skip
    text = replay_speed.table(record)
    assert "**200 µs**" in text and "**13.0**" in text and "**1.25**" in text and "aaaaaaaaaaaa (modified)" in text


def test_a_busy_machine_is_refused_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr("os.getloadavg", lambda: (7.0, 0.0, 0.0))
    with pytest.raises(SystemExit) as stop:
        replay_speed.main([])
    assert stop.value.code == 2 and capsys.readouterr().err.count("\n") == 1
