import dataclasses
import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from cleanrl_zoo.run import EnvArgs, check, parse_args, usage_errors
from cleanrl_zoo.run.tables import TableArgs

PRESETS = {"small": {"num_envs": 2, "total_timesteps": 100}, "debug": {"compile": False}}


@dataclass
class Args(EnvArgs):
    """A test algorithm."""

    learning_rate: float = 1e-3
    gamma: float = 0.99

    def check(self):
        super().check()
        check(self, "learning_rate", above=0)
        check(self, "gamma", at_least=0, at_most=1)


def parse(*argv):
    return parse_args(Args, PRESETS, list(argv))


def test_defaults_presets_and_flags_in_order_of_strength():
    assert parse().num_envs == 8
    assert parse("--preset", "small").num_envs == 2
    args = parse("--num-envs", "3", "--preset=small")
    assert (args.num_envs, args.total_timesteps, args.preset) == (3, 100, "small")
    assert parse("--preset", "debug", "--preset", "small").num_envs == 2  # the last one counts, as for any flag


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--num-envs", "0"], ["--num-envs 0", "at least 1"]),
        (["--num-envs", "-3"], ["--num-envs -3", "at least 1"]),
        (["--num-envs", "two"], ["--num-envs", "two"]),
        (["--total-timesteps", "1.5"], ["--total-timesteps", "1.5"]),
        (["--seed", "-1"], ["--seed -1", "at least 0"]),
        (["--threads", "9" * 20], ["--threads 9", "at most 4096"]),
        (["--learning-rate", "0"], ["--learning-rate 0.0", "above 0"]),
        (["--learning-rate", "nan"], ["--learning-rate nan", "above 0"]),
        (["--gamma", "1.1"], ["--gamma 1.1", "at least 0 and at most 1"]),
        (["--preset", "huge"], ["--preset huge", "small, debug"]),
        (["--device", "tpu"], ["--device tpu", "cpu, cuda"]),
        (["--vec", "envpool"], ["envpool", "mujoco"]),
        (["--no-such-flag", "1"], ["--no-such-flag"]),
        (["--resume", "nowhere"], ["--resume nowhere", "no run folder"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(argv, words, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(*argv)
    err = capsys.readouterr().err
    assert stop.value.code == 2
    assert err.count("\n") == 1 and err.startswith("error: ")
    assert all(word in err for word in words), err


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ("--span none", "--span none: must be two numbers or None"),
        ("--span 0.1,0.2", "--span 0.1,0.2: must be two numbers or None; numbers in a row are separated by spaces"),
        ("--span --seed 2", "--span without a value: must be two numbers or None"),
        ("--hidden 64,64", "numbers in a row are separated by spaces"),
        ("--total-timesteps 1e6", "--total-timesteps 1e6: must be a whole number, written out in digits"),
        ("--learning-rate fast", "--learning-rate fast: must be a number"),
        ("--spam 0.1 0.2", "Unrecognized options: --spam, 0.1, 0.2; the nearest to --spam is --span"),
        ("--learn-rate=1", "the nearest to --learn-rate is --learning-rate"),
    ],
)
def test_what_the_command_line_could_not_take_is_told_with_what_it_takes(argv, told, capsys):
    with pytest.raises(SystemExit) as stop:
        parse_args(MoreArgs, PRESETS, argv.split())
    err = capsys.readouterr().err
    assert told in err and err.count("\n") == 1 and stop.value.code == 2, err


def test_help_on_a_terminal_without_the_characters(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    with pytest.raises(SystemExit) as stop:
        parse_args(MoreArgs, PRESETS, ["--help"])
    assert stop.value.code == 0


def test_help_whose_reader_leaves_is_quiet():
    code = "from test_run_arguments import MoreArgs, parse_args; parse_args(MoreArgs, {}, ['--help'])"
    reader, writer = os.pipe()
    os.close(reader)  # as `| head` does once it has its lines
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, cwd=Path(__file__).parent
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_flag_of_two_numbers_or_none_says_so(capsys):
    with pytest.raises(SystemExit):
        parse_args(MoreArgs, PRESETS, ["--span", "0.3"])
    assert capsys.readouterr().err == "error: --span 0.3: must be two numbers or None (see --help)\n"
    assert parse_args(MoreArgs, PRESETS, ["--span", "1", "2.5"]).span == (1.0, 2.5)


def test_help_names_every_flag_and_its_unit(capsys):
    with pytest.raises(SystemExit) as stop:
        parse("--help")
    out = capsys.readouterr().out
    assert stop.value.code == 0
    assert "--total-timesteps" in out and "environment steps" in out


def test_resume_reads_the_stored_flags_and_notes_others(tmp_path, capsys):
    stored = {k: v for k, v in dataclasses.asdict(Args(seed=5, num_envs=4)).items() if k not in ("resume", "run_dir")}
    (tmp_path / "run.json").write_text(json.dumps({"algorithm": "test_run_arguments", "args": stored}))
    args = parse("--resume", str(tmp_path), "--seed", "9", "--num-envs", "4")
    assert (args.seed, args.num_envs, args.resume, args.run_dir) == (5, 4, str(tmp_path), str(tmp_path))
    assert capsys.readouterr().err == "note: --seed 9 ignored: the run goes on with 5\n"
    parse("--resume", str(tmp_path), "--num-envs", "8", "--run-dir", "b", "--preset", "small")  # 8 is the default
    assert [line.split()[1] for line in capsys.readouterr().err.splitlines()] == ["--num-envs", "--preset", "--run-dir"]
    args = parse("--resume", str(tmp_path / "checkpoints" / "step_000000000100"))
    assert args.run_dir == str(tmp_path)

    for content, word in (({"algorithm": "dqn", "args": stored}, "dqn.py"), ({"args": stored}, "no run folder"),
                          ({"algorithm": "test_run_arguments", "args": {**stored, "tau": 1}}, "tau")):  # fmt: skip
        (tmp_path / "run.json").write_text(json.dumps(content))
        with pytest.raises(SystemExit):
            parse("--resume", str(tmp_path))
        err = capsys.readouterr().err
        assert word in err and err.count("\n") == 1


@dataclass
class MoreArgs(Args):
    """Fields of every kind that a file of settings may hold."""

    hidden: tuple[int, ...] = (64, 64)
    target_kl: float | None = None
    span: tuple[float, float] | None = None
    loss: Literal["squared", "huber"] = "squared"


def test_a_preset_may_be_a_file_of_settings(tmp_path):
    path = tmp_path / "best.json"
    path.write_text(  # with the mark that some editors put before UTF-8
        "\ufeff"
        '{"num_envs": 3, "learning_rate": 1, "hidden": [8, 8, 8], "target_kl": 2, "loss": "huber", "compile": false}'
    )
    args = parse_args(MoreArgs, PRESETS, ["--preset", str(path), "--num-envs", "5"])
    assert (args.num_envs, args.hidden, args.target_kl, args.loss) == (5, (8, 8, 8), 2.0, "huber")  # the flag wins
    assert (args.learning_rate, type(args.learning_rate), args.compile) == (1.0, float, False)
    assert args.preset == str(path) and args.gamma == 0.99
    # stored as any flag is: resuming does not need the file any more
    stored = {k: v for k, v in dataclasses.asdict(args).items() if k not in ("resume", "run_dir")}
    (tmp_path / "run.json").write_text(json.dumps({"algorithm": "test_run_arguments", "args": stored}))
    path.unlink()
    for more in ([], ["--preset", str(path)]):  # the whole command again
        again = parse_args(MoreArgs, PRESETS, [*more, "--resume", str(tmp_path)])
        assert dataclasses.replace(again, resume=None, run_dir=None) == args


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "cannot be read (No such file or directory)"),
        ('{"num_envs": ', "damaged ("),
        ("[1, 2]", "must be a JSON object of settings"),
        ('{"learning_rte": 0.1}', "there is no setting learning_rte; the nearest is learning_rate"),
        ('{"run_dir": "here"}', "there is no setting run_dir"),
        ('{"learning_rate": "high"}', 'learning_rate cannot be "high"; its default is 0.001'),
        ('{"num_envs": 2.5}', "num_envs cannot be 2.5; its default is 8"),
        ('{"num_envs": true}', "num_envs cannot be true"),
        ('{"num_envs": null}', "num_envs cannot be null"),
        ('{"compile": 1}', "compile cannot be 1; its default is true"),
        ('{"hidden": [64, "wide"]}', 'hidden cannot be [64, "wide"]; its default is [64, 64]'),
        ('{"hidden": 64}', "hidden cannot be 64"),
        ('{"span": [1.0]}', "span cannot be [1.0]; its default is null; give a list of 2 numbers or null"),
        ('{"learning_rate": 1' + 400 * "0" + "}", "learning_rate cannot be 1000"),
        (100_000 * "[", "damaged ("),
        ('{"span": [1.0, 2, 3]}', "span cannot be [1.0, 2, 3]"),
        ('{"target_kl": "low"}', 'target_kl cannot be "low"; its default is null'),
        ('{"loss": "cubed"}', 'loss cannot be "cubed"; its default is "squared"; give one of squared, huber'),
        ('{"gamma": 1.5}', "--gamma 1.5: must be at least 0 and at most 1"),
        ('{"gamma": NaN}', "--gamma nan"),
    ],
)
def test_a_file_of_settings_that_cannot_be_used_is_told_in_one_line(tmp_path, capsys, content, told):
    path = tmp_path / "best.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit) as stop:
        parse_args(MoreArgs, PRESETS, ["--preset", str(path)])
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1 and told in err
    assert told.startswith("--") or f"--preset {path}: " in err


def test_usage_errors_turns_set_up_errors_into_one_line(capsys):
    with pytest.raises(SystemExit) as stop, usage_errors():
        raise ValueError("two\nlines")
    assert stop.value.code == 2 and capsys.readouterr().err == "error: two lines\n"
    with pytest.raises(KeyError), usage_errors():  # a defect keeps its traceback
        raise KeyError("x")


def test_tables_take_compile_and_tell_of_no_compiling():
    args = parse_args(TableArgs, {}, ["--compile"])
    assert args.compile is False
