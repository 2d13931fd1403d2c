"""The flags that mean the same in every file, and a command line whose errors are one line."""

import contextlib
import dataclasses
import io
import json
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

ArgsT = TypeVar("ArgsT", bound="RunArgs")


@dataclass
class RunArgs:
    """Flags of every algorithm file."""

    seed: int = 1
    """the one seed of everything random in the run"""
    device: str = "cpu"
    """cpu, cuda or cuda:K"""
    threads: int = 1
    """torch threads on the CPU; two are slower than one for small networks"""
    compile: bool = True
    """compile the policy and the minibatch step (on the CPU by a C++ compiler; takes seconds at the start)"""
    track: bool = False
    """log to Weights & Biases as well"""
    log_every: int = 2000
    """steps between two rows of the log; metrics are means over the interval"""
    eval_every: int = 100_000
    """steps between two evaluations of the deterministic policy; 0: only at the end"""
    eval_episodes: int = 10
    """episodes of one evaluation"""
    checkpoint_every: int = 100_000
    """steps between two checkpoints; 0: only at the end"""
    resume: str | None = None
    """run folder (or one checkpoint in it) to go on with; its stored flags win over the command line"""
    run_dir: str | None = None
    """folder of the run; by default runs/<algorithm>/<env>/seed_<seed>_<date>-<time>"""
    preset: str | None = None
    """named settings that replace the defaults; flags on the command line win over them"""

    def check(self) -> None:
        """Raises ValueError with one line that names the flag, the value and what would be right."""
        check(self, "seed", "eval_every", "checkpoint_every", at_least=0)
        check(self, "threads", "log_every", "eval_episodes", at_least=1)
        if self.device != "cpu" and not self.device.startswith("cuda"):
            raise ValueError(f"--device {self.device}: allowed are cpu, cuda and cuda:K")


@dataclass
class EnvArgs(RunArgs):
    """Flags of every file that learns from an environment."""

    env: str = "CartPole-v1"
    """Gymnasium's name of the environment"""
    num_envs: int = 8
    """environments stepped side by side"""
    vec: Literal["auto", "gymnasium", "mujoco"] = "auto"
    """engine: Gymnasium's vector environment, MuJoCo as a batch, or the faster one that has the task"""
    env_threads: int = 0
    """threads that step MuJoCo; 0: one per core, two at most"""
    total_timesteps: int = 1_000_000
    """environment steps of the whole run, all environments together"""

    def check(self) -> None:
        """As `RunArgs.check`."""
        super().check()
        check(self, "num_envs", "total_timesteps", at_least=1)
        check(self, "env_threads", at_least=0)


def flag(name: str) -> str:
    """The command line's spelling of a field: `num_envs` → `--num-envs`."""
    return "--" + name.replace("_", "-")


def check(
    args: Any, *names: str, at_least: float = -math.inf, above: float = -math.inf, at_most: float = math.inf
) -> None:
    """Raises ValueError for the first named field outside the bounds; of a tuple every entry counts, None passes."""
    for name in names:
        value = getattr(args, name)
        entries = value if isinstance(value, tuple) else (value,)
        if all(entry is None or (entry >= at_least and entry > above and entry <= at_most) for entry in entries):
            continue
        bounds = [("at least", at_least), ("above", above), ("at most", at_most)]
        allowed = " and ".join(f"{words} {bound}" for words, bound in bounds if math.isfinite(bound))
        raise ValueError(f"{flag(name)} {' '.join(map(str, entries))}: must be {allowed or 'a number'}")


def exit_with(message: str) -> NoReturn:
    """Prints one line to stderr and leaves with exit code 2."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Turns a ValueError, OSError or ImportError of a set-up into one line and exit code 2."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        exit_with(str(error))


def parse_args(cls: type[ArgsT], presets: dict[str, dict[str, Any]], argv: list[str] | None = None) -> ArgsT:
    """The command line as a checked instance of `cls`.

    `--preset NAME` replaces the defaults before the other flags are read. `--resume FOLDER` reads the stored flags of a
    run and ignores all others, with a note on each that differs. Errors are one line and exit code 2.
    """
    import tyro  # imported here so that the module stays light for tests and tools

    argv = list(sys.argv[1:] if argv is None else argv)
    name = _option(argv, "preset")
    if name is not None and name not in presets:
        exit_with(f"--preset {name}: this file has {', '.join(presets)}")
    default = cls(**{"preset": name, **presets[name]}) if name is not None else cls()
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            args = tyro.cli(cls, args=argv, default=default, description=(cls.__doc__ or "").strip())
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        exit_with(f"{_first_sentence(errors.getvalue())} (see --help)")
    with usage_errors():
        if args.resume is not None:
            args = _stored_args(cls, args, default)
        args.check()
        return args


def _option(argv: list[str], name: str) -> str | None:
    """The value of `--name VALUE` or `--name=VALUE` in `argv`."""
    for index, word in enumerate(argv):
        if word == flag(name) and index + 1 < len(argv):
            return argv[index + 1]
        if word.startswith(flag(name) + "="):
            return word.split("=", 1)[1]
    return None


def _first_sentence(box: str) -> str:
    """What tyro's framed message says, without the frame and the help below its rule."""
    words: list[str] = []
    for line in box.splitlines():
        text = line.strip("│╭╰╮╯ \t")
        if set(text) <= {"─"} and words:
            break
        if text and "─" not in text:
            words.append(text)
    return " ".join(words) or "the command line could not be read"


def run_folder(resume: str) -> Path:
    """The run folder that `--resume` names: the folder itself, or the one above `checkpoints/step_…`."""
    path = Path(resume)
    return path.parent.parent if path.parent.name == "checkpoints" else path


def _stored_args(cls: type[ArgsT], typed: ArgsT, default: ArgsT) -> ArgsT:
    """The flags stored in the run folder that `typed.resume` names.

    Raises:
        ValueError: when the folder is not a run of this file.
    """
    folder = run_folder(typed.resume)
    try:
        content = json.loads((folder / "run.json").read_text())
        stored, algorithm = content["args"], content["algorithm"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"--resume {typed.resume}: no run folder (it has no readable run.json)") from None
    script = Path(sys.modules[cls.__module__].__file__ or "").stem
    if algorithm != script:
        raise ValueError(f"--resume {typed.resume}: a run of {algorithm}.py, not of {script}.py")
    names = {field.name for field in dataclasses.fields(cls)}
    if set(stored) != names - {"resume", "run_dir"}:
        odd = ", ".join(sorted(set(stored) ^ (names - {"resume", "run_dir"})))
        raise ValueError(f"--resume {typed.resume}: its flags are not those of this version ({odd})")
    # JSON knows no tuples
    stored = {name: tuple(value) if isinstance(value, list) else value for name, value in stored.items()}
    for name, value in stored.items():
        if getattr(typed, name) not in (value, getattr(default, name)):
            print(f"note: {flag(name)} {getattr(typed, name)} ignored: the run goes on with {value}", file=sys.stderr)
    return cls(**stored, resume=typed.resume, run_dir=os.fspath(folder))
