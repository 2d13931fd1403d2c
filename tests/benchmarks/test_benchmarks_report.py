"""The report: three returns, like with like against what is published, refusals, figures and the README's block."""

import json
from pathlib import Path

import numpy as np
import pytest
import records
import report
from suites import PUBLISHED_NAMES, SUITES, Entry

ENTRY = Entry("ppo_continuous", "Hopper-v4", (1, 2, 3, 4, 5), 1_000_000)


START, END = "<!-- results:start -->", "<!-- results:end -->"


def write_seed(
    folder: Path, entry: Entry, seed: int, score: float, args: dict | None = None, env: dict | None = None
) -> Path:
    """One published run: training return rises to `score`, evaluations are score + 10 and then score."""
    place = folder / entry.name / entry.env / f"seed_{seed}"
    place.mkdir(parents=True)
    half = entry.steps // 2
    points = [
        {"step": entry.steps * k // 10, "train_return": score * k / 10, "episodes": 5, "entropy": 1.0}
        for k in range(1, 11)
    ]
    (place / "curve.csv").write_text(records.write_curve(points))
    versions = {"gymnasium": "1.4.0", "mujoco": "4.0.0"}
    run = {
        "algorithm": entry.algorithm,
        "args": {"env": entry.env, "seed": seed, "total_timesteps": entry.steps, "gamma": 0.99, **(args or {})},
        "provenance": {
            "commit": "0123456789abcdef",
            "dirty": False,
            "versions": {"torch": "2.13.0"},
            "machine": {"cpu": "A CPU", "cores": 2, "system": "Linux x86_64"},
            "env": {"id": entry.env, "engine": "mujoco", "versions": versions, **(env or {})},
        },
        "timing": {"wall_clock_s": 90.0, "steps_per_second": 11_111.0},
    }
    summary = {
        "train_last100": {"mean": score, "returns": [score]},
        "final_eval": {"mean": score, "returns": [score]},
        "eval_curve": [[half, score + 10.0], [entry.steps, score]],
    }
    (place / "run.json").write_text(json.dumps(run))
    (place / "summary.json").write_text(json.dumps(summary))
    return place


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """A results folder and a README with markers; the suite is one entry of five seeds."""
    monkeypatch.setitem(SUITES, "first_light", (ENTRY,))
    for seed, score in zip(ENTRY.seeds, (2000.0, 2100.0, 2400.0, 2500.0, 3000.0), strict=True):
        write_seed(tmp_path / "results" / "first_light", ENTRY, seed, score)
    (tmp_path / "README.md").write_text(f"# Title\n\nbefore\n\n{START}\nold text\n{END}\n\nafter\n")
    return tmp_path


def make(home: Path, *words: str) -> int:
    options = ["--suite", "first_light", "--results", str(home / "results"), "--readme", str(home / "README.md")]
    return report.main([*options, *words])


def refused(home: Path, capsys) -> str:
    with pytest.raises(SystemExit) as stop:
        make(home)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1
    return err


def published(env: str, version: str, steps: int, metric: str, which: str = "PPO") -> dict[str, str]:
    return {"algorithm": which, "env": env, "env_version": version, "step_budget": str(steps), "metric": metric}


def test_published_numbers_match_only_like_with_like():
    # CleanRL's three v4 rows at 1M steps, as listed in published.csv: value, std over 3 seeds
    for env, value, std in (
        ("Hopper", 2382.86, 271.74),
        ("Walker2d", 2287.95, 571.78),
        ("HalfCheetah", 1442.64, 46.03),
    ):
        (row,) = report.published_rows(Entry("ppo_continuous", f"{env}-v4", (1,), 1_000_000), "train")
        assert (float(row["value"]), report.spread(row), row["source_project"]) == (value, (std, 3), "CleanRL")
    for other in (
        Entry("ppo_continuous", "Hopper-v5", (1,), 1_000_000),  # another version
        Entry("ppo_continuous", "Hopper-v4", (1,), 500_000),  # other steps
        Entry("unpublished", "Hopper-v4", (1,), 1_000_000),  # another algorithm
    ):
        assert report.published_rows(other, "train") == []
    # Tianshou's PPO on Hopper-v3 at 1M is a maximum over training: it never stands beside our other two returns
    v3 = Entry("ppo_continuous", "Hopper-v3", (1,), 1_000_000)
    assert [row["source_project"] for row in report.published_rows(v3, "max")] == ["Tianshou"]
    assert all(row["source_project"] != "Tianshou" for row in report.published_rows(v3, "train"))
    assert report.published_rows(v3, "final") == []


def test_a_spread_over_episodes_is_not_a_spread_over_seeds():
    row = {"spread": "10.0", "seeds": "1", "spread_kind": "std over evaluation episodes"}
    assert report.spread(row) is None
    assert report.spread({**row, "spread_kind": "std over seeds", "seeds": ""}) is None
    assert report.spread({**row, "spread_kind": "std over seeds at that step", "seeds": "10"}) == (10.0, 10)


@pytest.mark.parametrize(
    ("mean", "std", "bound"),
    # mean − 2·std·√(3/2)·√(1/3 + 1/5): Hopper 2382.86 − 2·271.74·1.22474·0.730297 = 1896.76, and so on
    [(2382.86, 271.74, 1896.76), (2287.95, 571.78, 1265.12), (1442.64, 46.03, 1360.30)],
)
def test_bound_is_two_standard_errors_of_the_difference_below(mean, std, bound):
    assert report.lower_bound(mean, std, 3, 5) == pytest.approx(bound, abs=0.01)


def test_probability_above_a_normal_draw():
    # one run at the mean, one a standard deviation above: (Φ(0) + Φ(1)) / 2 = (0.5 + 0.8413447) / 2
    assert report.probability_above(np.array([10.0, 12.0]), 10.0, 2.0) == pytest.approx(0.67067237, abs=1e-8)


def test_the_three_returns(home):
    group = report.read_group(home / "results" / "first_light", ENTRY)
    np.testing.assert_array_equal(group.scores("train"), [2000.0, 2100.0, 2400.0, 2500.0, 3000.0])
    np.testing.assert_array_equal(group.scores("final"), [2000.0, 2100.0, 2400.0, 2500.0, 3000.0])
    # the mean over seeds is highest at the first evaluation, 10 above the last
    np.testing.assert_array_equal(group.scores("max"), [2010.0, 2110.0, 2410.0, 2510.0, 3010.0])


def test_maximum_is_taken_of_the_mean_over_seeds_not_of_each_seed():
    curves = [[[1, 9.0], [2, 0.0], [3, 5.0]], [[1, 0.0], [2, 8.0], [3, 5.0]]]  # means 4.5, 4, 5: the third point
    group = report.Group(ENTRY, [1, 2], summaries=[{"eval_curve": curve} for curve in curves])
    np.testing.assert_array_equal(group.scores("max"), [5.0, 5.0])


def test_report_and_front_page(home, capsys):
    assert make(home) == 0
    text = (home / "results" / "first_light" / "README.md").read_text()
    # mean 2400, std² = (400² + 300² + 0 + 100² + 600²)/5 = 124000 → 352
    # IQM drops one of 5 at either end: 7000/3 = 2333
    assert "| Hopper-v4 | ppo_continuous | 5 | 2400 ± 352 | 2333 [" in text
    assert "| 2383 ± 272 (3) | CleanRL | 1897 | " in text
    assert "0123456789ab" in text and "A CPU, 2 cores" in text and "torch 2.13.0" in text and "| 1.5 |" in text
    assert "docs/benchmark/ppo_continuous_action.md" in text and "Incomplete" not in text
    page = (home / "README.md").read_text()
    assert page.startswith(f"# Title\n\nbefore\n\n{START}\n") and page.endswith(f"{END}\n\nafter\n")
    assert "old text" not in page and "2400 ± 352" in page and "results/first_light/Hopper-v4.png" in page
    image = home / "results" / "first_light" / "Hopper-v4.png"
    assert 5_000 < image.stat().st_size < 200_000
    before = image.read_bytes(), page
    assert make(home) == 0
    assert (image.read_bytes(), (home / "README.md").read_text()) == before


def test_curves_are_means_over_episodes_in_bins_of_steps():
    curve = [
        {"step": 1.0, "train_return": 10.0, "episodes": 3.0},
        {"step": 4.0, "train_return": 20.0, "episodes": 1.0},
        {"step": 14.0, "episodes": 0.0},
        {"step": 25.0, "train_return": 40.0, "episodes": 2.0},
    ]
    # bins [0, 10), [10, 20), [20, 30]: (3·10 + 20)/4 = 12.5; nothing, so halfway; 40
    np.testing.assert_allclose(report.binned(curve, np.array([0.0, 10.0, 20.0, 30.0])), [12.5, 26.25, 40.0])


def test_missing_seeds_are_said(home):
    for path in (home / "results" / "first_light" / "ppo_continuous" / "Hopper-v4" / "seed_5").iterdir():
        path.unlink()
    assert make(home) == 0
    text = (home / "results" / "first_light" / "README.md").read_text()
    assert "**Incomplete: 1 of the suite's runs are not published yet.**" in text and "| 4 of 5 |" in text


def replace_seed(home: Path, **changes) -> None:
    place = home / "results" / "first_light" / "ppo_continuous" / "Hopper-v4" / "seed_3"
    for path in place.iterdir():
        path.unlink()
    place.rmdir()
    write_seed(home / "results" / "first_light", ENTRY, 3, 1.0, **changes)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"env": {"versions": {"gymnasium": "1.4.0", "mujoco": "3.3.0"}}}, "mujoco"),
        ({"env": {"engine": "gymnasium"}}, "engine is mujoco"),
        ({"args": {"gamma": 0.9}}, "gamma is 0.99 in Hopper-v4, ppo_continuous seed 1 but 0.9 in"),
        ({"args": {"extra": 1}}, "extra is None"),
        ({"args": {"env": "Hopper-v5"}}, "env Hopper-v5, the suite asks for Hopper-v4"),
    ],
)
def test_runs_that_must_not_be_mixed_are_refused_by_name(home, capsys, changes, told):
    replace_seed(home, **changes)
    err = refused(home, capsys)
    assert told in err and "seed" in err
    assert "old text" in (home / "README.md").read_text()


