"""The report: three returns, like with like against what is published, refusals, figures and the README's block."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import records
import report
import report_published
import report_runs
import report_tables
from report_figures import binned, draw_over_seconds
from suites import PUBLISHED_NAMES, SUITES, Entry

ENTRY = Entry("ppo_continuous", "Hopper-v4", (1, 2, 3, 4, 5), 1_000_000)


START, END = "<!-- results:start -->", "<!-- results:end -->"


def write_seed(
    folder: Path,
    entry: Entry,
    seed: int,
    score: float,
    args: dict | None = None,
    env: dict | None = None,
    every: int = 0,
) -> Path:
    """One published run: training return rises to `score`, evaluations are score + 10 and then score.

    With `every`, a point of the curve and an evaluation (10 above the training return) at each multiple of it.
    """
    place = folder / entry.name / entry.env / f"seed_{seed}"
    place.mkdir(parents=True)
    half = entry.steps // 2
    steps = range(every, entry.steps + 1, every) if every else [entry.steps * k // 10 for k in range(1, 11)]
    points = [
        {"step": step, "train_return": score * step / entry.steps, "episodes": 5, "entropy": 1.0} for step in steps
    ]
    evaluations = [[half, score + 10.0], [entry.steps, score]]
    if every:
        evaluations = [[point["step"], point["train_return"] + 10] for point in points]
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
        "eval_curve": evaluations,
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


@pytest.fixture
def published_list(tmp_path, monkeypatch):
    """A list of published numbers of its own; `add(algorithm, env, version, steps, metric, value)` adds a row."""
    columns = "algorithm,env,env_version,step_budget,metric,value,spread,spread_kind,seeds,source_project"
    path = tmp_path / "published.csv"
    path.write_text(f"{columns},source_location,notes\n")
    monkeypatch.setattr(report_published, "PUBLISHED", path)

    def add(*cells, spread: str = "", kind: str = "", seeds: str = "", project: str = "Source") -> None:
        with open(path, "a") as file:
            print(*cells, spread, kind, seeds, project, "a page", "a note", sep=",", file=file)

    return add


def test_published_numbers_match_only_like_with_like():
    # CleanRL's three v4 rows at 1M steps, as listed in published.csv: value, std over 3 seeds
    for env, value, std in (
        ("Hopper", 2382.86, 271.74),
        ("Walker2d", 2287.95, 571.78),
        ("HalfCheetah", 1442.64, 46.03),
    ):
        (row,) = report_published.published_rows(Entry("ppo_continuous", f"{env}-v4", (1,), 1_000_000), "train")
        assert (float(row["value"]), report_published.spread(row), row["source_project"]) == (
            value,
            (std, 3),
            "CleanRL",
        )
    for other in (
        Entry("ppo_continuous", "Hopper-v5", (1,), 1_000_000),  # another version
        Entry("ppo_continuous", "Hopper-v4", (1,), 500_000),  # other steps
        Entry("unpublished", "Hopper-v4", (1,), 1_000_000),  # another algorithm
    ):
        assert report_published.published_rows(other, "train") == []
    # Tianshou's PPO on Hopper-v3 at 1M is a maximum over training: it never stands beside our other two returns
    v3 = Entry("ppo_continuous", "Hopper-v3", (1,), 1_000_000)
    assert [row["source_project"] for row in report_published.published_rows(v3, "max")] == ["Tianshou"]
    assert all(row["source_project"] != "Tianshou" for row in report_published.published_rows(v3, "train"))
    assert report_published.published_rows(v3, "final") == []


def test_a_spread_over_episodes_is_not_a_spread_over_seeds():
    row = {"spread": "10.0", "seeds": "1", "spread_kind": "std over evaluation episodes"}
    assert report_published.spread(row) is None
    assert report_published.spread({**row, "spread_kind": "std over seeds", "seeds": ""}) is None
    assert report_published.spread({**row, "spread_kind": "std over seeds at that step", "seeds": "10"}) == (10.0, 10)


@pytest.mark.parametrize(
    ("mean", "std", "bound"),
    # mean − 2·std·√(3/2)·√(1/3 + 1/5): Hopper 2382.86 − 2·271.74·1.22474·0.730297 = 1896.76, and so on
    [(2382.86, 271.74, 1896.76), (2287.95, 571.78, 1265.12), (1442.64, 46.03, 1360.30)],
)
def test_bound_is_two_standard_errors_of_the_difference_below(mean, std, bound):
    assert report_published.lower_bound(mean, std, 3, 5) == pytest.approx(bound, abs=0.01)


def test_probability_above_a_normal_draw():
    # one run at the mean, one a standard deviation above: (Φ(0) + Φ(1)) / 2 = (0.5 + 0.8413447) / 2
    assert report_published.probability_above(np.array([10.0, 12.0]), 10.0, 2.0) == pytest.approx(0.67067237, abs=1e-8)


def test_the_three_returns(home):
    group = report_runs.read_group(home / "results", "first_light", ENTRY)
    np.testing.assert_array_equal(group.scores("train"), [2000.0, 2100.0, 2400.0, 2500.0, 3000.0])
    np.testing.assert_array_equal(group.scores("final"), [2000.0, 2100.0, 2400.0, 2500.0, 3000.0])
    # the mean over seeds is highest at the first evaluation, 10 above the last
    np.testing.assert_array_equal(group.scores("max"), [2010.0, 2110.0, 2410.0, 2510.0, 3010.0])


def test_maximum_is_taken_of_the_mean_over_seeds_not_of_each_seed():
    curves = [[[1, 9.0], [2, 0.0], [3, 5.0]], [[1, 0.0], [2, 8.0], [3, 5.0]]]  # means 4.5, 4, 5: the third point
    group = report_runs.Group(ENTRY, seeds=[1, 2], summaries=[{"eval_curve": curve} for curve in curves])
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
    np.testing.assert_allclose(binned(curve, np.array([0.0, 10.0, 20.0, 30.0])), [12.5, 26.25, 40.0])


def test_over_seconds_every_seed_is_a_line_to_its_own_end():
    """The second seed is slower by a start of 30 seconds; returns are step/100, at 10 steps a second."""
    from matplotlib.figure import Figure

    curve = [{"step": float(step), "train_return": step / 100, "episodes": 1.0} for step in range(100, 1001, 100)]
    seconds = np.arange(10.0, 101.0, 10.0)
    nothing = [{"step": 1000.0, "episodes": 0.0}]
    group = report_runs.Group(ENTRY, seeds=[1, 2, 3], summaries=3 * [{"eval_curve": [[1000, 9.0]]}],
                              curves=[curve, curve, nothing], seconds=[seconds, seconds + 30, seconds[:1]])  # fmt: skip
    axes = Figure().subplots()
    draw_over_seconds(axes, [group])
    lines = [line.get_xydata() for line in axes.get_lines()]
    assert len(lines) == 2
    for start, line in zip((0, 30), lines, strict=True):
        assert line[0, 0] >= start + 10 and start + 99 < line[-1, 0] <= start + 100
        assert np.abs(line[:, 1] - (line[:, 0] - start) / 10).max() < 1.01  # one bin of the curve's own points


def test_a_setting_of_different_lengths_says_both():
    groups = [report_runs.Group(Entry("ppo", env, (1,), steps)) for env, steps in (("A", 50_000), ("B", 1_000_000))]
    assert report_tables.columns_of(groups) == {"ppo": "ppo, 50k or 1M"}
    groups += [report_runs.Group(Entry("dqn", "A", (1,), 50_000))]
    assert report_tables.columns_of(groups) == {"ppo": "ppo, 50k or 1M", "dqn": "dqn, 50k"}
    assert report_tables.columns_of([groups[0], groups[2]]) == {"ppo": "ppo", "dqn": "dqn"}


def test_runs_of_fewer_than_a_hundred_episodes_are_said():
    def group(env: str, *counts: int) -> report_runs.Group:
        summaries = [{"train_last100": {"mean": 1.0, "returns": [1.0] * count}} for count in counts]
        return report_runs.Group(Entry("sac", env, (1, 2), 5000), summaries=summaries)

    assert report_tables.short_note([group("A", 100, 100)]) == ""
    note = report_tables.short_note([group("A", 100, 100), group("B", 100, 25), group("C", 12)])
    assert note.endswith("from the first on: B (25), C (12).\n")


def test_missing_seeds_are_said(home):
    for path in (home / "results" / "first_light" / "ppo_continuous" / "Hopper-v4" / "seed_5").iterdir():
        path.unlink()
    assert make(home) == 0
    text = (home / "results" / "first_light" / "README.md").read_text()
    assert "**Incomplete: 1 of the suite's runs are not published yet:** " in text
    assert "`ppo_continuous` on Hopper-v4 (1 of 5)." in text
    assert "| 4 of 5 |" in text


def test_the_front_page_belongs_to_the_results_beside_it(home, monkeypatch):
    monkeypatch.setattr(report, "ROOT", home)
    shutil.copytree(home / "results", home / "again" / "results")
    assert report.main(["--suite", "first_light", "--results", str(home / "again" / "results")]) == 0
    assert (home / "again/results/first_light/README.md").exists()
    assert "old text" in (home / "README.md").read_text()
    assert report.main(["--suite", "first_light", "--results", str(home / "results")]) == 0
    assert "old text" not in (home / "README.md").read_text()


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
        (
            {"args": {"gamma": 0.9}},
            "gamma is 0.99 in Hopper-v4, ppo_continuous seeds 1, 2, 4, 5 but 0.9 in Hopper-v4, ppo_continuous seed 3\n",
        ),
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


@pytest.mark.parametrize("name", ["summary.json", "run.json", "curve.csv", "clock.csv"])
def test_a_run_with_a_damaged_file_is_left_out_counted_and_named(home, capsys, name):
    results = home / "results"
    path = results / "first_light" / "ppo_continuous" / "Hopper-v4" / "seed_2" / name
    whole = path.read_text() if path.exists() else "step,seconds\n100000,1.0\n"
    for damage in ('{"a": \n1,x', "{}", "", whole[: len(whole) // 2]):
        path.write_text(damage)
        group = report_runs.read_group(results, "first_light", ENTRY)
        (line,) = group.damaged
        assert group.seeds == [1, 3, 4, 5] and str(path) in line and "\n" not in line
    assert make(home) == 0
    assert f"left out: {path}: " in capsys.readouterr().err
    text = (results / "first_light" / "README.md").read_text()
    place = f"first_light/ppo_continuous/Hopper-v4/seed_2/{name}"
    told = f"**Left out: 1 run has a damaged file.** {place}: "
    assert told in text and told in (home / "README.md").read_text()
    assert "| 4 of 5 |" in text and "Incomplete" not in text and str(home) not in text
    page = (results / "first_light" / "report.html").read_text()
    assert f"Left out: 1 run has a damaged file. {place}" in page and str(home) not in page


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("run.json", {"provenance": {}}, "it lacks provenance.commit, provenance.dirty"),
        ("run.json", {"timing": {}}, "it lacks timing.wall_clock_s"),
        ("summary.json", {"final_eval": {}}, "it lacks final_eval.mean"),
        ("summary.json", {"eval_curve": [[1]]}, "eval_curve is not a list of [step, return]"),
    ],
)
def test_json_that_lacks_something_is_damaged(home, name, change, told):
    path = home / "results" / "first_light" / "ppo_continuous" / "Hopper-v4" / "seed_2" / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    (line,) = report_runs.read_group(home / "results", "first_light", ENTRY).damaged
    assert line.startswith(f"{path}: damaged (") and told in line


def test_a_suite_of_damaged_runs_only_is_told(home, capsys):
    for path in (home / "results" / "first_light").rglob("summary.json"):
        path.write_text("")
    with pytest.raises(SystemExit):
        make(home)
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 6 and all(line.startswith("left out: ") for line in err[:5])
    assert "holds no published run, 5 with a damaged file: python benchmarks/run.py" in err[5]


def test_two_versions_of_an_environment_are_refused(tmp_path, monkeypatch):
    """They are two environments, of which a report has one: which runs have which."""
    entries = tuple(Entry("ppo_continuous", env, (1, 2), 1000) for env in ("Hopper-v4", "Ant-v5", "Hopper-v5"))
    monkeypatch.setitem(SUITES, "mixed", entries)
    for entry in entries:
        for seed in entry.seeds:
            write_seed(tmp_path / "mixed", entry, seed, 1.0)
    told = (
        "Hopper is Hopper-v4 in Hopper-v4, ppo_continuous seeds 1, 2 but Hopper-v5 in Hopper-v5, ppo_continuous seeds 1"
    )
    with pytest.raises(ValueError, match=told):
        report.report("mixed", tmp_path, tmp_path / "none.md")


def test_settings_that_are_evaluated_otherwise_are_refused(tmp_path, monkeypatch):
    entries = tuple(Entry("ppo_continuous", "Hopper-v4", (1,), 1000, (), label) for label in ("one", "two", "long"))
    entries = (*entries[:2], Entry("ppo_continuous", "Hopper-v4", (1,), 2000, (), "long"))
    monkeypatch.setitem(SUITES, "mixed", entries)
    for entry, episodes in zip(entries, (10, 10, 50), strict=True):  # after other steps it may be
        write_seed(tmp_path / "mixed", entry, 1, 1.0, {"eval_episodes": episodes, "eval_every": 500})
    report.report("mixed", tmp_path, tmp_path / "none.md")
    path = tmp_path / "mixed" / "two" / "Hopper-v4" / "seed_1" / "run.json"
    path.write_text(path.read_text().replace('"eval_episodes": 10', '"eval_episodes": 20'))
    told = "eval_episodes is 10 in Hopper-v4, one seed 1 but 20 in Hopper-v4, two seed 1"
    with pytest.raises(ValueError, match=told):
        report.report("mixed", tmp_path, tmp_path / "none.md")


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


def test_a_suite_beside_a_package_is_reported_before_the_package_has_run(tmp_path, monkeypatch):
    entry = Entry("ppo", "CartPole-v1", (1,), 1000)
    monkeypatch.setitem(SUITES, "own", (entry,))
    write_seed(tmp_path / "own", entry, 1, 5.0)
    report.report("own_sb3", tmp_path, tmp_path / "no-readme-needed.md")
    text = (tmp_path / "own_sb3" / "README.md").read_text()
    assert "| CartPole-v1 | ppo | 1 | 5.0 |" in text and "sb3_ppo" in text


def test_names_of_published_algorithms_are_in_the_list():
    rows = report_published.PUBLISHED.read_text()
    assert all(f"\n{name}," in rows for name in PUBLISHED_NAMES.values())


def test_the_speed_tables_get_their_own_block(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"{START}{END}\n<!-- speed:start -->old<!-- speed:end -->\nafter\n")
    text = report.with_blocks(readme, {"results": "returns", "speed": "a table\n"})
    assert text == (f"{START}\nreturns\n{END}\n<!-- speed:start -->\na table\n<!-- speed:end -->\nafter\n")
    readme.write_text(f"{START}{END}")
    with pytest.raises(ValueError, match="speed:start"):
        report.with_blocks(readme, {"results": "returns", "speed": "x"})


MAX_METRIC = "max over training of the across-seed mean of deterministic evaluation return (10 episodes each)"
WINDOW_METRIC = "mean training return (sampled actions) over the preceding 50k steps"


def sections(text: str) -> dict[str, str]:
    """A report's parts by their headings."""
    return {part.split("\n", 1)[0]: part.split("\n", 1)[1] for part in text.split("\n## ")[1:]}


