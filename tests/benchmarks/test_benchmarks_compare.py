"""Settings against each other: the common scale, who belongs together, `--versus`, and the numbers as CSV."""

import csv
import io

import numpy as np
import pytest
import report
import report_compare
import report_csv
import report_runs
from suites import SUITES, Entry
from test_benchmarks_report import write_seed

ENVS = ("Hopper-v4", "Walker2d-v4")


def entries_of(*rows: tuple[str, str, int], seeds: tuple[int, ...] = (1, 2)) -> tuple[Entry, ...]:
    return tuple(Entry("ppo_continuous", env, seeds, steps, (), label) for label, env, steps in rows)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Settings a and b on two environments, two seeds each: the suite `two`."""
    entries = entries_of(*((label, env, 1000) for env in ENVS for label in ("a", "b")))
    monkeypatch.setitem(SUITES, "two", entries)
    scores = {("a", ENVS[0]): (10, 20), ("a", ENVS[1]): (300, 500), ("b", ENVS[0]): (15, 5), ("b", ENVS[1]): (100, 300)}
    for entry in entries:
        for seed, score in zip(entry.seeds, scores[entry.name, entry.env], strict=True):
            write_seed(tmp_path / "two", entry, seed, float(score))
    return tmp_path


def read(home, name: str = "two") -> list[report_runs.Group]:
    return report.read_groups(home, name)[0]


def test_scores_on_the_common_scale(home):
    """0 is the first training episodes' return, a tenth of the score in these runs; 1 the better setting's mean."""
    ((found,), uneven) = report_compare.comparisons(read(home))
    assert found.tasks == ((ENVS[0], 1000), (ENVS[1], 1000)) and uneven == []
    # Hopper: first points 1, 2, 1.5, 0.5, mean 1.25; a's mean is 15. Walker2d: 30, 50, 10, 30, mean 30; a's is 400
    assert found.references == {ENVS[0]: (1.25, 15.0), ENVS[1]: (30.0, 400.0)}
    np.testing.assert_allclose(found.scores["a"], [[8.75 / 13.75, 270 / 370], [18.75 / 13.75, 470 / 370]])
    np.testing.assert_allclose(found.scores["b"], [[1.0, 70 / 370], [3.75 / 13.75, 270 / 370]])
    # pairs: Hopper 10 > 5, 20 > 15, 20 > 5 of four; Walker2d 300 > 100, half of 300 = 300, 500 > both: 3.5 of four
    assert found.improvement("a", "b")[0] == pytest.approx((3 / 4 + 3.5 / 4) / 2)
    iqm, low, high = found.statistics("b")["IQM"]
    # four scores 0.189, 0.273, 0.730, 1: the middle two
    assert iqm == pytest.approx((3.75 / 13.75 + 270 / 370) / 2) and low <= iqm <= high


def test_references_from_a_file(home, tmp_path):
    path = tmp_path / "references.csv"
    path.write_text("env,low,high\nHopper-v4,0,20\nWalker2d-v4,100,300\n")
    ((found,), _) = report_compare.comparisons(read(home), report_compare.read_references(path))
    np.testing.assert_allclose(found.scores["a"], [[0.5, 1.0], [1.0, 2.0]])
    # optimality gap: what is above 1 counts as 1: (0.5 + 0 + 0 + 0)/4
    assert found.statistics("a")["optimality gap"][0] == pytest.approx(0.125)
    path.write_text("env,low,high\nHopper-v4,0,20\n")
    with pytest.raises(ValueError, match="--references has no row for Walker2d-v4; it has Hopper-v4"):
        report_compare.comparisons(read(home), report_compare.read_references(path))
    for text, told in (("env,low\nx,1\n", "needs the columns"), ("env,low,high\nx,1,1\n", "are equal for x")):
        path.write_text(text)
        with pytest.raises(ValueError, match=told):
            report_compare.read_references(path)


def test_only_settings_with_the_same_tasks_belong_together(tmp_path, monkeypatch):
    entries = (
        *entries_of(("a", ENVS[0], 1000), ("b", ENVS[0], 1000), ("a", ENVS[1], 1000), ("b", ENVS[1], 1000)),
        *entries_of(("a", "CartPole-v1", 1000)),  # alone there
        *entries_of(("long", ENVS[0], 2000)),  # after as many steps there is nobody
        *entries_of(("c", ENVS[0], 1000), ("d", ENVS[0], 1000)),  # on one of the two only
        *entries_of(("e", ENVS[0], 1000), ("e", ENVS[1], 1000)),  # which will lack a run
    )
    monkeypatch.setitem(SUITES, "many", entries)
    for entry in entries:
        for seed in entry.seeds if (entry.name, entry.env) != ("e", ENVS[1]) else (1,):
            write_seed(tmp_path / "many", entry, seed, 10.0 * seed)
    found, uneven = report_compare.comparisons(read(tmp_path, "many"))
    assert [(list(c.scores), [env for env, _ in c.tasks]) for c in found] == [
        (["a", "b"], [*ENVS]),
        (["c", "d"], [ENVS[0]]),
    ]
    assert uneven == ["e has 2 and 1 runs on Hopper-v4 and Walker2d-v4"]
    report.report("many", tmp_path, tmp_path / "none.md")
    text = (tmp_path / "many" / "README.md").read_text()
    assert text.count("## Settings on a common scale") == 2 and "Not among them, since runs are missing: e has" in text


def test_versus_prints_and_writes_where_it_is_told(home, capsys):
    command = ["--suite", "two", "--results", str(home), "--versus", "a", "b"]
    before = {path: path.stat().st_mtime_ns for path in home.rglob("*")}
    assert report.main(command) == 0
    text = capsys.readouterr().out
    title = "Mean return of the last 100 training episodes"
    row = f"| Hopper-v4 | 1,000 | {title} | 15 [10, 20] (2) | 10 [5, 15] (2) | 0.75 ["
    assert row in text and f"| all 2 |  | {title} |  |  | 0.81 [" in text
    assert "0123456789ab" in text and {path: path.stat().st_mtime_ns for path in home.rglob("*")} == before
    assert report.main([*command, "--out", str(home / "out")]) == 0
    assert {path.name for path in (home / "out").iterdir()} == {"README.md", "report.html", "report.csv", "curves.csv"}
    assert row in (home / "out" / "README.md").read_text()


def test_versus_reaches_into_other_suites_and_looks_at_steps(home, monkeypatch):
    monkeypatch.setitem(SUITES, "other", entries_of(("a", ENVS[0], 1000), ("short", ENVS[0], 500)))
    for entry in SUITES["other"]:
        for seed in entry.seeds:
            write_seed(home / "other", entry, seed, 100.0)
    text, written = report.versus("two", ("a", "other/a"), home)
    assert "| Hopper-v4 | 1,000 |" in text and "other/a: IQM" in text and "0.00 [0.00, 0.00]" in text and not written
    assert "Walker2d" not in text and "all 2" not in text
    told = r"no environment after as many steps is in both: Hopper-v4 \(1,000 steps\), .* and Hopper-v4 \(500 steps\)"
    with pytest.raises(ValueError, match=told):
        report.versus("two", ("a", "other/short"), home)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--versus", "a", "c"], "--versus c: the suite two has a, b"),
        (["--versus", "a", "a"], "--versus a a: give two settings"),
        (["--versus", "a", "nope/a"], "--versus nope/a: no suite nope: "),
        (["--out", "x"], "--out x: only with --versus"),
        (["--references", "nowhere.csv"], "--references nowhere.csv: cannot be read"),
        (["--imported", "nowhere.csv"], "--imported nowhere.csv: cannot be read"),
    ],
)
def test_mistakes_on_the_command_line(home, capsys, words, told):
    with pytest.raises(SystemExit) as stop:
        report.main(["--suite", "two", "--results", str(home), *words])
    err = capsys.readouterr().err
    assert stop.value.code == 2 and told in err and err.count("\n") == 1


def test_runs_of_other_versions_are_not_compared(home, monkeypatch):
    monkeypatch.setitem(SUITES, "other", entries_of(("c", ENVS[0], 1000)))
    for seed in (1, 2):
        versions = {"versions": {"gymnasium": "1.4.0", "mujoco": "3.3.0"}}
        write_seed(home / "other", SUITES["other"][0], seed, 1.0, env=versions)
    told = "mujoco is 4.0.0 in Hopper-v4, a seeds 1, 2 but 3.3.0 in Hopper-v4, other/c seeds 1, 2"
    with pytest.raises(ValueError, match=told):
        report.versus("two", ("a", "other/c"), home)


def test_every_number_has_its_provenance(home):
    groups = read(home)
    found, _ = report_compare.comparisons(groups)
    rows = list(csv.DictReader(io.StringIO(report_csv.numbers(groups, found))))
    assert all(row["commit"] == "0123456789ab" and "torch 2.13.0" in row["versions"] for row in rows)
    assert all("A CPU" in row["machine"] and "1,000 steps" in row["protocol"] and row["seeds"] == "1 2" for row in rows)
    assert {row["engine"] for row in rows} == {"mujoco"}

    def value(**wanted: str) -> list[float]:
        (row,) = (row for row in rows if wanted.items() <= row.items())
        return [float(row[name]) for name in ("value", "low", "high") if row[name]]

    hopper = {"environment": "Hopper-v4", "setting": "a", "of": "train"}
    assert value(**hopper, statistic="score", at="seed 2") == [20.0]
    assert value(**hopper, statistic="mean") == [15.0] and value(**hopper, statistic="std (ddof 0)") == [5.0]
    assert value(**hopper, statistic="IQM") == [15.0, 10.0, 20.0]
    both = {"environment": "Hopper-v4, Walker2d-v4", "setting": "a"}
    assert value(**both, statistic="probability of improvement", at="over b")[0] == pytest.approx(0.8125)
