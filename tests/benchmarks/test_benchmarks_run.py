"""The runner: what it starts, resumes, skips, refuses and cleans up, shown on a fake algorithm of a few lines."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import run as runner
from suites import SUITES, Entry

from cleanrl_zoo import zoo
from cleanrl_zoo.nn.mlp import mlp

FAKE = """
import json, os, sys, time
from pathlib import Path

words = sys.argv[1:]
flag = lambda name: words[words.index("--" + name) + 1] if "--" + name in words else None
resume = flag("resume")
folder = Path(resume or flag("run-dir"))
if resume:
    args = json.loads((folder / "run.json").read_text())["args"]
else:
    folder.mkdir(parents=True)
    args = {"env": flag("env"), "seed": int(flag("seed")), "total_timesteps": int(flag("total-timesteps"))}
    (folder / "run.json").write_text(json.dumps({"algorithm": "fake", "args": args, "provenance": {}}))
with open(folder.parent / "calls.txt", "a") as file:
    threads = flag("threads"), flag("env-threads"), os.environ["OMP_NUM_THREADS"]
    print(args["seed"], "resume" if resume else "start", *(() if resume else threads), file=file)
if args["env"] == "Broken-v0":
    print("Traceback\\nRuntimeError: the sky fell", file=sys.stderr)
    sys.exit(3)
if args["env"] == "Slow-v0" and not resume:
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        (folder / "stopped").touch()
        sys.exit(130)
