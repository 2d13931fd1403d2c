"""Sweeps: what is drawn, scored, pruned, told, taken over and confirmed, shown on a fake algorithm of a few lines."""

import csv
import dataclasses
import json
import math
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

optuna = pytest.importorskip("optuna", reason="optuna is not installed")

import launch  # noqa: E402
import run as runner  # noqa: E402
import spaces  # noqa: E402
import sweep as tool  # noqa: E402
import sweep_helpers as fake  # noqa: E402
import sweep_report  # noqa: E402
import sweep_trials as trials  # noqa: E402

from cleanrl_zoo.run.arguments import checked_settings  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
STATES = optuna.trial.TrialState


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(trials, "POLL_SECONDS", 0.02)


@pytest.fixture
def algos(tmp_path: Path) -> Path:
    return fake.write_fake(tmp_path)


def begin(folder: Path, space: str = "quality", *words: str, count: int = 3) -> trials.Sweep:
    """A joined sweep of the fake algorithm that has done nothing yet."""
    return tool.set_up(tool.parse(fake.command(folder, space, *words, trials=count)), folder / "algos")


def rows(*points: tuple[int, float, float]) -> list[dict[str, float]]:
    """Log rows: step, episodes, mean return."""
    return [
        {"global_step": s, "charts/episodes": n, **({"charts/episodic_return": r} if n else {})} for s, n, r in points
    ]


# Scores


def test_a_runs_score_at_a_step_counts_the_last_rows_that_hold_a_hundred_episodes():
    log = rows((10, 60, 1.0), (20, 70, 2.0), (30, 0, 0.0), (40, 50, 4.0), (50, 10, 9.0))
    # reached in the row of step 40: 50 episodes of 4 and, since 50 are fewer than 100, 70 of 2: (200 + 140) / 120
    assert trials.score_at(log, 35, "last100") == pytest.approx(340 / 120, abs=1e-12)
    # at step 20: 70 of 2 and 60 of 1: (140 + 60) / 130
    assert trials.score_at(log, 20, "last100") == pytest.approx(200 / 130, abs=1e-12)
    assert trials.score_at(log, 51, "last100") is None  # not there yet
    assert math.isnan(trials.score_at(rows((10, 0, 0.0)), 10, "last100"))
    log[1]["eval/episodic_return"], log[3]["eval/episodic_return"] = 7.0, 8.0
    assert [trials.score_at(log, step, "eval") for step in (20, 30, 40, 50)] == [7.0, 7.0, 8.0, 8.0]
    assert math.isnan(trials.score_at(log, 10, "eval"))


def test_a_log_that_is_being_written_counts_up_to_its_last_whole_row(tmp_path):
    assert trials.read_rows(tmp_path) == []
    (tmp_path / "metrics.jsonl").write_text('{"global_step": 10}\n{"global_s')
    assert trials.read_rows(tmp_path) == [{"global_step": 10}]


def test_the_statistics_of_the_seeds():
    scores = [1.0, 10.0, 3.0, 100.0]  # a quarter at either end is dropped: (3 + 10) / 2; three seeds have no quarter
    assert [trials.STATISTICS[name](scores) for name in ("iqm", "mean", "median", "min")] == [6.5, 28.5, 6.5, 1.0]
    assert trials.STATISTICS["iqm"]([1.0, 2.0, 6.0]) == 3.0


# Draws


def test_a_draw_depends_on_seed_and_trial_and_not_on_who_draws(tmp_path, algos):
    sweep = begin(tmp_path)
    first = trials.sample(sweep, 0, 0, random=False)
    assert trials.sample(sweep, 0, 0, random=False) == first
    other = optuna.create_study(study_name="s", direction="maximize")  # another process, of which nothing is shared
    assert trials.sample(dataclasses.replace(sweep, study=other), 0, 0, random=False) == first
    points = [trials.sample(sweep, number, attempt, random=False)[0] for number in range(5) for attempt in range(2)]
    reseeded = dataclasses.replace(sweep, plan=dataclasses.replace(sweep.plan, seed=1))
    points.append(trials.sample(reseeded, 0, 0, random=False)[0])
    assert len({point["quality"] for point in points}) == 11


