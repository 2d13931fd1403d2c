"""Published results: thinning, exactness, and no trace of the machine's paths or clock where runs are compared."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import launch
import pytest
import torch
from records import (
    ROOT,
    check_made_as_asked,
    publish,
    publish_policy,
    read_curve,
    read_metrics,
    source,
    thin,
    without_paths,
    write_curve,
)
from suites import SUITES, Entry

from cleanrl_zoo import zoo
from cleanrl_zoo.nn.mlp import mlp


def row(step: int, episodes: int = 0, mean: float = 0.0, **more: float) -> dict[str, float]:
    values = {"global_step": step, "charts/episodes": float(episodes), "charts/SPS": 999.0, "time/update": 1.5, **more}
    return {**values, "charts/episodic_return": mean} if episodes else values


def make_run(folder: Path, seed: int = 1, **summary) -> Path:
    folder.mkdir(parents=True)
    rows = [row(100, 2, 5.0, **{"losses/policy_loss": 0.1}), row(200, 1, 8.0, **{"eval/episodic_return": 7.0})]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    run = {
        "algorithm": "ppo_continuous",
        "args": {"env": "Hopper-v4", "seed": seed, "total_timesteps": 200, "num_envs": 8, "compile": True},
        "provenance": {"commit": "c0ffee", "dirty": False, "started": "2026-01-01T00:00:00+00:00"},
        "command": ["/opt/venv/bin/python", f"{ROOT}/algos/ppo_continuous.py", "--run-dir", str(folder)],
    }
    (folder / "run.json").write_text(json.dumps(run))
    content = {
        "env": "Hopper-v4",
        "seed": seed,
        "global_step": 200,
        "train_last100": {"mean": 6.0, "returns": [5.0, 5.0, 8.0]},
        "final_eval": {"mean": 7.0, "returns": [7.0]},
        "eval_curve": [[200, 7.0]],
        "wall_clock_s": 12.5,
        "steps_per_second": 16.0,
        **summary,
    }
    (folder / "summary.json").write_text(json.dumps(content))
    return folder


def test_few_rows_are_kept_exactly():
    # 0.1 + 0.2 has no short decimal: full precision must survive
    rows = [row(10, 3, 0.1 + 0.2, **{"losses/entropy": 1.5}), row(20), row(30, 1, 4.0, **{"eval/episodic_return": 2.0})]
    assert thin(rows) == [
        {"step": 10, "train_return": 0.1 + 0.2, "episodes": 3, "entropy": 1.5},
        {"step": 20, "episodes": 0},
        {"step": 30, "train_return": 4.0, "episodes": 1, "eval_return": 2.0},
    ]


def test_thinning_weighs_returns_by_episodes_and_averages_losses():
    # 4 rows, at most 2 points: width 2.
    # Point 1: (3·10 + 1·20) / 4 = 12.5 over 4 episodes, loss (1 + 2)/2. Point 2: no episode, the later evaluation 9.
    rows = [
        row(1, 3, 10.0, **{"losses/value_loss": 1.0}),
        row(2, 1, 20.0, **{"losses/value_loss": 2.0}),
        row(3, **{"eval/episodic_return": 8.0}),
        row(4, **{"eval/episodic_return": 9.0}),
    ]
    assert thin(rows, max_points=2) == [
        {"step": 2, "train_return": 12.5, "episodes": 4, "value_loss": 1.5},
        {"step": 4, "episodes": 0, "eval_return": 9.0},
    ]


def test_of_an_evaluation_beside_a_teacher_distance_and_length_are_kept():
    evaluation = {"eval/episodic_return": 0.5, "eval/episodic_length": 3.5}
    rows = [row(1, **evaluation), row(2, **evaluation, **{"eval/teacher_kl": 0.25}), row(3)]
    assert thin(rows) == [
        {"step": 1, "episodes": 0, "eval_return": 0.5},
        {"step": 2, "episodes": 0, "eval_return": 0.5, "eval_teacher_kl": 0.25, "eval_length": 3.5},
        {"step": 3, "episodes": 0},
    ]


@pytest.mark.parametrize(("rows", "points"), [(1, 1), (1000, 1000), (1001, 501), (48_828, 997)])
def test_a_curve_has_at_most_a_thousand_points_and_ends_at_the_last_step(rows, points):
    # ⌈rows/1000⌉ = 1, 1, 2, 49 rows per point; ⌈48828/49⌉ = 997
    curve = thin([row(step + 1, 1, 1.0) for step in range(rows)])
    assert len(curve) == points and curve[-1]["step"] == rows
    assert sum(point["episodes"] for point in curve) == rows


def test_curve_files_read_back_as_written(tmp_path):
    points = thin([row(10, 3, 1 / 3, **{"losses/entropy": 1.25}), row(20)])
    (tmp_path / "curve.csv").write_text(write_curve(points))
    assert read_curve(tmp_path / "curve.csv") == points


def test_published_files_name_no_machine_path_and_compare_without_the_clock(tmp_path):
    first = make_run(tmp_path / "a" / "seed_1")
    second = make_run(tmp_path / "b" / "seed_1", wall_clock_s=99.0, steps_per_second=2.0)
    publish(first, tmp_path / "results" / "first")
    publish(second, tmp_path / "results" / "second")
    for name in ("curve.csv", "summary.json"):
        one, two = ((tmp_path / "results" / which / name).read_bytes() for which in ("first", "second"))
        assert one == two
    text = (tmp_path / "results" / "first" / "run.json").read_text()
    assert str(tmp_path) not in text and str(ROOT) not in text and "/opt" not in text
    run = json.loads(text)
    assert run["command"] == ["python", "algos/ppo_continuous.py", "--run-dir", "seed_1"]
    assert run["timing"] == {"wall_clock_s": 12.5, "steps_per_second": 16.0}
    assert "SPS" not in (tmp_path / "results" / "first" / "curve.csv").read_text()


def test_a_preset_asks_for_what_it_says_today(tmp_path, monkeypatch):
    folder, entry = make_run(tmp_path / "run"), Entry("ppo_continuous", "Hopper-v4", (1,), 200, ("--preset", "p"))
    content = json.loads((folder / "run.json").read_text())
    content["args"] |= {"preset": "p", "hidden": [64, 64], "num_envs": 8}
    (folder / "run.json").write_text(json.dumps(content))
    presets = launch.load_algorithm(ROOT / "algos/ppo_continuous.py").PRESETS
    monkeypatch.setitem(presets, "p", {"hidden": (64, 64), "num_envs": 8, "a_flag_of_later": 3})
    check_made_as_asked(folder, entry, 1)
    monkeypatch.setitem(presets, "p", {"hidden": (64, 64), "num_envs": 4})
    with pytest.raises(ValueError, match="num_envs 8, the preset p says 4"):
        check_made_as_asked(folder, entry, 1)
    check_made_as_asked(folder, replace(entry, flags=(*entry.flags, "--num-envs", "8")), 1)


def test_paths_inside_flags_are_cut_too():
    given = {"a": ["--run-dir=/home/me/runs/x", f"{ROOT}/algos/a.py", "3/4", "Hopper-v4"], "b": {"c": "/x/y"}, "d": 1.5}
    kept = {"a": ["--run-dir=x", "algos/a.py", "3/4", "Hopper-v4"], "b": {"c": "y"}, "d": 1.5}
    assert without_paths(given) == kept


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        (Entry("ppo_continuous", "Hopper-v4", (1,), 200, ("--num-envs", "8", "--compile")), None),
        (Entry("ppo_continuous", "Hopper-v4", (1,), 200, ("--num-envs=8",)), None),
        (Entry("ppo_continuous", "Hopper-v4", (1,), 200, ("--num-envs", "1")), "num_envs 8, the suite asks for 1"),
        (Entry("ppo_continuous", "Hopper-v4", (1,), 200, ("--no-compile",)), "compile True, the suite asks for False"),
        (Entry("ppo_continuous", "Hopper-v4", (1,), 300), "total_timesteps 200, the suite asks for 300"),
        (Entry("ppo_continuous", "Hopper-v5", (1,), 200), "env Hopper-v4, the suite asks for Hopper-v5"),
    ],
)
def test_runs_made_with_other_flags_are_told(tmp_path, entry, told):
    folder = make_run(tmp_path / "run")
    if told is None:
        check_made_as_asked(folder, entry, 1)
    else:
        with pytest.raises(ValueError, match=told):
            check_made_as_asked(folder, entry, 1)


def test_the_published_policy_is_the_best_and_its_card_says_so(tmp_path):
    spec = {"builder": "mlp", "sizes": [4, 1], "activation": "tanh", "distribution": "diag_gaussian"}
    spec |= {"action_low": [-3.0], "action_high": [3.0]}
    runs = []
    for seed, score in ((1, 5.0), (2, 9.0), (3, 7.0)):
        runs.append(make_run(tmp_path / f"seed_{seed}", seed, final_eval={"mean": score, "returns": [score]}))
        card = {"env": "InvertedPendulum-v4", "policy": spec, "seed": seed, "command": ["python", f"{ROOT}/algos/a.py"]}
        zoo.save(runs[-1] / "policy", policy=zoo.Policy(spec, mlp([4, 1]), torch.zeros(1)), card=card)
    assert publish_policy(runs, tmp_path / "zoo") == runs[1]
    card = zoo.load(tmp_path / "zoo").card
    assert (card["seed"], card["chosen"]) == (2, "best final evaluation of 3 runs")
    assert card["command"] == ["python", "algos/a.py"]


def test_suites_have_unique_folders_and_seeds():
    for name, entries in SUITES.items():
        folders = [(entry.name, entry.env) for entry in entries]
        assert len(set(folders)) == len(folders), name
        for entry in entries:
            assert len(set(entry.seeds)) == len(entry.seeds)
            folder = ROOT / ("benchmarks" if entry.is_peer else "algos")
            assert (folder / f"{entry.algorithm}.py").exists()


def test_what_a_suite_borrows_is_there_and_the_same():
    for name, entries in SUITES.items():
        for entry in entries:
            if entry.results:
                assert replace(entry, results="") in SUITES[entry.results]
            if entry.longer:
                (longer,) = (e for e in entries if (e.name, e.env) == (entry.longer, entry.env))
                alike = {"steps": 0, "label": "", "longer": "", "seeds": ()}
                assert longer.steps > entry.steps and set(longer.seeds) & set(entry.seeds), name
                assert replace(longer, **alike) == replace(entry, **alike), name


def test_where_a_run_lives(monkeypatch):
    entries = (
        Entry("a", "E-v1", (1, 2, 3), 10, longer="middle"),
        Entry("a", "E-v1", (1, 2), 20, label="middle", longer="long"),
        Entry("a", "E-v1", (1,), 30, label="long"),
        Entry("a", "F-v1", (1,), 10, longer="long"),  # no longer run on this environment
        Entry("b", "E-v1", (1,), 10, results="lender"),
    )
    monkeypatch.setitem(SUITES, "s", entries)
    assert source("s", entries[0], 1) == (Path("s/long/E-v1/seed_1"), entries[2])
    assert source("s", entries[0], 2) == (Path("s/middle/E-v1/seed_2"), entries[1])
    assert source("s", entries[0], 3) == (Path("s/a/E-v1/seed_3"), entries[0])
    assert source("s", entries[3], 1) == (Path("s/a/F-v1/seed_1"), entries[3])
    assert source("s", entries[4], 1) == (Path("lender/b/E-v1/seed_1"), entries[4])


def test_presets_that_suites_name_exist():
    for entries in SUITES.values():
        for entry in entries:
            flags = list(entry.flags)
            if "--preset" in flags:
                preset = flags[flags.index("--preset") + 1]
                text = (ROOT / "algos" / f"{entry.algorithm}.py").read_text()
                assert f'    "{preset}": ' in text, (entry.algorithm, preset)


@pytest.mark.parametrize("algorithm", sorted({e.algorithm for es in SUITES.values() for e in es if e.longer}))
def test_the_beginning_of_a_longer_run_is_the_shorter_run(tmp_path, algorithm):
    """What `longer` takes for granted: nothing in these files depends on the number of steps to come."""
    rows = []
    for steps in (256, 512):
        run_dir = tmp_path / str(steps)
        command = [sys.executable, ROOT / "algos" / f"{algorithm}.py", "--preset", "debug", "--run-dir", run_dir]
        command += ["--total-timesteps", steps, "--eval-every", 256, "--checkpoint-every", 0, "--env", "Pendulum-v1"]
        subprocess.run([str(word) for word in command], check=True, capture_output=True)
        timed = ("charts/SPS", "time/")
        metrics = read_metrics(run_dir / "metrics.jsonl")
        rows.append([{k: v for k, v in row.items() if not k.startswith(timed)} for row in metrics])
    assert [row["global_step"] for row in rows[0]] == [256] and rows[0] == rows[1][:1]