def test_rows_of_another_version_only_where_asked_and_only_where_ours_has_none(published_list):
    entry = Entry("trpo", "Hopper-v4", (1,), 1_000_000)
    published_list("TRPO", "Hopper", "v3", 1_000_000, MAX_METRIC, 2046.0)
    published_list("TRPO", "Hopper", "v3", 3_000_000, MAX_METRIC, 9999.0)  # never with other steps
    published_list("A2C", "Hopper", "v3", 1_000_000, MAX_METRIC, 9999.0)
    assert report_published.published_rows(entry, "max") == []
    (row,) = report_published.published_rows(entry, "max", other_versions=True)
    assert row["value"] == "2046.0" and report_published.origin(row, entry.env) == "Source, Hopper-v3"
    published_list("TRPO", "Hopper", "v4", 1_000_000, MAX_METRIC, 2100.0)
    (row,) = report_published.published_rows(entry, "max", other_versions=True)
    assert row["value"] == "2100.0" and report_published.origin(row, entry.env) == "Source"


def test_the_numbers_that_the_mujoco_suite_must_be_held_against():
    # Tianshou, v3 environments: value, std over 10 seeds
    for name, steps, env, value, std in (
        ("trpo", 1_000_000, "Hopper-v4", 2046.0, 1037.9),
        ("trpo", 1_000_000, "Walker2d-v4", 3826.7, 782.7),
        ("trpo", 1_000_000, "HalfCheetah-v4", 4471.2, 804.9),
        ("a2c", 1_000_000, "Hopper-v4", 1253.2, 458.0),
        ("a2c", 1_000_000, "HalfCheetah-v4", 1829.9, 1068.3),
        ("reinforce", 3_000_000, "Hopper-v4", 395.8, 64.5),
        ("reinforce", 3_000_000, "HalfCheetah-v4", 884.0, 41.0),
    ):
        (entry,) = (entry for entry in SUITES["mujoco"] if (entry.name, entry.env, entry.steps) == (name, env, steps))
        (row,) = report_published.published_rows(entry, "max", other_versions=True)
        assert (float(row["value"]), report_published.spread(row)) == (value, (std, 10))