def test_equal_points_are_drawn_again_until_none_is_left(tmp_path, algos, monkeypatch):
    monkeypatch.setattr(trials, "DRAWS", 100)
    sweep = begin(tmp_path, "colours", count=4)
    helds = [trials.take(sweep) for _ in range(3)]
    settings = [held.trial.user_attrs["drawn"]["settings"]["colour"] for held in helds]
    assert sorted(settings) == ["blue", "green", "red"]
    assert [trial.params["colour"] for trial in sweep.study.trials] == settings
    with pytest.raises(ValueError, match=r"trial 3: 100 draws gave nothing new .* too small for --trials 4"):
        trials.take(sweep)


@pytest.mark.parametrize("late", [False, True])
def test_a_candidate_that_another_worker_has_written_down_is_left_to_it(tmp_path, algos, monkeypatch, late):
    """A worker on another machine, which no lock of ours stops, chose the same for its trial and has not stored it."""
    sweep = begin(tmp_path, "colours")
    _, settings = trials.sample(sweep, 1, 0, random=False)
    other = {"place": "elsewhere", "drawn": {"point": settings, "settings": settings}}
    sweep.study.add_trial(optuna.trial.create_trial(state=STATES.RUNNING, user_attrs=other))
    if late:  # it wrote that down after we had looked and before we wrote
        seen, others = [], trials.others
        monkeypatch.setattr(trials, "others", lambda *args: others(*args) if seen else seen.append(args) or [])
    held = trials.take(sweep)
    assert held.trial.number == 1 and held.trial.user_attrs["drawn"]["settings"] != settings
    assert sweep.study.trials[1].params == held.trial.user_attrs["drawn"]["point"]


def test_what_the_file_refuses_is_drawn_again_and_counts_as_no_trial(tmp_path, algos):
    sweep = begin(tmp_path, "half", count=3)  # 0, 0.5 and 1 are taken, 1.5 is not
    helds = [trials.take(sweep) for _ in range(3)]
    assert sorted(held.trial.user_attrs["drawn"]["settings"]["quality"] for held in helds) == [0.0, 0.5, 1.0]
    assert len(sweep.study.trials) == 3
    preset = json.loads((sweep.runs / "trial_000.json").read_text())
    assert preset["hidden"] == [1, 2] and preset["env"] == "E-v0" and preset["total_timesteps"] == 100


@pytest.mark.parametrize(
    ("algorithm", "env"),
    [
        ("ppo", "CartPole-v1"),
        ("ppo_continuous", "Hopper-v4"),
        ("a2c", "Hopper-v4"),
        ("dqn", "CartPole-v1"),
        ("sac", "Hopper-v4"),
    ],
)
def test_every_space_draws_what_its_algorithm_takes(algorithm, env):
    cls, space = launch.load_algorithm(ROOT / "algos" / f"{algorithm}.py").Args, getattr(spaces, algorithm)
    default = cls()
    for number in range(30):
        trial = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=number)).ask()
        settings = space(trial)
        args = cls(**checked_settings({"env": env, **settings}, cls, algorithm))
        args.check()  # no combination is refused
        assert any(getattr(args, name) != getattr(default, name) for name in settings)


# Whole sweeps


