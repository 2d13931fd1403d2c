"""What every file in algos/ promises alike: its command line, its seed, and a run that survives being killed."""

import json
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from algo_helpers import ROOT, assert_same_run, command, environment, load_algorithm, rows_without_clock, run_file
from language_helpers import LANGUAGE_FILES
from language_helpers import assert_same_run as assert_same_language_run

from cleanrl_zoo import zoo
from cleanrl_zoo.llm import load_language_model
from cleanrl_zoo.run import parse_args

DEBUG = ("--preset", "debug")
FILES = sorted(path.stem for path in (ROOT / "algos").glob("*.py"))
each_file = pytest.mark.parametrize("name", FILES)
CONTROL_FILES = [name for name in FILES if name not in LANGUAGE_FILES]
control_file = pytest.mark.parametrize("name", CONTROL_FILES)
language_file = pytest.mark.parametrize("name", LANGUAGE_FILES)
PLANNERS = ("pets",)  # which have no policy to save
WORLD_MODELS = ("mbpo", "pets")  # which save their model of the world


# The command line


@each_file
def test_help_explains_every_flag(in_tmp, name):
    done = run_file(name, "--help", cwd=in_tmp)
    assert done.returncode == 0 and done.stderr == ""
    own = ("--env", "--total-timesteps", "--num-envs", "--vec")
    if name in LANGUAGE_FILES:
        own = ("--model", "--task", "--prompts", "--total-tokens", "--micro-batch", "--lora-rank", "--show-samples")
    for flag in (*own, "--seed", "--run-dir", "--resume", "--preset"):
        assert flag in done.stdout
    assert list(in_tmp.iterdir()) == []


@each_file
def test_debug_preset_is_quick_and_complete(in_tmp, name):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run_file(name, *DEBUG, cwd=in_tmp)
    assert done.returncode == 0, done.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # processor time, since tests run on busy machines; below 5 seconds (10 with transformers, half of it to import
    # that), and shared caches make a busy core slower
    limit = 20 if name in LANGUAGE_FILES else 10
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < limit
    assert "Warning" not in done.stderr and "WARN" not in done.stderr
    assert [path.name for path in in_tmp.iterdir()] == ["runs"]  # no stray files
    (run_dir,) = (in_tmp / "runs" / name).glob("*/*")
    names = {path.name for path in run_dir.iterdir()} - {".lock"}
    if name in LANGUAGE_FILES:
        names -= {"pairs.jsonl"}  # of those that make them
    expected = {"run.json", "metrics.jsonl", "tensorboard", "checkpoints", "policy", "summary.json"}
    expected -= {"policy"} if name in PLANNERS else set()
    assert names == expected | ({"model"} if name in WORLD_MODELS else set())
    rows, summary = rows_without_clock(run_dir), json.loads((run_dir / "summary.json").read_text())
    assert summary["finished"] and summary["global_step"] == rows[-1]["global_step"]
    assert any(tag.startswith("losses/") for tag in rows[0]) and "eval/episodic_return" in rows[-1]
    returns = summary["final_eval"]["returns"]
    if name in LANGUAGE_FILES:  # the saved policy is a model that can be trained on
        agent, tokenizer, _ = load_language_model(str(run_dir / "policy"))
        assert agent.config.vocab_size == len(tokenizer) and len(returns) > 0
        return
    assert any("charts/episodic_return" in row for row in rows)
    if name in PLANNERS:
        return
    # the saved policy is the one that was evaluated: in its deterministic mode it plays the very same episodes
    assert zoo.evaluate(zoo.load(run_dir / "policy"), len(returns), summary["seed"]).tolist() == returns