(folder / "metrics.jsonl").write_text('{"global_step": 10, "charts/episodes": 1.0, "charts/episodic_return": 4.0}\\n')
summary = {"train_last100": {"mean": 4.0}, "final_eval": {"mean": 5.0}, "eval_curve": [[10, 5.0]], "wall_clock_s": 1.0}
(folder / "summary.json").write_text(json.dumps(summary))
"""


@pytest.fixture
def algos(tmp_path: Path) -> Path:
    (tmp_path / "algos").mkdir()
    (tmp_path / "algos" / "fake.py").write_text(FAKE)
    return tmp_path / "algos"


def make_jobs(
    tmp_path: Path, env: str = "Fine-v0", seeds: tuple[int, ...] = (1, 2, 3), steps: int = 10
) -> list[runner.Job]:
    entry = Entry("fake", env, seeds, steps)
    base = Path("suite") / "fake" / env
    places = {seed: base / f"seed_{seed}" for seed in seeds}
    return [
        runner.Job(entry, seed, tmp_path / "runs" / place, tmp_path / "results" / place)
        for seed, place in places.items()
    ]


def calls(jobs: list[runner.Job]) -> list[str]:
    path = jobs[0].run_dir.parent / "calls.txt"
    return sorted(path.read_text().splitlines()) if path.exists() else []


def test_missing_runs_are_started_with_one_thread_each_and_published(tmp_path, algos, capsys):
    jobs = make_jobs(tmp_path)
    assert runner.run_jobs(jobs, 2, algos) == 0
    assert calls(jobs) == ["1 start 1 1 1", "2 start 1 1 1", "3 start 1 1 1"]
    for job in jobs:
        assert sorted(path.name for path in job.published.iterdir()) == ["curve.csv", "run.json", "summary.json"]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and lines[-1].startswith("[3/3] fake Fine-v0 seed")
    assert lines[0].endswith("last episodes 4.0, evaluation 5.0, 1 s")


def test_published_runs_are_left_finished_ones_published_and_cut_ones_resumed(tmp_path, algos, capsys):
    jobs = make_jobs(tmp_path)
    assert runner.run_jobs(jobs[:2], 2, algos) == 0
    for path in jobs[1].published.iterdir():  # finished on this machine, not published
        path.unlink()
    args = {"env": "Fine-v0", "seed": 3, "total_timesteps": 10}
    jobs[2].run_dir.mkdir()
    (jobs[2].run_dir / "run.json").write_text(
        json.dumps({"algorithm": "fake", "args": args, "provenance": {}})
    )  # cut: no summary.json
    assert runner.run_jobs(make_jobs(tmp_path), 2, algos) == 0
    assert calls(jobs) == ["1 start 1 1 1", "2 start 1 1 1", "3 resume"]
    assert "seed 1: last episodes 4.0, evaluation 5.0, 1 s (was there)" in capsys.readouterr().out
    assert all(job.is_published for job in jobs)


def test_a_clone_with_results_and_no_runs_starts_nothing(tmp_path, algos):
    assert runner.run_jobs(make_jobs(tmp_path), 2, algos) == 0
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    jobs = make_jobs(tmp_path)
    assert runner.run_jobs(jobs, 2, algos) == 0
    assert calls(jobs) == []


def test_a_folder_without_anything_to_resume_is_started_afresh(tmp_path, algos):
    jobs = make_jobs(tmp_path, seeds=(1,))
    jobs[0].run_dir.mkdir(parents=True)
    (jobs[0].run_dir / ".lock").touch()
    assert runner.run_jobs(jobs, 1, algos) == 0
    assert calls(jobs) == ["1 start 1 1 1"]


def test_failures_are_listed_with_the_end_of_their_errors_and_the_others_go_on(tmp_path, algos, capsys):
    jobs = [*make_jobs(tmp_path, "Broken-v0", (1,)), *make_jobs(tmp_path, "Fine-v0", (1, 2))]
    assert runner.run_jobs(jobs, 1, algos) == 1
    out, err = capsys.readouterr()
    assert "FAILED fake Broken-v0 seed 1: exit code 3" in out and "[2/2]" not in out and "[2/3]" in out
    assert "RuntimeError: the sky fell" in err and "2 of 3 published, 1 failed" in err


@pytest.mark.parametrize("finished", [True, False])
def test_runs_made_for_another_suite_are_neither_published_nor_resumed(tmp_path, algos, capsys, finished):
    made = make_jobs(tmp_path, seeds=(1,), steps=10)[0]
    made.run_dir.mkdir(parents=True)
    args = {"env": "Fine-v0", "seed": 1, "total_timesteps": 10}
    (made.run_dir / "run.json").write_text(json.dumps({"algorithm": "fake", "args": args, "provenance": {}}))
    if finished:
        (made.run_dir / "summary.json").write_text("{}")
    jobs = make_jobs(tmp_path, seeds=(1,), steps=20)
    assert runner.run_jobs(jobs, 1, algos) == 1
    assert "total_timesteps 10, the suite asks for 20" in capsys.readouterr().err
    assert calls(jobs) == [] and not jobs[0].published.exists()


def test_a_damaged_summary_is_a_failure_that_names_the_file(tmp_path, algos, capsys):
    jobs = make_jobs(tmp_path, seeds=(1, 2))
    assert runner.run_jobs(jobs, 1, algos) == 0
    (jobs[0].published / "summary.json").write_text('{"train')
    assert runner.run_jobs(make_jobs(tmp_path, seeds=(1, 2)), 1, algos) == 1
    assert f"{jobs[0].published / 'summary.json'}: damaged" in capsys.readouterr().err


def test_a_run_in_other_hands_is_not_started_twice(tmp_path, algos, capsys):
    jobs = make_jobs(tmp_path, seeds=(1, 2))
    jobs[0].run_dir.parent.mkdir(parents=True)
    with open(jobs[0].beside(".lock"), "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert runner.run_jobs(jobs, 1, algos) == 1
    out, err = capsys.readouterr()
    assert "fake Fine-v0 seed 1: in the hands of another runner" in out and "1 with another runner" in err
    assert calls(jobs) == ["2 start 1 1 1"]


def test_the_lock_outlives_a_killed_runner_as_long_as_its_run(tmp_path, algos):
    job, again = make_jobs(tmp_path, "Slow-v0", (1,))[0], make_jobs(tmp_path, "Slow-v0", (1,))[0]
    assert runner.claim(job)
    runner.start(job, algos)
    os.close(job.lock)  # what the system does when the runner is killed
    try:
        assert not runner.claim(again)
    finally:
        job.process.kill()
        job.process.wait()
    assert runner.claim(again)
    os.close(again.lock)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_stops_the_runs_cleanly_and_the_same_command_goes_on(tmp_path, algos, sent):
    code = (
        "import sys; sys.path[:0] = sys.argv[1:3]; from pathlib import Path;"
        "import run, test_benchmarks_run as t;"
        "run.listen();"
        "sys.exit(run.run_jobs(t.make_jobs(Path(sys.argv[3]), 'Slow-v0', (1, 2)), 2, Path(sys.argv[4])))"
    )
    command = [sys.executable, "-c", code, Path(runner.__file__).parent, Path(__file__).parent, tmp_path, algos]
    command = [str(word) for word in command]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell's `&` starts it; the new process inherits this
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    signal.signal(signal.SIGINT, before)
    jobs = make_jobs(tmp_path, "Slow-v0", (1, 2))
    deadline = time.monotonic() + 30
    while len(calls(jobs)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.2)
    process.send_signal(sent)
    assert process.wait(30) == 130
    assert "interrupted: stopping 2 run(s)" in process.stderr.read()
    process.stderr.close()
    assert all((job.run_dir / "stopped").exists() for job in jobs)
    assert runner.run_jobs(jobs, 2, algos) == 0
    assert calls(jobs)[-1] == "2 start 1 1 1" and "1 resume" in calls(jobs) and "2 resume" in calls(jobs)


def test_a_peers_run_begins_again_where_it_was_cut(tmp_path, algos, monkeypatch):
    monkeypatch.setattr(runner, "BENCHMARKS", algos)
    (algos / "peers_sb3.py").write_text(FAKE)
    entry = Entry("peers_sb3", "Fine-v0", (1,), 10, ("--algo", "sac"))
    job = runner.Job(entry, 1, tmp_path / "runs" / "seed_1", tmp_path / "results" / "seed_1")
    job.run_dir.mkdir(parents=True)
    args = {"env": "Fine-v0", "seed": 1, "total_timesteps": 10, "algo": "sac"}
    (job.run_dir / "run.json").write_text(json.dumps({"algorithm": "fake", "args": args, "provenance": {}}))
    (job.run_dir / "left").touch()
    assert runner.run_jobs([job], 1, tmp_path / "nowhere") == 1  # the fake does not note --algo
    assert calls([job]) == ["1 start 1 None 1"] and not (job.run_dir / "left").exists()


def test_a_run_that_two_entries_share_is_made_once_and_where_it_lives(tmp_path, monkeypatch):
    entries = (
        Entry("ppo", "E-v1", (1, 2), 10, longer="long"),
        Entry("ppo", "E-v1", (1,), 30, label="long"),
        Entry("ppo", "F-v1", (1,), 10, results="lender"),
    )
    monkeypatch.setitem(SUITES, "s", entries)
    jobs = runner.make_jobs("s", list(entries), tmp_path / "runs", tmp_path / "results")
    assert [(job.entry.steps, job.seed, str(job.run_dir.relative_to(tmp_path / "runs"))) for job in jobs] == [
        (30, 1, "s/long/E-v1/seed_1"),
        (10, 2, "s/ppo/E-v1/seed_2"),
        (10, 1, "lender/ppo/F-v1/seed_1"),
    ]
    assert [job.published for job in jobs] == [
        tmp_path / "results" / job.run_dir.relative_to(tmp_path / "runs") for job in jobs
    ]


def test_only_what_is_named_is_run(monkeypatch):
    entries = tuple(Entry(name, env, (1,), 10) for name in ("a", "b") for env in ("E-v1", "F-v1"))
    monkeypatch.setitem(SUITES, "s", entries)
    assert runner.chosen("s", []) == list(entries)
    assert runner.chosen("s", ["a", "F-v1"]) == [entries[0], entries[1], entries[3]]
    assert runner.chosen("s", ["b/E-v1"]) == [entries[2]]
    with pytest.raises(ValueError, match="--only c: the suite s has a, b, E-v1, F-v1"):
        runner.chosen("s", ["a", "c"])


def test_zoo_puts_the_best_policy_of_each_entry_into_results(tmp_path, monkeypatch, capsys):
    spec = {"builder": "mlp", "sizes": [4, 2], "activation": "tanh", "distribution": "categorical"}
    monkeypatch.setitem(SUITES, "first_light", (Entry("ppo_continuous", "CartPole-v1", (1, 2, 3), 10),))
    for seed, score in ((1, 3.0), (2, 8.0)):  # seed 3 is not finished
        folder = tmp_path / "runs" / "first_light" / "ppo_continuous" / "CartPole-v1" / f"seed_{seed}"
        card = {"env": "CartPole-v1", "policy": spec, "seed": seed}
        zoo.save(folder / "policy", policy=zoo.Policy(spec, mlp([4, 2])), card=card)
        summary = {"train_last100": {}, "final_eval": {"mean": score}, "eval_curve": []}
        (folder / "summary.json").write_text(json.dumps(summary))
    words = [
        "--suite",
        "first_light",
        "--zoo",
        "--runs-dir",
        str(tmp_path / "runs"),
        "--results",
        str(tmp_path / "results"),
    ]
    assert runner.main(words) == 0
    card = zoo.load(tmp_path / "results" / "zoo" / "ppo_continuous" / "CartPole-v1").card
    assert (card["seed"], card["chosen"]) == (2, "best final evaluation of 2 runs")
    assert "seed_2" in capsys.readouterr().out


def test_a_planner_has_no_policy_for_the_zoo_and_is_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(SUITES, "first_light", (Entry("pets", "Pendulum-v1", (1,), 10),))
    folder = tmp_path / "runs" / "first_light" / "pets" / "Pendulum-v1" / "seed_1"
    (folder / "model").mkdir(parents=True)
    for name in ("summary.json", "run.json", "model/model.json"):
        (folder / name).write_text("{}")
    places = ["--runs-dir", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    assert runner.main(["--suite", "first_light", "--zoo", *places]) == 0
    assert "pets Pendulum-v1: plans with its model" in capsys.readouterr().out
    assert not (tmp_path / "results" / "zoo").exists()
    with pytest.raises(ValueError, match="a planner's run, which has a model and no policy"):
        zoo.find(str(folder))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--suite", "nope"], "has first_light"),
        (["--suite", "first_light", "--jobs", "0"], "--jobs 0"),
        (["--suite", "first_light", "--jobs", "two"], "two"),
        (
            ["--suite", "first_light", "--only", "sac"],
            "--only sac: the suite first_light has ppo_continuous, Hopper-v4",
        ),
        (["--suite", "first_light", "--runs-dir", "/proc/nowhere"], "nowhere"),
        ([], "--suite"),
    ],
)
def test_bad_command_lines_are_one_line_and_exit_code_2(capsys, words, told):
    with pytest.raises(SystemExit) as stop:
        runner.main(words)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and told in err and err.count("\n") == 1