def test_a_sweep_runs_every_seed_of_every_trial_and_reports_the_best(tmp_path, algos, capsys, monkeypatch):
    monkeypatch.setattr(sweep_report, "ENOUGH", 5)
    words = fake.command(tmp_path, "quality", "--seeds", "4", "--workers", "3", "--pruner", "none")
    assert tool.main(words, algos) == 0
    made = sorted((trial, seed) for trial, seed, _, _ in fake.calls(tmp_path))
    assert made == [(f"trial_{n:03d}", str(seed)) for n in range(3) for seed in range(1, 5)]
    with open(tmp_path / "results/sweeps/s/trials.csv") as file:
        table = list(csv.DictReader(file))
    for row in table:
        # the return is 100 × quality + seed in every row and at the end; the middle two of four seeds: seeds 2 and 3
        quality = json.loads(row["quality"])
        assert float(row["score"]) == pytest.approx(100 * quality + 2.5, abs=1e-9)
        assert [float(x) for x in row["seeds"].split()] == pytest.approx([100 * quality + s for s in (1, 2, 3, 4)])
        assert [float(x) for x in row["seeds at 20"].split()] == pytest.approx(
            [100 * quality + s for s in (1, 2, 3, 4)]
        )
    best = max(table, key=lambda row: float(row["score"]))
    preset = fake.read(tmp_path, "best.json")
    assert preset["quality"] == json.loads(best["quality"]) and preset["env"] == "E-v0"
    report = (tmp_path / "results/sweeps/s/README.md").read_text()
    assert "That number is optimistic" in report and f"Best: trial {best['trial']}" in report
    assert "3 trials: 3 complete, 0 pruned, 0 failed" in report and "Not run yet" in report
    assert (tmp_path / "results/sweeps/s/history.png").read_bytes().startswith(b"\x89PNG")
    assert "[3/3] trial" in capsys.readouterr().out

    assert tool.main(words, algos) == 0  # nothing is left to do
    assert len(fake.calls(tmp_path)) == 12
    assert tool.main([*words, "--trials", "5"], algos) == 0  # two trials more, and now there are enough for importances
    assert len(fake.calls(tmp_path)) == 20
    assert "importance.png" in (tmp_path / "results/sweeps/s/README.md").read_text()


def test_hyperband_and_evaluations_as_scores(tmp_path, algos):
    words = ["--pruner", "hyperband", "--score", "eval", "--statistic", "min", "--seeds", "2", "--workers", "4"]
    assert tool.main(fake.command(tmp_path, "quality", *words, trials=6), algos) == 0
    plan = fake.read(tmp_path, "sweep.json")["plan"]
    assert plan["base"]["eval_every"] == 20 and plan["rungs"] == [20, 40, 60, 80]
    with open(tmp_path / "results/sweeps/s/trials.csv") as file:
        table = list(csv.DictReader(file))
    complete = [row for row in table if row["state"] == "complete"]
    assert complete and {row["state"] for row in table} <= {"complete", "pruned"}
    for row in complete:  # an evaluation is −(100 × quality + seed): the lowest is that of seed 2
        assert float(row["score"]) == pytest.approx(-100 * json.loads(row["quality"]) - 2, abs=1e-9)


class Running:
    """A process that never ends by itself."""

    returncode = None

    def poll(self):
        return self.returncode

    def send_signal(self, _):
        self.returncode = 130

    def wait(self, timeout=None):
        return self.returncode


@pytest.fixture
def never_ending(monkeypatch):
    def start(job, algos, launcher):
        job.process = Running()

    monkeypatch.setattr(trials, "start", start)


def held_with(sweep: trials.Sweep, logs: list[list[dict[str, float]]]) -> trials.Held:
    """A new trial whose seeds have these logs and go on."""
    held = trials.take(sweep)
    for job, log in zip(held.jobs, logs, strict=True):
        job.run_dir.mkdir(parents=True, exist_ok=True)
        (job.run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))
    return held


def test_pruning_is_decided_by_the_statistic_over_all_seeds_at_the_same_step(tmp_path, algos, never_ending, capsys):
    sweep = begin(tmp_path, "quality", "--statistic", "mean", count=10)
    for _ in range(5):  # as many as the median pruner waits for: five complete trials with 10 at step 20
        held = held_with(sweep, [rows((20, 1, 10.0))] * 3)
        assert not trials.advance(sweep, held)
        trials.end(sweep, held, 10.0, STATES.COMPLETE, "done")

    # one lucky seed far above the median, and the mean of all three below it: (25 + 1 + 1) / 3 = 9
    held = held_with(sweep, [rows((20, 1, 25.0)), rows((20, 1, 1.0)), rows((20, 1, 1.0))])
    assert trials.advance(sweep, held)
    trial = sweep.study.trials[5]
    assert (trial.state, trial.value, trial.intermediate_values) == (STATES.PRUNED, 9.0, {20: 9.0})
    assert trial.user_attrs["seeds at 20"] == [25.0, 1.0, 1.0]
    assert all(job.process is None for job in held.jobs)  # and its runs are stopped
    assert "pruned at step 20 with 9" in capsys.readouterr().out

    # one seed far below, the mean above: (1 + 16 + 16) / 3 = 11
    held = held_with(sweep, [rows((20, 1, 1.0)), rows((20, 1, 16.0)), rows((20, 1, 16.0))])
    assert not trials.advance(sweep, held)
    assert sweep.study.trials[6].intermediate_values == {20: 11.0}

    # nothing is decided before the last seed is there, however bad the others are
    held = held_with(sweep, [rows((20, 1, 0.0), (40, 1, 0.0)), rows((20, 1, 0.0)), rows((10, 1, 0.0))])
    assert not trials.advance(sweep, held)
    assert sweep.study.trials[7].intermediate_values == {}
    (held.jobs[2].run_dir / "metrics.jsonl").write_text(json.dumps(rows((21, 1, 0.0))[0]) + "\n")
    assert trials.advance(sweep, held) and sweep.study.trials[7].state == STATES.PRUNED