@pytest.fixture
def two_suites(tmp_path, monkeypatch, published_list) -> Path:
    """Results of a suite `other` that borrows from `lender`: two algorithms, two environments, one longer run."""
    lent = Entry("ppo_continuous", "Hopper-v4", (1, 2), 200_000, ("--eval-every", "20000"))
    monkeypatch.setitem(SUITES, "lender", (lent,))
    entries = (
        Entry("ppo_continuous", "Hopper-v4", (1, 2), 200_000, ("--eval-every", "20000"), results="lender"),
        Entry("sac", "Hopper-v4", (1, 2), 100_000, longer="sac_long"),
        Entry("sac", "Walker2d-v4", (1, 2), 100_000),
        Entry("sac", "Hopper-v4", (1,), 200_000, label="sac_long"),
        Entry("peers_sb3", "Hopper-v4", (1, 2), 100_000, ("--algo", "sac"), "sb3_sac"),
    )
    monkeypatch.setitem(SUITES, "other", entries)
    monkeypatch.setattr(report_runs, "OTHER_VERSIONS", ("other",))
    results = tmp_path / "results"
    for seed, score in ((1, 1000.0), (2, 3000.0)):
        args = {"eval_every": 20000}
        write_seed(results / "lender", lent, seed, score, every=20_000, args=args)
        write_seed(results / "other", entries[2], seed, score, every=20_000)
        engine = {"engine": "gymnasium"}
        write_seed(results / "other", entries[4], seed, score, every=20_000, env=engine, args={"algo": "sac"})
    write_seed(results / "other", entries[1], 2, 500.0, every=20_000)
    write_seed(results / "other", entries[3], 1, 4000.0, every=20_000)
    return results