BAD = [
    (["--seed", "-1"], ["--seed -1", "at least 0"]),
    (["--seed", "one"], ["--seed", "one"]),
    (["--learning-rate", "nan"], ["--learning-rate nan", "above 0"]),
    (["--device", "tpu"], ["--device tpu", "cpu, cuda"]),
    (["--preset", "nothing"], ["--preset nothing", "debug"]),
    (["--resume", "nowhere"], ["--resume nowhere", "no run folder"]),
    (["--run-dir", "/proc/nowhere"], ["--run-dir /proc/nowhere", "cannot be written"]),
    (["--no-such-flag", "1"], ["no-such-flag"]),
]
BAD_CONTROL = [
    (["--env", "NoSuchThing-v4"], ["unknown environment 'NoSuchThing-v4'"]),
    (["--num-envs", "0"], ["--num-envs 0", "at least 1"]),
    (["--total-timesteps", "-5"], ["--total-timesteps -5", "at least 1"]),
    (["--gamma", "1.5"], ["--gamma 1.5", "at most 1"]),
    (["--vec", "threads"], ["vec", "threads"]),
]
BAD_LANGUAGE = [
    (["--model", "no/such/folder/here"], ["no/such/folder/here"]),
    (["--task", "additoin"], ["additoin", "nearest: addition"]),
    (["--total-tokens", "-5"], ["--total-tokens -5", "at least 1"]),
    (["--micro-batch", "0"], ["--micro-batch 0", "at least 1"]),
    (["--max-length", "300"], ["300", "256"]),
    (["--compile"], ["--compile", "leave it out"]),
    (["--dtype", "float16"], ["dtype", "float16"]),
    (["--prompts", "nowhere.jsonl"], ["nowhere.jsonl"]),
    (["--reward", "no_such_module_here:score"], ["no_such_module_here"]),
]


def named(value: list[str]) -> str:
    return value[0] if value[0].startswith("--") else ""


@control_file
@pytest.mark.parametrize("flags, words", [*BAD, *BAD_CONTROL], ids=named)
def test_bad_input_is_one_line_and_exit_code_2(in_tmp, capsys, name, flags, words):
    assert_refused(in_tmp, capsys, name, flags, words)


@language_file
@pytest.mark.parametrize("flags, words", [*BAD, *BAD_LANGUAGE], ids=named)
def test_bad_input_to_a_language_file_is_one_line_and_exit_code_2(in_tmp, capsys, name, flags, words):
    assert_refused(in_tmp, capsys, name, flags, words)


def assert_refused(in_tmp: Path, capsys: pytest.CaptureFixture, name: str, flags: list[str], words: list[str]) -> None:
    """One line that holds `words`, exit code 2, and nothing written."""
    module = load_algorithm(name)
    with pytest.raises(SystemExit) as stop:
        module.main(parse_args(module.Args, module.PRESETS, [*(DEBUG if "--preset" not in flags else ()), *flags]))
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1 and "Traceback" not in err
    assert all(word in err for word in words), err
    assert list(in_tmp.iterdir()) == []


@each_file
def test_every_preset_is_a_valid_command_line(name):
    module = load_algorithm(name)
    for preset in module.PRESETS:
        assert parse_args(module.Args, module.PRESETS, ["--preset", preset]).preset == preset


# Seeds


@each_file
def test_same_seed_same_log_and_other_seed_other_log(in_tmp, name):
    module = load_algorithm(name)
    for folder, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        module.main(parse_args(module.Args, module.PRESETS, [*DEBUG, "--seed", seed, "--run-dir", folder]))
    same_run(name)(in_tmp / "a", in_tmp / "b")
    assert rows_without_clock(in_tmp / "a") != rows_without_clock(in_tmp / "c")


def same_run(name: str) -> Callable[[Path, Path], None]:
    """What compares two runs of that file."""
    return assert_same_language_run if name in LANGUAGE_FILES else assert_same_run


# Resume

LONG = (*DEBUG, "--total-timesteps", "8192", "--checkpoint-every", "1024", "--eval-every", "2048")
# less of it where a step costs milliseconds
LONG_WORLD_MODEL = (*DEBUG, "--total-timesteps", "576", "--checkpoint-every", "96", "--eval-every", "192")
# a reward of which a model with random weights gets some: the share of ASCII in what it writes
LONG_LANGUAGE = (*DEBUG, "--total-tokens", "1536", "--checkpoint-every", "192", "--eval-every", "384",
                 "--reward", "paid:share")  # fmt: skip