def test_a_trial_taken_over_is_pruned_where_its_worker_had_reported_and_not_yet_pruned(tmp_path, algos, never_ending):
    sweep = begin(tmp_path, "quality", count=10)
    for _ in range(5):
        held = held_with(sweep, [rows((20, 1, 10.0))] * 3)
        trials.advance(sweep, held)
        trials.end(sweep, held, 10.0, STATES.COMPLETE, "done")
    held = held_with(sweep, [rows((20, 1, 1.0))] * 3)
    held.trial.report(1.0, 20)
    os.close(held.lock)  # killed here
    again = trials.take(sweep)
    assert again.trial.number == 5 and trials.advance(sweep, again)
    assert sweep.study.trials[5].state == STATES.PRUNED


def test_runs_that_end_while_their_logs_are_read_leave_no_rung_out(tmp_path, algos, never_ending, monkeypatch):
    sweep = begin(tmp_path, "quality", count=1)
    log = rows(*((step, 1, float(step)) for step in range(10, 101, 10)))
    held, read_rows = held_with(sweep, [log[:6]] * 3), trials.read_rows

    def read_and_end(run_dir: Path) -> list[dict[str, float]]:
        seen = read_rows(run_dir)
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))
        (run_dir / "run.json").write_text(json.dumps({"algorithm": "fake", "args": {}, "provenance": {}}))
        summary = {"train_last100": {"mean": 100.0}, "final_eval": {"mean": 0.0}, "eval_curve": []}
        (run_dir / "summary.json").write_text(json.dumps(summary))
        return seen

    monkeypatch.setattr(trials, "read_rows", read_and_end)
    assert not trials.advance(sweep, held) and list(sweep.study.trials[0].intermediate_values) == [20, 40, 60]
    assert trials.advance(sweep, held)
    trial = sweep.study.trials[0]
    # the mean of the returns 10, 20, ... up to each rung; one episode in each row, never a hundred
    assert trial.intermediate_values == {20: 15.0, 40: 25.0, 60: 35.0, 80: 45.0} and trial.value == 100.0


def test_crashed_runs_are_tried_again_and_what_always_crashes_is_a_failed_trial(tmp_path, algos, capsys):
    assert tool.main(fake.command(tmp_path, "broken", "--seeds", "1", trials=2), algos) == 0
    made = [(trial, how) for trial, _, how, _ in fake.calls(tmp_path)]
    with open(tmp_path / "results/sweeps/s/trials.csv") as file:
        states = {json.loads(row["colour"]): (row["trial"], row["state"]) for row in csv.DictReader(file)}
    assert states["cracked"][1] == "complete" and states["broken"][1] == "fail"
    cracked, broken = (f"trial_00{states[colour][0]}" for colour in ("cracked", "broken"))
    assert [how for trial, how in made if trial == cracked] == ["start", "resume"]
    assert [how for trial, how in made if trial == broken] == ["start", "resume", "resume", "resume"]
    assert "seed 1: exit code 3 (RuntimeError: the sky fell)" in capsys.readouterr().out
    assert "2 trials: 1 complete, 0 pruned, 1 failed" in (tmp_path / "results/sweeps/s/README.md").read_text()


