"""Suites of language models: what their runs are asked for, and the report of rewards."""

import json
from pathlib import Path

import pytest
import records
import report
from suites import START, SUITES, Entry
from test_benchmarks_report import write_seed

BEGIN = Entry("llm_sft", "addition", (1,), 1_000, ("--noise", "0.5"))
TRIALS = (
    Entry("grpo", "addition", (1, 2), 2_000, ("--variant", "grpo"), "grpo"),
    Entry("grpo", "addition", (1, 2), 2_000, ("--variant", "dapo"), "dapo"),
)


def test_a_language_models_run_is_asked_for_its_task_and_tokens():
    assert TRIALS[0].is_language and TRIALS[0].asked == {"task": "addition", "total-tokens": "2000"}
    control = Entry("ppo", "CartPole-v1", (1,), 500)
    assert not control.is_language and control.asked == {"env": "CartPole-v1", "total-timesteps": "500"}


def test_every_suite_that_has_a_start_has_one_run_there():
    for name, begin in START.items():
        assert name in SUITES and len(SUITES[begin]) == 1 and len(SUITES[begin][0].seeds) == 1


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """The starting model at 0.2, grpo at 0.9 and 0.8, dapo at 0.7 and 0.5."""
    monkeypatch.setitem(SUITES, "addition_sft", (BEGIN,))
    monkeypatch.setitem(SUITES, "addition", TRIALS)
    results = tmp_path / "results"
    asked = [(BEGIN, (0.2,)), (TRIALS[0], (0.9, 0.8)), (TRIALS[1], (0.7, 0.5))]
    for entry, scores in asked:
        suite = "addition_sft" if entry is BEGIN else "addition"
        flags = {"variant": entry.name} if entry is not BEGIN else {"noise": 0.5}
        for seed, score in zip(entry.seeds, scores, strict=True):
            args = {"task": "addition", "total_tokens": entry.steps, **flags}
            place = write_seed(results / suite, entry, seed, score, args)
            summary = json.loads((place / "summary.json").read_text())
            # an iteration ends where it ends: two seeds are never evaluated at the same tokens
            summary["eval_curve"] = [[entry.steps // 2 + seed, score + 0.05], [entry.steps + seed, score]]
            (place / "summary.json").write_text(json.dumps(summary))
    return tmp_path


def make(home: Path) -> str:
    assert report.main(["--suite", "addition", "--results", str(home / "results"), "--readme", str(home / "none")]) == 0
    return (home / "results" / "addition" / "README.md").read_text()


def test_the_table_ranks_settings_and_shows_the_gain_over_the_start(home):
    """grpo: mean .85, std (ddof 0) .05, gain .65; dapo: .6, .1, .4; at the best point each is .05 higher."""
    text = make(home)
    rows = [line for line in text.splitlines() if line.startswith("| addition")]
    assert rows[0].startswith("| addition | grpo | 2 of 2 | 0.850 ± 0.050 | 0.850 [0.800, 0.900] | +0.650 | 0.900 |")
    assert rows[1].startswith("| addition | dapo | 2 of 2 | 0.600 ± 0.100 | 0.600 [0.500, 0.700] | +0.400 | 0.650 |")
    assert (
        "held-out reward is 0.200" in text and (home / "results" / "addition" / "addition.png").stat().st_size > 5_000
    )
    assert "Incomplete" not in text and "0123456789ab" in text


def test_what_was_logged_last_of_pairs_and_of_a_teacher_is_a_table_each(home):
    """Means over the two seeds of each last value: agreement (.7 + .8)/2, margin (1 + 2)/2; KL (.2 + .4)/2."""
    for name, columns in (
        ("grpo", {"accuracy": (0.7, 0.8), "margin": (1.0, 2.0)}),
        ("dapo", {"eval_teacher_kl": (0.2, 0.4), "eval_length": (3.0, 4.0)}),
    ):
        for index in range(2):
            place = home / "results" / "addition" / name / "addition" / f"seed_{index + 1}" / "curve.csv"
            points = [{**point, **dict.fromkeys(columns, 9.0)} for point in records.read_curve(place)]
            points[-1] |= {column: values[index] for column, values in columns.items()}
            place.write_text(records.write_curve(points))
    text = make(home)
    pairs, teacher = (text.split(title)[1] for title in ("## Pairs", "## Beside the teacher"))
    assert "| task | setting | agreement | margin | KL | chosen length | rejected length |" in pairs
    assert "| addition | grpo | 0.750 | 1.500 | – | – | – |" in pairs
    assert "| task | setting | KL | length |" in teacher and "| addition | dapo | 0.300 | 3.500 |" in teacher


def test_what_is_missing_is_said(home):
    folder = home / "results" / "addition" / "dapo" / "addition" / "seed_2"
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    text = make(home)
    assert "1 of the suite's runs are not published yet" in text and "| dapo | 1 of 2 |" in text


def test_without_a_published_start_there_is_no_gain(home):
    (home / "results" / "addition_sft" / "llm_sft" / "addition" / "seed_1" / "summary.json").unlink()
    assert "| – |" in make(home)


def test_runs_with_other_flags_are_refused(home, capsys):
    place = home / "results" / "addition" / "grpo" / "addition" / "seed_1" / "run.json"
    run = records.read_json(place)
    run["args"]["total_tokens"] = 999
    place.write_text(json.dumps(run))
    with pytest.raises(SystemExit) as stop:
        make(home)
    assert stop.value.code == 2 and "total_tokens 999" in capsys.readouterr().err