def test_other_evaluation_points_are_refused(home, capsys):
    path = home / "results" / "first_light" / "ppo_continuous" / "Hopper-v4" / "seed_2" / "summary.json"
    summary = json.loads(path.read_text())
    path.write_text(json.dumps({**summary, "eval_curve": summary["eval_curve"][1:]}))
    assert "evaluations at steps" in refused(home, capsys)


def test_a_seed_that_the_suite_does_not_name_is_refused(home, capsys):
    write_seed(home / "results" / "first_light", ENTRY, 6, 9999.0)
    assert "seed_6 is not among the suite's seeds" in refused(home, capsys)


@pytest.mark.parametrize("name", ["summary.json", "run.json", "curve.csv"])
def test_damaged_files_are_named(home, capsys, name):
    path = home / "results" / "first_light" / "ppo_continuous" / "Hopper-v4" / "seed_2" / name
    whole = path.read_text()
    for damage in ('{"a": \n1,x', "{}", "", whole[: len(whole) // 2]):
        path.write_text(damage)
        assert str(path) in refused(home, capsys)


@pytest.mark.parametrize("text", ["no markers", f"{END} {START}", f"{START}", f"{START * 2}{END}"])
def test_without_markers_nothing_is_written(home, capsys, text):
    (home / "README.md").write_text(text)
    assert f"{home / 'README.md'}: needs the markers" in refused(home, capsys)
    assert (home / "README.md").read_text() == text
    assert not (home / "results" / "first_light" / "README.md").exists()


def test_nothing_published_and_unknown_suites_are_told(home, capsys, monkeypatch):
    monkeypatch.setitem(SUITES, "first_light", (Entry("ppo_continuous", "Ant-v4", (1,), 10),))
    assert "holds no published run: python benchmarks/run.py --suite first_light" in refused(home, capsys)
    with pytest.raises(SystemExit) as stop:
        report.main(["--suite", "nope"])
    assert stop.value.code == 2 and "has first_light" in capsys.readouterr().err


def test_settings_on_one_environment_are_compared(tmp_path, monkeypatch):
    entries = tuple(Entry("ppo_continuous", "Hopper-v4", (1, 2), 1000, (), label) for label in ("one", "eight"))
    monkeypatch.setitem(SUITES, "num_envs", entries)
    for entry, scores in zip(entries, ((1.0, 3.0), (2.0, 4.0)), strict=True):
        for seed, score in zip(entry.seeds, scores, strict=True):
            write_seed(tmp_path / "num_envs", entry, seed, score)
    report.report("num_envs", tmp_path, tmp_path / "no-readme-needed.md")
    text = (tmp_path / "num_envs" / "README.md").read_text()
    # pairs (1,2) (1,4) (3,2) (3,4): one of four is won by "one"
    assert "| Hopper-v4 | one | eight | 0.25 [" in text and "| Hopper-v4 | eight | one | 0.75 [" in text


def test_names_of_published_algorithms_are_in_the_list():
    rows = report.PUBLISHED.read_text()
    assert all(f"\n{name}," in rows for name in PUBLISHED_NAMES.values())


def test_the_speed_tables_get_their_own_block(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"{START}{END}\n<!-- speed:start -->old<!-- speed:end -->\nafter\n")
    text = report.with_blocks(readme, {"results": "returns", "speed": "a table\n"})
    assert text == (f"{START}\nreturns\n{END}\n<!-- speed:start -->\na table\n<!-- speed:end -->\nafter\n")
    readme.write_text(f"{START}{END}")
    with pytest.raises(ValueError, match="speed:start"):
        report.with_blocks(readme, {"results": "returns", "speed": "x"})