def test_a_mistake_that_the_run_tells_ends_the_sweep_with_it_and_costs_no_trial(tmp_path, algos, capsys):
    with pytest.raises(SystemExit) as stop:
        tool.main(fake.command(tmp_path, "quality", "--seeds", "1", env="Unknown-v0"), algos)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1
    assert "error: --env Unknown-v0: no such environment" in err and "the same command goes on" in err
    storage = optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend(str(tmp_path / "results/sweeps/s/journal.log"))
    )
    assert [trial.state for trial in optuna.load_study(study_name="s", storage=storage).trials] == [STATES.RUNNING]


def spawn(folder: Path, words: list[str], **environment: str) -> subprocess.Popen:
    """`python benchmarks/sweep.py` on the fake algorithm, as another shell would start it."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; import sweep, sweep_trials;"
    code += "sweep_trials.POLL_SECONDS = 0.05; sys.exit(sweep.main(sys.argv[3:], Path(sys.argv[2])))"
    command = [sys.executable, "-c", code, str(ROOT / "benchmarks"), str(folder / "algos"), *words]
    return subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": str(ROOT), **environment}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def until(condition, seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.05)


@pytest.mark.slow
def test_two_workers_one_killed_with_its_runs_and_one_alone_lose_and_double_nothing(tmp_path, algos):
    """Two shells on one storage; one is killed with SIGKILL, half of its runs too; the other takes its trials over."""
    words = fake.command(tmp_path, "quality", "--seeds", "2", "--workers", "2", "--pruner", "none", trials=8)
    gate = tmp_path / "gate"
    first, second = (spawn(tmp_path, words, FAKE_GATE=str(gate)) for _ in range(2))
    until(lambda: len(fake.calls(tmp_path)) == 8)  # four trials are under way, and wait
    os.kill(first.pid, signal.SIGKILL)
    victims = [call for call in fake.calls(tmp_path) if parent(int(call[3])) not in (first.pid, second.pid)]
    for call in victims[::2]:
        os.kill(int(call[3]), signal.SIGKILL)
    gate.touch()
    out, _ = second.communicate(timeout=300)
    first.communicate()
    assert second.returncode == 0, out
    assert "goes on where its worker left it" in out

    sweep = begin(tmp_path, "quality", "--seeds", "2", "--pruner", "none", count=8)
    found = sweep.study.trials
    assert [trial.state for trial in found] == [STATES.COMPLETE] * 8
    assert len({json.dumps(trial.user_attrs["drawn"]["settings"]) for trial in found}) == 8
    for trial in found:  # the numbers of an undisturbed sweep: 100 × quality + 1.5, the mean of seeds 1 and 2
        assert trial.value == pytest.approx(100 * trial.params["quality"] + 1.5, abs=1e-9)
    made = fake.calls(tmp_path)
    assert sorted((trial, seed) for trial, seed, how, _ in made if how == "start") == [
        (f"trial_{n:03d}", seed) for n in range(8) for seed in "12"
    ]  # none from the beginning twice
    assert {(call[0], call[1]) for call in made if call[2] == "resume"} == {(call[0], call[1]) for call in victims[::2]}


def parent(process: int) -> int:
    """The parent's id, 0 if the process is gone."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def test_a_trial_of_a_machine_with_other_folders_is_left_to_it_unless_it_is_to_be_taken_over(tmp_path, algos, capsys):
    words = ["--storage", f"sqlite:///{tmp_path / 'study.db'}", "--seeds", "1"]
    here = begin(tmp_path, "quality", *words, count=2)
    held = trials.take(here)
    (tmp_path / "there").mkdir()
    there = [*fake.command(tmp_path, "quality", *words, trials=2), "--runs-dir", str(tmp_path / "there"),
             "--results", str(tmp_path / "there")]  # fmt: skip
    os.close(held.lock)
    assert tool.main(there, algos) == 1
    assert "1 of 2 trials are with other workers" in capsys.readouterr().err
    assert [trial.state for trial in here.study.trials] == [STATES.RUNNING, STATES.COMPLETE]
    assert tool.main([*there, "--take-over"], algos) == 0
    assert [trial.state for trial in here.study.trials] == [STATES.COMPLETE] * 2


