"""Curves over steps and seconds, the clock of a run, and others' curves from CSV files."""

import json
from pathlib import Path

import numpy as np
import pytest
import records
import report_curves
import report_imported
import report_runs
from report_curves import Line, bands_of, grid_to, lines_of
from suites import SUITES, Entry
from test_benchmarks_report import write_seed

ENTRY = Entry("ppo_continuous", "Hopper-v4", (1,), 1000)


def line(steps, values, setting: str = "a", run: str = "seed 1", seconds=None, imported: str = "") -> Line:
    clock = None if seconds is None else np.asarray(seconds, float)
    return Line("E-v1", setting, run, "train", np.asarray(steps, float), np.asarray(values, float), clock, imported)


def test_the_clock_follows_the_phases_and_ends_at_the_wall_clock():
    # phases of 2, 1 and 5 seconds of 8, in a run of 16: what no phase covers doubles each of them
    rows = [
        {"global_step": 10, "time/collect": 1.5, "time/update": 0.5, "charts/SPS": 99.0},
        {"global_step": 20, "time/collect": 1.0},
        {"global_step": 30, "time/eval": 5.0},
    ]
    assert records.clock(rows, 16.0) == [(10, 4.0), (20, 6.0), (30, 16.0)]
    assert records.clock(rows, 16.0, max_points=2) == [(20, 6.0), (30, 16.0)]  # the points that `thin` makes
    assert [point["step"] for point in records.thin(rows, max_points=2)] == [20, 30]
    assert records.clock([{"global_step": 10, "charts/SPS": 1.0}], 16.0) == []


def test_a_published_run_has_its_clock(tmp_path, monkeypatch):
    monkeypatch.setitem(SUITES, "one", (ENTRY,))
    place = write_seed(tmp_path / "one", ENTRY, 1, 10.0)  # points at 100, 200, ..., 1000; 90 seconds in all
    (seconds,) = report_runs.read_group(tmp_path, "one", ENTRY).seconds
    np.testing.assert_allclose(seconds, np.arange(9, 91, 9))  # without a clock the mean rate
    times = [(100 * k, 90 * (k / 10) ** 2) for k in range(1, 11)]
    (place / "clock.csv").write_text("step,seconds\n" + "".join(f"{step},{s}\n" for step, s in times))
    group = report_runs.read_group(tmp_path, "one", ENTRY)
    np.testing.assert_allclose(group.seconds[0], [s for _, s in times])
    train, evaluation = lines_of([group])
    np.testing.assert_allclose(train.seconds, [s for _, s in times])
    # evaluations at 500 and 1000: 22.5 and 90 seconds
    assert evaluation.steps.tolist() == [500, 1000] and evaluation.seconds.tolist() == [22.5, 90]