def test_one_table_of_all_with_borrowed_and_cut_runs(two_suites, published_list):
    published_list(
        "SAC", "Hopper", "v2", 100_000, WINDOW_METRIC, 1500.0, spread="100", kind="std over seeds", seeds="5"
    )
    published_list("SAC", "Hopper", "v2", 200_000, WINDOW_METRIC, 1600.0)
    published_list("SAC", "Hopper", "v2", 300_000, WINDOW_METRIC, 9999.0)  # nobody came so far
    published_list("SAC", "Hopper", "v3", 100_000, report_published.UNLIKE[0], 8888.0)
    report.report("other", two_suites, two_suites / "none.md")
    text = (two_suites / "other" / "README.md").read_text()
    part = sections(text)
    # Hopper, SAC at 100k: seed 2 scored 500; seed 1 is the run of 200k, whose training return rises to 4000: its last
    # hundred episodes are the last 20 points (5 episodes each), but it has five up to 100k: 400, 800, ..., 2000, mean
    # 1200. Mean of 1200 and 500: 850 ± 350; two seeds have no quarter to drop, so the IQM is the mean.
    # ppo_continuous (lent) and Walker2d, SB3: 1000 and 3000.
    overview = part["All: mean return of the last 100 training episodes"]
    header = "| environment | ppo_continuous, 200k | sac, 100k | sac_long, 200k | sb3_sac, 100k |"
    assert header in overview
    assert "| Hopper-v4 | 2000 ± 1000 (2000) | 850 ± 350 (850) | 4000 | 2000 ± 1000 (2000) |" in overview
    assert "| Walker2d-v4 | – | 2000 ± 1000 (2000) | – | – |" in overview
    # evaluations lie 10 above the training return: at 100k 2010 of the cut run, and the other's last one, 500
    assert (
        "| Hopper-v4 | 2000 ± 1000 (2000) | 1255 ± 755 (1255) | 4000 |"
        in part["All: final evaluation of the deterministic policy"]
    )
    # the 50k before step 100k hold the points at 60k, 80k and 100k: of the cut run 1200, 1600, 2000, mean 1600; of seed
    # 2 300, 400, 500, mean 400. Before 200k only the long run has them: 3200, 3600, 4000.
    # bound: 1500 − 2·100·√(5/4)·√(1/5 + 1/2) = 1312.92
    windows = part["Mean return of the training episodes shortly before a step"]
    ours, theirs = "2 | 1000 ± 600 | 1000 [400, 1600]", "1500 ± 100 (5) | Source, Hopper-v2 | 1313"
    assert f"| Hopper-v4 | sac | 100k | 50k | {ours} | {theirs} |" in windows
    assert "| Hopper-v4 | sac_long | 200k | 50k | 1 | 3600 | – | 1600 | Source, Hopper-v2 | – | – |" in windows
    assert "9999" not in text
    unlike = part["Published under another protocol, or none that is stated: not compared"]
    assert "| Hopper, version v3 | SAC | 8888 | – |" in unlike and text.count("8888") == 1
    assert "Hopper-v4, sac: seed 1 up to step 100,000" in text and "those of the suite `lender`" in text
    # each pair once, and none of different lengths
    against = part["Settings against each other, last 100 training episodes"]
    assert against.count("| Hopper-v4 |") == 2 and "| Hopper-v4 | sac | sb3_sac | 0.25 [" in against
    assert "| Hopper-v4 | ppo_continuous | sac_long |" in against
    images = {path.name for path in (two_suites / "other").glob("*.png")}
    assert images == {"Hopper-v4.png", "Walker2d-v4.png"}