PAID = """def share(prompt, completion, **columns):
    return sum(character < "\\x80" for character in completion) / max(len(completion), 1)
"""
# each of the others has a test of its own of a run that is resumed
KILLED = [
    name if name in ("grpo", "llm_sft") else pytest.param(name, marks=pytest.mark.slow) for name in LANGUAGE_FILES
]


@control_file
def test_a_kill_at_a_random_moment_changes_nothing(in_tmp, name):
    assert_kills_change_nothing(in_tmp, name, 1, LONG_WORLD_MODEL if name in WORLD_MODELS else LONG)


@pytest.mark.parametrize("name", KILLED)
def test_a_kill_of_a_language_file_changes_nothing(in_tmp, name):
    (in_tmp / "paid.py").write_text(PAID)
    assert_kills_change_nothing(in_tmp, name, 1, LONG_LANGUAGE)


@pytest.mark.parametrize(
    "name, less",
    [
        pytest.param("ppo_continuous", (), marks=pytest.mark.slow),
        pytest.param("sac", ("--total-timesteps", "4096"), marks=pytest.mark.slow),
        pytest.param("ppo", (), marks=pytest.mark.long),
    ],
)
def test_five_kills_at_random_moments_change_nothing(in_tmp, name, less):
    assert_kills_change_nothing(in_tmp, name, 5, (*LONG, *less))


def assert_kills_change_nothing(in_tmp: Path, name: str, kills: int, long: tuple[str, ...] = LONG) -> None:
    """A run in this process against one in processes of its own, killed and resumed `kills` times."""
    module = load_algorithm(name)
    module.main(parse_args(module.Args, module.PRESETS, [*long, "--run-dir", "whole"]))
    seconds = json.loads((in_tmp / "whole/summary.json").read_text())["wall_clock_s"]
    moments, flags, killed = random.Random(0), [*long, "--run-dir", "killed"], 0
    log = in_tmp / "killed/metrics.jsonl"
    while not (in_tmp / "killed/summary.json").exists():
        rows = log.read_bytes().count(b"\n") if log.exists() else 0
        process = subprocess.Popen(command(name, *flags), cwd=in_tmp, env=environment(), stderr=subprocess.PIPE)
        while killed < kills and process.poll() is None and not (log.exists() and log.read_bytes().count(b"\n") > rows):
            time.sleep(0.005)  # until it trains beyond the last kill; then a random moment, all of them within the run
        if killed < kills:
            time.sleep(moments.uniform(0.0, seconds / (kills + 2)))
            process.send_signal(signal.SIGKILL)
            killed += 1
        err = process.communicate()[1].decode()
        assert process.returncode in (0, -signal.SIGKILL), err
        flags = ["--resume", "killed"]
    assert killed == kills
    same_run(name)(in_tmp / "whole", in_tmp / "killed")


# One file of each kind of loop: rollouts, a line search, a replay, a search. The others, most of a minute, are `long`.
KINDS = ("ppo_continuous", "trpo", "sac", "pets")
COMPILED = [pytest.param(name, marks=pytest.mark.slow if name in KINDS else pytest.mark.long) for name in CONTROL_FILES]


@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_run_resumes_bit_equal_too(in_tmp, name):
    flags = (*DEBUG, "--compile", "--checkpoint-every", "256", "--run-dir", "whole")
    assert run_file(name, *flags, cwd=in_tmp).returncode == 0
    # as if killed after the last checkpoint but one: what came later is not there yet
    shutil.copytree(in_tmp / "whole", in_tmp / "cut")
    (in_tmp / "cut/summary.json").unlink()
    for saved in ("policy", "model"):
        shutil.rmtree(in_tmp / "cut" / saved, ignore_errors=True)
    shutil.rmtree(sorted((in_tmp / "cut/checkpoints").iterdir())[-1])
    done = run_file(name, "--resume", "cut", cwd=in_tmp)
    assert done.returncode == 0 and "resumed cut at step" in done.stderr, done.stderr
    assert_same_run(in_tmp / "whole", in_tmp / "cut")
