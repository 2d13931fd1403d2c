"""The speed comparison: what is counted, which SB3 figure is taken, and when it refuses to measure."""

import json
import os
import sys

import pytest
import speed
from speed import Time


def test_medians_and_ratios_against_the_faster_of_sb3s_thread_counts():
    # ours cold 1000/{10, 20, 50} s → median 50 steps/s, warm 100; SB3 with default threads 20, with one thread 25
    times = [Time("default", "cold", i, 1000, seconds, 1.0, 0.0) for i, seconds in enumerate((10.0, 50.0, 20.0))]
    times += [Time("default", "warm", 1, 1000, 10.0, 1.0, 0.0)]
    times += [Time("sb3_1", "default", 1, 1000, 50.0, 1.0, 0.0), Time("sb3_1", "1", 1, 1000, 40.0, 1.0, 0.0)]
    row = speed.medians(times, ["default", "wide16"])
    assert list(row) == ["default"]
    assert row["default"] == {
        "cold": 50.0,
        "warm": 100.0,
        "sb3": 25.0,
        "sb3_envs": 1,
        "sb3_threads": "1",
        "ratio_cold": 2.0,
        "ratio_warm": 4.0,
    }


def test_time_of_a_process_counts_its_children_and_gives_its_output():
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'sum(range(10**7))']); print('done')"
    output, seconds, cpu, other = speed.timed([sys.executable, "-c", code], {})
    assert output == "done\n" and 0 < cpu and 0 < seconds < 60
    assert other is None or other >= 0
    with pytest.raises(ValueError, match="exit code 1: ZeroDivisionError"):
        speed.timed([sys.executable, "-c", "1/0"], {})


def test_measurements_alternate_with_a_fresh_cache_for_each_cold_run(tmp_path, monkeypatch):
    order, caches = [], []

    def ours(setting, env, steps, repeat, cache, kind):
        order.append(f"{setting} {kind}")
        caches.append((kind, cache, list(cache.iterdir())))
        (cache / "compiled").touch()
        return Time(setting, kind, repeat, steps, 1.0, 1.0, 0.0)

    def sb3(num_envs, env, steps, repeat, threads):
        order.append(f"sb3_{num_envs} {threads}{' trial' if repeat == 0 else ''}")
        seconds = 2.0 if (num_envs, threads) == (1, "1") else 4.0
        return Time(f"sb3_{num_envs}", threads, repeat, steps, seconds, 1.0, 0.5 if repeat == 2 else 0.0)

    monkeypatch.setattr(speed, "time_ours", ours)
    monkeypatch.setattr(speed, "time_sb3", sb3)
    record = speed.measure(["default", "equal8"], "Hopper-v4", 100, 2, tmp_path / "s.json", [0, 1])
    trials = ["sb3_1 default trial", "sb3_1 1 trial", "sb3_8 default trial", "sb3_8 1 trial"]
    once = ["default cold", "default warm", "sb3_1 default", "equal8 cold", "equal8 warm", "sb3_1 1", "sb3_8 default"]
    assert order == trials + once * 2  # SB3 with 8 environments was not faster with one thread
    assert all((kind == "cold") == (found == []) for kind, _, found in caches)
    assert json.loads((tmp_path / "s.json").read_text()) == json.loads(json.dumps(record))
    assert len(record["times"]) == 14 and record["cores"] == [0, 1]
    text = speed.table(record)
    assert "| default | defaults | 100 | 100 | 50 (1 env, 1 threads) | 2.00 | 2.00 |" in text
    assert "3 of 14 measurements were disturbed" in text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--settings", "fast"], "known are default"),
        (["--steps", "0"], "at least 1"),
        (["--cores", "100000"], "only"),
    ],
)
def test_bad_command_lines_are_one_line_and_exit_code_2(capsys, monkeypatch, words, told):
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(speed.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(SystemExit) as stop:
        speed.main(words)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and told in err and err.count("\n") == 1


def test_nothing_is_measured_while_something_else_runs_or_without_sb3(capsys, monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (1.5, 0.0, 0.0))
    monkeypatch.setattr(speed.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(SystemExit):
        speed.main([])
    assert "load average 1.50: something else runs here" in capsys.readouterr().err
    monkeypatch.setattr(speed.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        speed.main([])
    assert "pip install -c constraints.txt -e '.[peers]'" in capsys.readouterr().err