def test_a_cut_run_has_its_last_hundred_episodes_and_the_evaluation_at_that_step():
    # 30 episodes per point: the last four hold 120, the fewest that reach 100: (3 + 4 + 5 + 6) / 4
    curve = [{"step": 10.0 * k, "train_return": float(k), "episodes": 30.0} for k in range(1, 10)]
    curve[3]["episodes"] = 0.0  # and then those at 20, 30, 50, 60: (2 + 3 + 5 + 6) / 4
    del curve[3]["train_return"]
    summary = {"train_last100": {"mean": 9.0}, "eval_curve": [[30, 1.0], [60, 2.0], [90, 3.0]]}
    cut, points = report_runs.beginning(summary, curve, 60)
    assert cut["train_last100"] == {"mean": 4.0} and cut["final_eval"] == {"mean": 2.0}
    assert cut["eval_curve"] == [[30, 1.0], [60, 2.0]] and points[-1]["step"] == 60
    cut, points = report_runs.beginning(summary, curve, 65)  # an iteration may go beyond: the first point from 65 on
    assert points[-1]["step"] == 70 and cut["final_eval"] == {"mean": None}


def test_a_run_that_lives_elsewhere_is_not_looked_for_here(two_suites, capsys):
    write_seed(two_suites / "other", SUITES["other"][1], 1, 1.0)
    with pytest.raises(ValueError, match="seed_1 is not among the suite's seeds"):
        report.report("other", two_suites, two_suites / "none.md")


