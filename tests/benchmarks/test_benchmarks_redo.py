"""One published run again: equal, within or outside the published seeds, and what has changed, on a fake algorithm."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import redo
import run as runner
from records import ROOT, publish

# Earns `seed` + the number in the file `shift` beside it; says "of another version" where the file `changed` is there.
FAKE = """
import json, sys
from pathlib import Path

here, words = Path(__file__).parent, sys.argv[1:]
flag = lambda name: words[words.index("--" + name) + 1] if "--" + name in words else None
folder = Path(flag("resume") or flag("run-dir"))
with open(here / "calls.txt", "a") as file:
    print(*(word for word in words if str(here.parent) not in word), file=file)
if flag("resume"):
    if (here / "changed").exists():
        sys.exit("error: run.json was edited or is of another version (depth)")
    run = json.loads((folder / "run.json").read_text())
else:
    folder.mkdir(parents=True)
    args = {"env": flag("env"), "seed": int(flag("seed")), "total_timesteps": int(flag("total-timesteps")), "rate": 9}
    run = {"algorithm": "fake", "args": args, "provenance": {}}
    (folder / "run.json").write_text(json.dumps(run))
if (here / "broken").exists():
    sys.exit("error: no such environment")
score = run["args"]["seed"] + float((here / "shift").read_text())
row = {"global_step": 10, "charts/episodes": 1.0, "charts/episodic_return": score, "losses/new": 1.0}
(folder / "metrics.jsonl").write_text(json.dumps(row) + "\\n")
returns = {"mean": score, "returns": [score]}
summary = {"train_last100": returns, "final_eval": returns, "eval_curve": [[10, score]], "wall_clock_s": 1.0}
(folder / "summary.json").write_text(json.dumps(summary))
"""
NOW = {"versions": {"gymnasium": "x"}, "env": {"versions": {"gymnasium": "x"}}}


@pytest.fixture
def published(tmp_path) -> Path:
    """Seeds 1 to 3 of the fake, published by this code on this machine: they earned 1, 2 and 3."""
    algos = tmp_path / "algos"
    algos.mkdir()
    (algos / "fake.py").write_text(FAKE)
    (algos / "shift").write_text("0")
    folder = tmp_path / "results" / "suite" / "fake" / "E-v1"
    for seed in (1, 2, 3):
        words = ["--run-dir", tmp_path / "made" / str(seed), "--env", "E-v1", "--seed", seed, "--total-timesteps", 10]
        command = [sys.executable, algos / "fake.py", *words]
        subprocess.run([str(word) for word in command], check=True)
        run_json = tmp_path / "made" / str(seed) / "run.json"
        run = json.loads(run_json.read_text())
        run["provenance"] = {**redo.here(NOW), "env": {"versions": {}}}
        run["command"] = ["python", "algos/fake.py", *map(str, words), "--rate", "9"]
        run_json.write_text(json.dumps(run))
        publish(tmp_path / "made" / str(seed), folder / f"seed_{seed}")
    (algos / "calls.txt").unlink()
    return folder


def again(published: Path, tmp_path: Path, seed: int = 1, shift: float = 0.0) -> int:
    (tmp_path / "algos" / "shift").write_text(str(shift))
    return redo.redo(published / f"seed_{seed}", tmp_path / "runs", tmp_path / "algos")


def calls(tmp_path: Path) -> list[str]:
    return (tmp_path / "algos" / "calls.txt").read_text().splitlines()


def edit_run(folder: Path, **changes) -> None:
    run = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**run, **changes}))


def test_an_equal_run_is_told_and_made_with_the_stored_flags(published, tmp_path, capsys):
    before = {path: path.read_bytes() for path in published.rglob("*") if path.is_file()}
    assert again(published, tmp_path, 2) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("seed_2: bit-equal, 1 points of the curve and all returns")
    assert second == "same commit, versions, machine and flags as then"
    assert calls(tmp_path) == ["--resume"]  # of a folder that holds the stored flags and no checkpoint
    assert before == {path: path.read_bytes() for path in published.rglob("*") if path.is_file()}


def test_a_run_within_the_published_seeds_passes_and_changes_are_listed(published, tmp_path, capsys):
    run = json.loads((published / "seed_1" / "run.json").read_text())
    run["provenance"] |= {"commit": "0123456789abcdef", "dirty": True}
    run["provenance"]["versions"] |= {"torch": "1.0"}
    edit_run(published / "seed_1", provenance=run["provenance"])
    assert again(published, tmp_path, 1, shift=0.5) == 0
    first, second = capsys.readouterr().out.splitlines()
    # published 1, 2, 3: mean 2, s 1, t of 2 degrees of freedom 4.303: 2 ± 4.303 · √(4/3) = 2 ± 4.9687
    assert "not bit-equal (at step 10 train_return was 1.0, is 1.5), within the published seeds" in first
    assert "last episodes 1.5 (interval -2.9687 to 6.9687), evaluation 1.5" in first
    assert second.startswith("differs from then: commit 0123456789ab (modified) → ") and "torch 1.0 → " in second


def test_a_run_outside_them_fails(published, tmp_path, capsys):
    assert again(published, tmp_path, 1, shift=6.0) == 1
    assert "outside the published seeds: last episodes 7 (interval -2.9687 to 6.9687)" in capsys.readouterr().out
    for seed in (2, 3):
        shutil.rmtree(published / f"seed_{seed}")
    assert again(published, tmp_path, 1, shift=0.5) == 1
    assert "there is only one, which gives no interval" in capsys.readouterr().out
    assert again(published, tmp_path, 1) == 0  # equality needs no interval


def test_where_the_files_flags_have_changed_the_stored_command_line_is_used(published, tmp_path, capsys):
    (tmp_path / "algos" / "changed").touch()
    args = {"env": "E-v1", "seed": 3, "total_timesteps": 10, "depth": 4, "rate": 9}
    edit_run(published / "seed_3", args=args)
    assert again(published, tmp_path, 3) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert "bit-equal" in first and second == "differs from then: flag depth 4 → absent"
    words = "--run-dir --threads 1 --env-threads 1 --env E-v1 --total-timesteps 10 --seed 3 --rate 9"
    assert calls(tmp_path) == ["--resume", words]


def test_a_stored_command_line_keeps_its_threads():
    words = "--run-dir r --threads 1 --env-threads 1 --env E-v1 --seed 3 --preset p --threads 2".split()
    assert redo.own_flags(["python", "fake.py", *words])[-4:] == ("--preset", "p", "--threads", "2")


def test_a_finished_call_begins_anew_and_a_cut_one_goes_on(published, tmp_path):
    assert again(published, tmp_path, 1) == 0
    run_dir = tmp_path / "runs" / "redo" / "suite" / "fake" / "E-v1" / "seed_1"
    (run_dir / "checkpoint").touch()
    assert again(published, tmp_path, 1) == 0 and not (run_dir / "checkpoint").exists()
    (run_dir / "summary.json").unlink()  # cut
    (run_dir / "checkpoint").touch()
    assert again(published, tmp_path, 1) == 0 and (run_dir / "checkpoint").exists()
    (run_dir / "summary.json").unlink()
    note = run_dir.with_name("seed_1.json")
    note.write_text(note.read_text().replace("E-v1", "F-v1"))  # cut, of another run
    assert again(published, tmp_path, 1) == 0 and not (run_dir / "checkpoint").exists()


def test_a_run_that_fails_is_one_line_and_exit_code_1(published, tmp_path, capsys):
    (tmp_path / "algos" / "broken").touch()
    assert again(published, tmp_path, 1) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines()[-1].endswith("could not be run again: exit code 1 error: no such environment")
    (tmp_path / "algos" / "fake.py").unlink()
    assert again(published, tmp_path, 1) == 1
    assert "algos/fake.py does not exist any more" in capsys.readouterr().err


def test_a_peers_run_is_asked_for_by_all_its_flags(tmp_path):
    args = {"algo": "ppo", "env": "E-v1", "total_timesteps": 500, "num_envs": 8, "settings": '{"n_steps": 32}',
            "normalize": True, "threads": 1, "seed": 2, "eval_every": 0, "spare": None, "off": False}  # fmt: skip
    job = redo.make_job({"algorithm": "peers_sb3", "args": args}, tmp_path / "a", tmp_path / "b")
    assert (job.entry.env, job.entry.steps, job.seed) == ("E-v1", 500, 2)
    words = ("--algo", "ppo", "--num-envs", "8", "--settings", '{"n_steps": 32}', "--normalize", "--eval-every", "0")
    assert job.entry.flags == words


def test_a_language_models_run_is_known_by_its_task(tmp_path):
    args = {"task": "addition", "total_tokens": 900, "seed": 4, "model": "results/zoo/addition_sft"}
    job = redo.make_job({"algorithm": "grpo", "args": args}, tmp_path / "a", tmp_path / "b")
    assert job.entry.asked == {"task": "addition", "total-tokens": "900"} and job.entry.flags == ()


@pytest.mark.parametrize(
    ("folder", "told"),
    [
        ("results/dqn/dqn/CartPole-v1/seed_11", "the nearest is results/dqn/dqn/CartPole-v1/seed_1"),
        ("results/tabular/cliff.json", "python benchmarks/tabular.py --only <figure>"),
        ("results/zoo", "no published run, which is a folder results/<suite>/<name>/<env>/seed_<k>"),
    ],
)
def test_what_is_no_run_is_one_line_and_exit_code_2(capsys, folder, told):
    with pytest.raises(SystemExit) as stop:
        runner.main(["--redo", str(ROOT / folder)])
    err = capsys.readouterr().err
    assert stop.value.code == 2 and told in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("run.json", '{"algorithm"', "run.json: damaged"),
        (
            "run.json",
            '{"algorithm": "fake", "args": {"seed": 1}, "provenance": {}}',
            "its flags lack env, total_timesteps",
        ),
        ("summary.json", "{}", "summary.json: damaged (it lacks train_last100"),
    ],
)
def test_a_damaged_file_is_named(published, tmp_path, name, content, told):
    (published / "seed_1" / name).write_text(content)
    with pytest.raises(ValueError) as error:
        again(published, tmp_path, 1)
    assert told in str(error.value) and "\n" not in str(error.value)


@pytest.mark.slow
def test_a_real_run_is_bit_equal_when_it_is_run_again(tmp_path, capsys):
    words = ["--preset", "debug", "--seed", "3", "--run-dir", str(tmp_path / "run")]
    subprocess.run([sys.executable, ROOT / "algos" / "ppo.py", *words], check=True, capture_output=True)
    folder = tmp_path / "results" / "suite" / "ppo" / "CartPole-v1" / "seed_3"
    publish(tmp_path / "run", folder)
    assert runner.main(["--redo", str(folder), "--runs-dir", str(tmp_path / "runs")]) == 0
    assert "seed_3: bit-equal, " in capsys.readouterr().out