@pytest.mark.slow
def test_ctrl_c_stops_the_runs_and_the_same_command_goes_on(tmp_path, algos):
    words = fake.command(tmp_path, "quality", "--seeds", "2", "--workers", "2", trials=2)
    process = spawn(tmp_path, words, FAKE_GATE=str(tmp_path / "gate"))
    until(lambda: len(fake.calls(tmp_path)) == 4)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=180)
    assert process.returncode == 130 and out.endswith("interrupted; the same command goes on from here\n")
    assert not any(parent(int(call[3])) for call in fake.calls(tmp_path))
    assert tool.main(words, algos) == 0
    assert sorted(call[2] for call in fake.calls(tmp_path)) == ["resume"] * 4 + ["start"] * 4


# Ray


@pytest.fixture
def cluster():
    """A Ray cluster of this machine with two processors."""
    ray = pytest.importorskip("ray", reason="ray is not installed")
    for last in (
        False,
        False,
        False,
        True,
    ):  # it gives its processes 30 s to come up, which a busy machine may need more
        try:
            ray.init(address="local", num_cpus=2, log_to_driver=False, logging_level="ERROR")
            break
        except Exception:
            ray.shutdown()
            if last:
                raise
    yield ray
    ray.shutdown()


def kill_worker_of(run_dir: Path, killed: list[int]) -> None:
    """Kills, once the run has a checkpoint, its process and the Ray worker that began it."""
    until(lambda: list((run_dir / "checkpoints").glob("step_*")), 300)
    found = [
        int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if str(run_dir) in commandline(path)
    ]
    for process in found:
        worker = parent(process)
        for number in (worker, process):
            with suppress(ProcessLookupError):  # the run may end with its worker
                os.kill(number, signal.SIGKILL)
            killed.append(number)


def commandline(path: Path) -> str:
    try:
        return path.read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="processes are found in /proc")
def test_a_ray_worker_that_is_killed_is_replaced_and_its_run_goes_on_from_its_checkpoint(tmp_path, cluster, capsys):
    flags = ("--no-compile", "--checkpoint-every", "1024", "--log-every", "512", "--eval-episodes", "2")
    entry = runner.Entry("ppo", "CartPole-v1", (1, 2), 20_480, flags)

    def jobs(name: str) -> list[runner.Job]:
        return [runner.Job(entry, s, tmp_path / name / f"seed_{s}", tmp_path / name / f"out_{s}") for s in (1, 2)]

    killed: list[int] = []
    on_ray, here = jobs("ray"), jobs("here")
    thread = threading.Thread(target=kill_worker_of, args=(on_ray[0].run_dir, killed))
    thread.start()
    assert runner.run_jobs(on_ray, 2, launcher="ray") == 0
    thread.join()
    assert len(killed) == 2
    assert (
        "resumed" in on_ray[0].beside(".stderr").read_text()
        and "resumed" not in on_ray[1].beside(".stderr").read_text()
    )
    assert runner.run_jobs(here, 2) == 0
    for a, b in zip(on_ray, here, strict=True):  # nothing that the clock does not touch is different
        for file in ("curve.csv", "summary.json"):
            assert (a.published / file).read_bytes() == (b.published / file).read_bytes()


@pytest.mark.slow
def test_a_sweep_on_ray_is_the_same_sweep(tmp_path, algos, cluster):
    words = ["--seeds", "2", "--pruner", "none"]
    assert tool.main([*fake.command(tmp_path, "quality", *words), "--launcher", "ray", "--confirm", "2"], algos) == 0
    on_ray = (tmp_path / "results/sweeps/s/trials.csv").read_text()
    (tmp_path / "results").rename(tmp_path / "elsewhere")
    (tmp_path / "runs").rename(tmp_path / "away")
    assert tool.main(fake.command(tmp_path, "quality", *words), algos) == 0
    assert (tmp_path / "results/sweeps/s/trials.csv").read_text() == on_ray


def test_a_ray_task_asks_for_the_processors_and_devices_of_its_run():
    words = ["python", "ppo.py", "--threads", "1", "--threads", "4", "--device=cuda:1"]
    assert launch._last(words, "--threads", "1") == "4" and launch._last(words, "--device", "cpu") == "cuda:1"
    assert launch._last(words, "--seed", "7") == "7"


