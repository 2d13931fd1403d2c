"""speed_models.py: its medians, ratios and refusals, on times made up; and one process of each kind of ours."""

import json
import sys

import pytest
import speed_models
from speed_models import Time


def record(times):
    return {
        "repeats": 3, "threads": 1, "machine": {"cpu": "some", "system": "Linux"}, "commit": "0" * 40, "dirty": False,
        "versions": {"torch": "2"}, "times": [vars(item) for item in times], "medians": speed_models.medians(times),
    }  # fmt: skip


def test_medians_and_ratios_by_hand():
    """Ours 1, 5, 2 → 2 ms; theirs 9, 6, 3 → 6 ms: three times as fast. Seven members 9.1 s, one 1 s: 9.1/7 = 1.3."""
    times = [Time("tiny", "ours", i, s / 1000, 0.0) for i, s in enumerate((1, 5, 2))]
    times += [Time("tiny", "mbrl", i, s / 1000, 0.0) for i, s in enumerate((9, 6, 3))]
    times += [Time("members_7", "ours", 1, 9.1, 0.0), Time("members_1", "ours", 1, 1.0, 0.5)]
    text = speed_models.table(record(times))
    assert "| to try the script | 2.0 ms | 6.0 ms | **3.00** |" in text
    assert "| **1.30** |" in text and "at most 1.3" in text
    assert "1 of 8 measurements were disturbed" in text


def test_without_mbrl_ours_stands_alone():
    text = speed_models.table(record([Time("tiny", "ours", 1, 0.002, None)]))
    assert "| to try the script | 2.0 ms | – | – |" in text and "training" not in text.lower()


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--cases", "none"], "--cases none: known are swing_up"),
        (["--repeats", "0"], "must be at least 1"),
        (["--mbrl-python", sys.executable], "has no mbrl"),
    ],
)
def test_refused_in_one_line(tmp_path, capsys, flags, words):
    with pytest.raises(SystemExit) as stop:
        speed_models.main([*flags, "--results", str(tmp_path)])
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1 and words in err and list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_whole_measurement_of_ours(tmp_path, monkeypatch):
    monkeypatch.setattr(speed_models, "confine", lambda count: [0])
    assert speed_models.main(["--cases", "tiny", "--repeats", "1", "--force", "--results", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "speed/models.json").read_text())["medians"]
    assert 0 < found["tiny"]["ours"] < 1 and 0 < found["members_1"]["ours"] < found["members_7"]["ours"]