def test_publishing_writes_the_clock_beside_the_curve(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    rows = [{"global_step": step, "charts/episodes": 0, "time/update": 1.0} for step in (10, 20)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "run.json").write_text(json.dumps({"algorithm": "a", "args": {}, "provenance": {}}))
    summary = {"train_last100": {}, "final_eval": {}, "eval_curve": [], "wall_clock_s": 3.0, "steps_per_second": 1.0}
    (run / "summary.json").write_text(json.dumps(summary))
    records.publish(run, tmp_path / "out")
    assert (tmp_path / "out" / "clock.csv").read_text() == "step,seconds\n10,1.500\n20,3.000\n"


def test_a_settings_curve_ends_with_its_shortest_run_and_the_grid_is_all_settings():
    lines = [
        line([100, 1000], [1, 1]),
        line([200, 600], [3, 3], run="seed 2"),
        line([0, 1000], [5, 5], setting="b"),
    ]
    a, b = bands_of(lines)
    assert (a.setting, a.runs, b.setting, b.runs, a.axis) == ("a", 2, "b", 1, "steps")
    assert a.x.min() == 200 and a.x.max() == 600  # where both runs have a value
    np.testing.assert_allclose(a.value, 2.0)
    assert (a.low == 1).all() and (a.high == 3).all()
    assert b.x.min() == 0 and b.x.max() == 1000 and set(a.x) <= set(b.x) == set(grid_to(1000))


def test_curves_over_seconds_need_seconds():
    lines = [
        line([10, 20], [1, 2], seconds=[5, 50]),
        line([10, 20, 30], [2, 3, 4], setting="b", seconds=[5, 5, 100]),  # two rows within one tick of the clock
        line([10, 20], [9, 9], setting="c", imported="c.csv"),
    ]
    bands = {(band.setting, band.axis): band for band in bands_of(lines)}
    assert set(bands) == {("a", "steps"), ("a", "seconds"), ("b", "steps"), ("b", "seconds"), ("c", "steps")}
    assert bands["a", "seconds"].x.max() == 50 and bands["b", "seconds"].value[-1] == pytest.approx(4, abs=0.1)


def test_the_grid_is_finer_at_the_beginning():
    grid = grid_to(1000)
    assert grid[0] == 0 and grid[1] == pytest.approx(1) and grid[report_curves.EARLY + 1] == pytest.approx(10)
    assert np.all(np.diff(grid) > 0) and grid[-1] == 1000 and np.diff(grid)[-1] == pytest.approx(10)


# Others' curves

LONG = """_step,global_step,charts/episodic_return,_runtime,env_id,exp_name,seed
0,100,1.0,0.5,E-v1,ppo,1
1,100,3.0,1.5,E-v1,ppo,1
2,200,,1.7,E-v1,ppo,1
3,200,8.0,2.0,E-v1,ppo,1
0,50,5.0,0.5,E-v1,ppo,2
"""


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_a_long_file(tmp_path):
    """global_step counts, not _step; rows of one step are averaged; a row without a return logged something else."""
    found = report_imported.read_imported(write(tmp_path / "ppo.csv", LONG), ["E-v1", "F-v1"])
    first, second = found.lines
    assert (first.env, first.setting, first.run, first.imported, first.metric) == (
        "E-v1",
        "ppo",
        "seed 1",
        "ppo.csv",
        "train",
    )
    assert first.steps.tolist() == [100, 200] and first.values.tolist() == [2.0, 8.0]
    assert first.seconds.tolist() == [1.0, 2.0]
    assert (second.run, second.values.tolist()) == ("seed 2", [5.0])
    assert (found.file, found.rows, found.column) == ("ppo.csv", 5, "charts/episodic_return") and len(
        found.digest
    ) == 12


def test_a_panel_of_weights_and_biases(tmp_path):
    """One column for each run, which is named as CleanRL names it; the band's ends are not runs."""
    names = [f"Hopper-v4__sac__{seed}__17 - charts/episodic_return" for seed in (1, 2)]
    header = ",".join(f'"{name}"' for name in ("Step", names[0], f"{names[0]}__MIN", f"{names[0]}__MAX", names[1]))
    path = write(tmp_path / "panel.csv", f"{header}\n10,1,0,9,\n20,2,0,9,4\n")
    found = report_imported.read_imported(path, ["Hopper-v4"])
    assert [(line.env, line.setting, line.run) for line in found.lines] == [
        ("Hopper-v4", "sac", "seed 1"),
        ("Hopper-v4", "sac", "seed 2"),
    ]
    assert [line.values.tolist() for line in found.lines] == [[1, 2], [4]] and found.lines[0].seconds is None


def test_a_file_that_says_little_is_named_by_hand(tmp_path):
    path = write(tmp_path / "mine.csv", "step,train_return\n1,2\n3,4\n")
    (one,) = report_imported.read_imported(path, ["E-v1"]).lines  # there is one environment only
    assert (one.env, one.setting, one.run) == ("E-v1", "mine", "one run")
    (one,) = report_imported.read_imported(f"F-v1={path}", ["E-v1", "F-v1"]).lines
    assert one.env == "F-v1"


def test_long_runs_are_thinned_by_averaging(tmp_path):
    rows = "".join(f"{step},{step % 2}\n" for step in range(1, 2002))
    (one,) = report_imported.read_imported(write(tmp_path / "x.csv", f"global_step,return\n{rows}"), ["E-v1"]).lines
    # 2001 points in stretches of ⌈2001/1000⌉ = 3: 667 points, the first over 1, 0, 1
    assert len(one.steps) == 667 and one.steps[[0, -1]].tolist() == [3, 2001] and one.values[0] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a,b\n1,2\n", "has no column of steps (global_step, step, Step, _step, timesteps): it has a, b"),
        ("step,loss\n1,2\n", "has no column of returns"),
        ("step,return\n", "has no rows below"),
        ("step,return\n1,x\n", "damaged (row 2 has 'x' for a number)"),
        ("step,return\n1,nan\n", "damaged (row 2 has 'nan' for a number)"),
        ("step,return\n1,2\n3\n", "damaged (row 3 has 1 cells, not 2)"),
        ("step,return\n1,\n", "has no return in its column return"),
        ("step,return\n1,2\n", "does not say of which environment it is (ENVIRONMENT=FILE does)"),
        ("step,return,env_id\n1,2,G-v1\n", "is of G-v1; the report has E-v1, F-v1"),
    ],
)
def test_files_that_cannot_be_imported_are_told(tmp_path, text, told):
    path = write(tmp_path / "x.csv", text)
    with pytest.raises(ValueError) as error:
        report_imported.read_imported(path, ["E-v1", "F-v1"])
    assert str(error.value).startswith(f"--imported {path}: ") and told in str(error.value)
    assert "\n" not in str(error.value)