def test_results_and_checkpoints_of_a_cluster_lie_in_the_folder_that_all_machines_see(tmp_path):
    assert launch.places(tmp_path, None, "ray") == (tmp_path, tmp_path / "runs")
    assert launch.places(tmp_path, None, "local") == (tmp_path, ROOT / "runs")
    assert launch.places(None, tmp_path, "ray") == (ROOT / "results", tmp_path)


# Fresh seeds


def test_the_best_is_compared_with_the_defaults_on_seeds_that_the_sweep_has_not_seen(tmp_path, algos, capsys):
    words = fake.command(tmp_path, "quality", "--seeds", "2", "--confirm", "3", trials=3)
    assert tool.main(words, algos) == 0
    result = fake.read(tmp_path, "confirm.json")
    quality = fake.read(tmp_path, "best.json")["quality"]
    assert result["seeds"] == [1001, 1002, 1003]
    assert result["defaults"] == [1051.0, 1052.0, 1053.0]  # 100 × 0.5 + seed
    assert result["best"] == pytest.approx([100 * quality + seed for seed in (1001, 1002, 1003)])
    assert result["difference"] == pytest.approx(100 * quality - 50)
    out = capsys.readouterr().out
    assert f"Trial {result['trial']} against the defaults on the fresh seeds 1001 to 1003" in out
    assert "against the defaults on the fresh seeds" in (tmp_path / "results/sweeps/s/README.md").read_text()
    assert tool.main(words, algos) == 0 and len(fake.calls(tmp_path)) == 3 * 2 + 2 * 3  # and nothing is run twice


def test_the_comparison_by_hand():
    # difference of the means: 5 − 3; pairs of which the first is higher, of nine: 4>2, 5>2, 6>2, 4>3, 5>3, 6>3, 5>4 and
    # 6>4, and a half for 4=4: 8.5 / 9. Redrawn means lie in [4, 6] and [2, 4], and their differences about 2.
    result = sweep_report.compare([4.0, 5.0, 6.0], [2.0, 3.0, 4.0])
    assert result["difference"] == pytest.approx(2.0) and result["probability"] == pytest.approx(8.5 / 9)
    low, high = result["difference_interval"]
    assert 0 <= low < 1 and 3 < high <= 4 and np.isclose(low + high, 4, atol=0.35)
    same = sweep_report.compare([1.0, 2.0], [1.0, 2.0])
    told = sweep_report.verdict({"trial": 0, "seeds": [1, 2], "best": [1.0, 2.0], "defaults": [1.0, 2.0], **same})
    assert told.endswith("no difference is shown.")
    worse = sweep_report.compare([1.0, 1.0], [2.0, 2.0])
    told = sweep_report.verdict({"trial": 0, "seeds": [1, 2], "best": [1.0, 1.0], "defaults": [2.0, 2.0], **worse})
    assert told.endswith("the defaults are better.")


# Bad input


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--algorithm", "fak"], "algos/fak.py does not exist; the nearest is fake"),
        (["--space", "qualty"], "benchmarks/spaces.py has no space qualty; the nearest is"),
        (["--space", "{tmp}/space.py:qualty"], "space.py has no space qualty; the nearest is quality"),
        (["--space", "{tmp}/nowhere.py:a"], "nowhere.py does not exist"),
        (["--space", "{tmp}/space.py:misspelt"], "there is no setting qualty; the nearest is quality"),
        (["--space", "{tmp}/space.py:refused"], "none of 20 draws can be run; the first: --quality"),
        (["--", "--qualty", "1"], "algos/fake.py has no flag --qualty; the nearest is --quality"),
        (["--", "--quality", "0.5"], "draws quality, which is fixed for all trials"),
        (["--", "--num-envs", "no"], "--num-envs"),
        (["--no-compile"], "--no-compile is no flag of sweep.py; flags of the runs stand behind --"),
        (["--trials", "0"], "--trials 0: must be at least 1"),
        (["--trials", "many"], "many"),
        (["--steps", "0"], "--total-timesteps 0: must be at least 1"),
        (["--seeds", "2000"], "--seeds 2000: must be below 1001"),
        (["--name", "../s"], "--name ../s: letters, digits"),
        (
            ["--storage", "sqlite:////nowhere/at/all.db"],
            "--storage sqlite:////nowhere/at/all.db: cannot be used (unable",
        ),
        (["--storage", "postgresql://localhost/x"], "the package that speaks with this database is not installed"),
        (["--storage", "/proc/nowhere/journal.log"], "--storage /proc/nowhere/journal.log: cannot be written"),
        (["--storage", "{tmp}/space.py"], "space.py: damaged"),
        (["--results", "/proc/nowhere"], "nowhere"),
    ],
)
def test_bad_command_lines_are_one_line_and_exit_code_2(tmp_path, algos, capsys, words, told):
    words = [word.format(tmp=tmp_path) for word in words]
    with pytest.raises(SystemExit) as stop:
        tool.main(fake.command(tmp_path, "quality", *words), algos)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and told in err and err.count("\n") == 1, err