def test_a_peer_may_have_another_engine_but_not_another_version(two_suites):
    place = two_suites / "other" / "sb3_sac" / "Hopper-v4" / "seed_2" / "run.json"
    run = json.loads(place.read_text())
    run["provenance"]["env"]["versions"]["mujoco"] = "3.3.0"
    place.write_text(json.dumps(run))
    with pytest.raises(ValueError, match="mujoco"):
        report.report("other", two_suites, two_suites / "none.md")


def test_what_is_missing_of_a_table_of_all_is_said(two_suites):
    for path in (two_suites / "other" / "sac" / "Walker2d-v4" / "seed_2").iterdir():
        path.unlink()
    report.report("other", two_suites, two_suites / "none.md")
    text = (two_suites / "other" / "README.md").read_text()
    assert "| Walker2d-v4 | – | 1000 [1 of 2 seeds] | – | – |" in text and "**Incomplete: 1 of" in text


def test_a_window_holds_the_episodes_that_ended_in_it():
    # before step 100, 50 steps: not the point at 50 (it ended before), nor that at 110; (2·60 + 1·100) / 3 = 73.33
    curve = [{"step": float(step), "train_return": float(step), "episodes": 1.0} for step in (50, 60, 100, 110)]
    curve[1]["episodes"] = 2.0
    group = report_runs.Group(ENTRY, curves=[curve, curve])
    np.testing.assert_allclose(report_tables.at_steps(group, 100, 50), [220 / 3, 220 / 3])
    assert len(report_tables.at_steps(group, 40, 30)) == 0  # nothing ended there