def test_a_locked_database_is_told_in_one_line(tmp_path, algos, capsys):
    path = tmp_path / "study.db"
    optuna.storages.RDBStorage(f"sqlite:///{path}")
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    with pytest.raises(SystemExit) as stop:
        tool.main(fake.command(tmp_path, "quality", "--storage", f"sqlite:///{path}?timeout=0.1"), algos)
    holder.close()
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1 and "(database is locked); wait for who holds it" in err


@pytest.mark.parametrize(
    ("words", "told"),
    [(["--seeds", "3"], "begun with seeds 1, not 3"), (["--seed", "1"], "seed 0, not 1"),
     (["--statistic", "min"], "statistic iqm, not min"), (["--", "--num-envs", "4"], "base")],
)  # fmt: skip
def test_another_plan_is_refused_for_the_same_name(tmp_path, algos, capsys, words, told):
    begin(tmp_path, "quality", "--seeds", "1")
    with pytest.raises(SystemExit) as stop:
        tool.main(fake.command(tmp_path, "quality", "--seeds", "1", *words), algos)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and told in err and err.count("\n") == 1


def test_runs_of_an_earlier_sweep_of_the_name_are_never_taken_for_those_of_a_new_one(tmp_path, algos):
    begin(tmp_path)
    (tmp_path / "results/sweeps/s/journal.log").unlink()
    with pytest.raises(ValueError, match="runs/sweeps/s: belongs to another sweep of the name s; move it away"):
        begin(tmp_path)


def test_what_is_not_installed_is_named_with_its_extra(tmp_path, algos, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    for words in (["--launcher", "ray"],):
        with pytest.raises(SystemExit):
            tool.main(fake.command(tmp_path, "quality", *words), algos)
        assert "pip install -c constraints.txt -e '.[ray]'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        runner.main(["--suite", "first_light", "--launcher", "ray", "--runs-dir", str(tmp_path / "runs")])
    assert "--launcher ray: ray is not installed" in capsys.readouterr().err
    monkeypatch.setattr(tool, "optuna", None)
    with pytest.raises(SystemExit):
        tool.main(fake.command(tmp_path, "quality"), algos)
    assert capsys.readouterr().err.endswith("pip install -c constraints.txt -e '.[sweep]'\n")


def test_an_unknown_flag_or_algorithm_in_a_suite_is_named_with_the_nearest(tmp_path):
    places = tmp_path / "runs", tmp_path / "results"
    with pytest.raises(
        ValueError, match="--suite s: ppo: algos/ppo.py has no flag --num-env; the nearest is --num-envs"
    ):
        runner.make_jobs("s", [runner.Entry("ppo", "E-v1", (1,), 10, ("--num-env", "2"))], *places)
    with pytest.raises(ValueError, match="algos/pppo.py does not exist; the nearest is ppo"):
        runner.make_jobs("s", [runner.Entry("pppo", "E-v1", (1,), 10)], *places)
    jobs = runner.make_jobs("s", [runner.Entry("ppo", "E-v1", (1,), 10, ("--no-compile", "--ent-coef=0"))], *places)
    assert len(jobs) == 1
