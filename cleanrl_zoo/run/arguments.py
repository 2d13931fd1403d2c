"""The flags that mean the same in every file, and a command line whose errors are one line."""

import ast
import contextlib
import dataclasses
import difflib
import importlib.util
import io
import json
import math
import os
import re
import shlex
import sys
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn, TypeVar

import torch

from cleanrl_zoo.run.progress import CONTROL, LANGUAGE, Words
from cleanrl_zoo.run.seeding import seed_everything

ArgsT = TypeVar("ArgsT", bound="RunArgs")
NOT_PRESET = ("preset", "resume", "run_dir")  # fields that say which run it is, not how it is made

WORDS = {float: "a number", int: "a whole number", bool: "true or false", str: "a text", type(None): "null"}
TYRO_WORDS = {"FLOAT": "a number", "INT": "a whole number", "FLOAT FLOAT": "two numbers", "STR": "a text"}


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
    """compile what is called most (on the CPU by a C++ compiler; takes seconds at the start)"""
    track: bool = False
    """log to Weights & Biases as well"""
    log_every: int = 2000
    """steps between two rows of the log; metrics are means over the interval"""
    eval_every: int = 250_000
    """steps between two evaluations of the deterministic policy; 0: only at the end"""
    eval_episodes: int = 10
    """episodes of one evaluation, which ends after 100,000 steps where an episode does not"""
    checkpoint_every: int = 100_000
    """steps between two checkpoints; 0: only at the end"""
    resume: str | None = None
    """run folder (or one checkpoint in it) to go on with; its stored flags win over the command line"""
    run_dir: str | None = None
    """folder of the run; by default runs/<algorithm>/<env>/seed_<seed>_<date>-<time>"""
    preset: str | None = None
    """named settings, or a JSON file of settings, that replace the defaults; flags on the command line win over them"""

    words: ClassVar[Words] = CONTROL

    @property
    def subject(self) -> str:
        """What is learned: an environment or a task, as folders and the progress line name it."""
        raise NotImplementedError

    @property
    def total_steps(self) -> int:
        """Where the run ends, in the unit of `global_step`."""
        raise NotImplementedError

    def check(self) -> None:
        """Raises ValueError with one line that names the flag, the value and what would be right."""
        check(self, "seed", "eval_every", "checkpoint_every", at_least=0)
        check(self, "log_every", "eval_episodes", at_least=1)
        check(self, "threads", at_least=1, at_most=4096)
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise ValueError(f"--device {self.device}: allowed are cpu, cuda and cuda:K")
        devices = torch.cuda.device_count() if self.device != "cpu" else 0
        if self.device != "cpu" and int(self.device.partition(":")[2] or 0) >= devices:
            raise ValueError(f"--device {self.device}: this machine has {devices} CUDA devices; allowed here is cpu")
        if self.track and importlib.util.find_spec("wandb") is None:
            raise ValueError(
                "--track: wandb is not installed; install it with pip install -c constraints.txt -e '.[track]'"
            )
        if self.run_dir is not None and self.resume is None:
            check_unused(Path(self.run_dir))


@dataclass
class EnvArgs(RunArgs):
    """Flags of every file that learns from an environment."""

    env: str = "CartPole-v1"
    """Gymnasium's name of the environment"""
    num_envs: int = 8
    """environments stepped side by side"""
    vec: Literal["auto", "gymnasium", "mujoco", "atari"] = "auto"
    """engine: Gymnasium's vector environment, MuJoCo or Atari as a batch, or the faster one that has the task"""
    env_threads: int = 0
    """threads that step MuJoCo or Atari; 0: one per core"""
    total_timesteps: int = 1_000_000
    """environment steps of the whole run, all environments together; the last iteration may go beyond"""

    @property
    def subject(self) -> str:
        return self.env

    @property
    def total_steps(self) -> int:
        return self.total_timesteps

    def check(self) -> None:
        """As `RunArgs.check`."""
        super().check()
        check(self, "num_envs", "total_timesteps", at_least=1)
        check(self, "env_threads", at_least=0)


@dataclass
class LanguageArgs(RunArgs):
    """Flags of every file that trains a language model. Its steps are tokens of completions."""

    words: ClassVar[Words] = LANGUAGE
    model: str = "tiny"
    """folder or Hugging Face name of a causal language model; tiny: a small Llama with random weights, token = byte"""
    task: str = "addition"
    """addition[:digits=N], countdown, reasoning_gym:NAME, ...; or any name for what --prompts and --reward say"""
    prompts: str | None = None
    """JSONL file, folder or name of a Hugging Face dataset with a column `prompt`; other columns go to the reward"""
    reward: str | None = None
    """module:function, called as reward(prompt, completion, **columns); several, with commas between, are components"""
    held_out: str | None = None
    """with --prompts: share of them that is kept for evaluation (0.1 by default), or a second file or dataset"""
    template: str | None = None
    """text around a plain prompt, with {prompt} in its place"""
    system: str | None = None
    """system message of a chat; implies --chat"""
    chat: bool = False
    """put a plain prompt into the model's chat template"""
    total_tokens: int = 400_000
    """completion tokens of the whole run, those of dropped samples too; the last iteration may go beyond"""
    max_length: int = 0
    """tokens of a completion; 0: what the task says"""
    temperature: float = 1.0
    """of sampling, and so of every log-prob"""
    top_p: float = 1.0
    """share of the probability that is sampled from, the likeliest tokens first"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """of the weights"""
    lora_rank: int = 0
    """train a low-rank adapter of this rank and freeze the rest; 0: train all weights"""
    micro_batch: int = 64
    """sequences that go through the model at once; changes memory and time, not the gradient"""
    show_samples: int = 0
    """sampled completions with their rewards that each evaluation prints (and writes to samples/)"""
    compile: bool = False
    """not possible here: lengths change from batch to batch"""
    log_every: int = 5000
    """completion tokens between two rows of the log; metrics are means over the interval"""
    eval_every: int = 50_000
    """completion tokens between two evaluations on held-out prompts; 0: only at the end"""
    eval_episodes: int = 512
    """held-out prompts of one evaluation, one sampled completion each"""
    checkpoint_every: int = 100_000
    """completion tokens between two checkpoints; 0: only at the end"""

    @property
    def subject(self) -> str:
        return self.task

    @property
    def total_steps(self) -> int:
        return self.total_tokens

    def check(self) -> None:
        """As `RunArgs.check`."""
        super().check()
        check(self, "total_tokens", "micro_batch", at_least=1)
        check(self, "max_length", "lora_rank", "show_samples", at_least=0)
        check(self, "temperature", above=0)
        check(self, "top_p", above=0, at_most=1)
        if self.compile:
            raise ValueError(
                "--compile: not for language models, whose lengths change from batch to batch; leave it out"
            )
        if importlib.util.find_spec("transformers") is None:
            raise ValueError(
                "transformers is not installed; install it with pip install -c constraints.txt -e '.[llm]'"
            )

    def task_settings(self) -> dict[str, Any]:
        """The flags that say what is learned, as `make_task` takes them."""
        names = ("prompts", "reward", "held_out", "chat", "template", "system")
        return {"spec": self.task, **{name: getattr(self, name) for name in names}}

    def check_exact_logprobs(self) -> None:
        """Raises ValueError where the sampler's log-probs would not be the policy's."""
        if self.top_p < 1:
            raise ValueError(
                f"--top-p {self.top_p}: the loss needs the exact log-probs of what was sampled; leave it at 1"
            )


def flag(name: str) -> str:
    """The command line's spelling of a field: `num_envs` → `--num-envs`."""
    return "--" + name.replace("_", "-")


def check(
    args: Any,
    *names: str,
    at_least: float = -math.inf,
    above: float = -math.inf,
    at_most: float = math.inf,
    below: float = math.inf,
) -> None:
    """Raises ValueError for the first named field outside the bounds.

    Of a tuple, which must not be empty, every entry counts; None passes.
    """
    for name in names:
        value = getattr(args, name)
        entries = value if isinstance(value, tuple) else (value,)
        if entries and all(
            entry is None or (math.isfinite(entry) and at_least <= entry <= at_most and above < entry < below)
            for entry in entries
        ):
            continue
        bounds = [("at least", at_least), ("above", above), ("at most", at_most), ("below", below)]
        allowed = " and ".join(f"{words} {bound}" for words, bound in bounds if math.isfinite(bound))
        if allowed and any(entry is not None and not math.isfinite(entry) for entry in entries):
            allowed = f"a finite number, {allowed}"
        given = " ".join(map(str, entries)) or "without a value"
        raise ValueError(f"{flag(name)} {given}: must be {allowed or 'a number'}")


def check_learning_starts(args: Any) -> None:
    """Raises ValueError unless `learning_starts` leaves steps to learn in."""
    check(args, "learning_starts", at_least=0)
    if args.learning_starts >= args.total_timesteps:
        total = f"--total-timesteps {args.total_timesteps}"
        raise ValueError(f"--learning-starts {args.learning_starts}: must be below {total}, or nothing is learned")


def check_game_flags(args: Any, is_game: bool) -> None:
    """Raises ValueError where a flag that only Atari's engine understands is not at its default elsewhere."""
    if not is_game and args.resume is None:
        why = f"only for games of Atari's own engine, not for --env {args.env} with --vec {args.vec}"
        check_left_out(args, why, "repeat_action_probability", "episodic_life")


def check_left_out(args: Any, why: str, *names: str) -> None:
    """Raises ValueError, which says why, where one of the named flags is not at its default."""
    for name in names:
        value = getattr(args, name)
        if value != getattr(type(args), name):
            given = flag("no_" + name) if value is False else f"{flag(name)} {value}"
            raise ValueError(f"{given}: {why}; leave it out")


def check_divides_batch(args: Any, name: str) -> None:
    """Raises ValueError unless the named field divides the batch of `num_envs` × `num_steps` transitions."""
    value, batch_size = getattr(args, name), args.num_envs * args.num_steps
    if batch_size % value:
        batch = f"the batch of {batch_size} (--num-envs {args.num_envs} × --num-steps {args.num_steps})"
        raise ValueError(f"{flag(name)} {value}: must divide {batch}")


def check_unused(folder: Path) -> None:
    """Raises ValueError when a new run cannot have `folder`: it is a file, cannot be read, or holds something."""
    try:
        taken = [path.name for path in folder.iterdir()] if folder.exists() else []
    except NotADirectoryError:
        raise ValueError(f"--run-dir {folder}: is a file; give a folder that is new or empty") from None
    except OSError as error:
        raise ValueError(f"--run-dir {folder}: cannot be written ({error.strerror}); give a folder that can") from None
    # what a run leaves that was killed before it had written its first file does not count
    if any(not name.startswith((".lock", ".writing-")) for name in taken):
        unfinished = "run.json" in taken and "summary.json" not in taken
        advice = f"go on with it by --resume {shlex.quote(str(folder))} or " if unfinished else ""
        raise ValueError(f"--run-dir {folder}: exists and is not empty; {advice}give another folder")


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


def parse_args(
    cls: type[ArgsT],
    presets: dict[str, dict[str, Any]],
    argv: list[str] | None = None,
    variants: dict[str, dict[str, Any]] | None = None,
) -> ArgsT:
    """The command line as a checked instance of `cls`.

    `--preset NAME` replaces the defaults before the other flags are read, and so does `--variant NAME` in a file that
    has `variants`; the preset wins. `--preset PATH.json` does it with a file (`read_preset`). `--resume FOLDER` reads
    the stored flags of a run and ignores all others, with a note on each that differs. Errors are one line and exit
    code 2.

    Seeds the global generators too, since an environment may draw from them while it is made.
    """
    import tyro  # imported here so that the module stays light for tests and tools

    argv = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # --help has characters that a terminal may lack
        sys.stdout.reconfigure(errors="replace")
    named: dict[str, Any] = {}
    resumed = _option(argv, "resume") not in (None, "None")  # whose stored flags win, whatever a preset says by now
    for option, settings in (("variant", variants), ("preset", presets)):
        name = _option(argv, option) if settings is not None else None
        if name is None or resumed:
            continue
        if option == "preset" and name.endswith(".json"):
            with usage_errors():
                named |= {**read_preset(Path(name), cls), option: name}
            continue
        if name not in settings:
            exit_with(f"--{option} {name}: this file has {', '.join(settings)}")
        named |= {**settings[name], option: name}
    default = cls(**named)
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            args = tyro.cli(cls, args=argv, default=default, description=(cls.__doc__ or "").strip())
    except BrokenPipeError:  # of --help, whose reader (`| head`) has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter's last flush fails too
        raise SystemExit(0) from None
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        fields = [field.name for field in dataclasses.fields(cls)]
        exit_with(f"{_plain(_first_sentence(errors.getvalue()), argv, fields)} (see --help)")
    with usage_errors():
        if args.resume is not None:
            args = _stored_args(cls, args, argv)
        args.check()
    seed_everything(args.seed)
    return args


def read_preset(path: Path, cls: type[RunArgs]) -> dict[str, Any]:
    """The settings in a JSON file `{"learning_rate": 0.001, "hidden": [64, 64], ...}`: fields of `cls` by name.

    Raises:
        ValueError: naming the file and what is wrong: it cannot be read, or a name or a value is none of `cls`.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ValueError(f"--preset {path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--preset {path}: damaged ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f'--preset {path}: must be a JSON object of settings, as {{"seed": 1}}')
    return checked_settings(content, cls, f"--preset {path}")


def checked_settings(settings: dict[str, Any], cls: type[RunArgs], where: str) -> dict[str, Any]:
    """`settings` by field of `cls` as its constructor takes them: JSON's lists as tuples, whole numbers as floats.

    Raises:
        ValueError: beginning with `where`, for a name that is no field, with the nearest, or a value of a wrong type.
    """
    kinds = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.name not in NOT_PRESET}
    checked = {}
    for name, value in settings.items():
        if name not in fields:
            raise ValueError(f"{where}: there is no setting {name}; the nearest is {nearest(name, fields)}")
        kind = kinds[name]
        checked[name] = tuple(value) if isinstance(value, list) else value
        if not _fits(checked[name], kind):
            default, given = json.dumps(fields[name].default), json.dumps(value)
            given = given if len(given) <= 80 else f"{given[:77]}..."
            raise ValueError(f"{where}: {name} cannot be {given}; its default is {default}; give {_in_words(kind)}")
        alternatives = (kind, *typing.get_args(kind))
        if type(value) is int and float in alternatives and int not in alternatives:
            checked[name] = float(value)
    return checked


def nearest(name: str, known: Iterable[str]) -> str:
    """The one of `known` that is spelled most like `name`; "" if there is none."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0)), "")


def _fits(value: Any, kind: Any) -> bool:
    """Whether `value` is what a field declared as `kind` may hold; a whole number may stand for a float."""
    options = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return value in options
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, tuple):
            return False
        kinds = options[:1] * len(value) if options[-1] is Ellipsis else options
        return len(value) == len(kinds) and all(map(_fits, value, kinds))
    if options:
        return any(_fits(value, option) for option in options)
    return type(value) is kind or (kind is float and type(value) is int and abs(value) <= sys.float_info.max)


def _in_words(kind: Any) -> str:
    """What a field declared as `kind` holds: "a number", "2 numbers or null", "one of squared, huber"."""
    options = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, options))}"
    if typing.get_origin(kind) is tuple:
        count = "" if options[-1] is Ellipsis else f"{len(options)} "
        return f"a list of {count}{_in_words(options[0]).removeprefix('a ')}s"
    return " or ".join(map(_in_words, options)) if options else WORDS[kind]


def _option(argv: list[str], name: str) -> str | None:
    """The value of the last `--name VALUE` or `--name=VALUE` in `argv`."""
    value = None
    for index, word in enumerate(argv):
        if word == flag(name) and index + 1 < len(argv):
            value = argv[index + 1]
        elif word.startswith(flag(name) + "="):
            value = word.split("=", 1)[1]
    return value


def _first_sentence(box: str) -> str:
    """What tyro's framed message says, without the frame, its title and the help below its rule."""
    words: list[str] = []
    titled = "─" in box  # the frame holds the title; in ASCII it is a line with a rule below it
    for line in box.splitlines():
        text = line.strip("│╭╰╮╯ \t")
        if text and set(text) <= {"─", "-"}:
            if titled and words:
                break
            titled, words = True, []
        elif text and "─" not in text:
            words.append(text)
    return " ".join(words) or "the command line could not be read"


def _plain(text: str, argv: list[str], known: Iterable[str]) -> str:
    """tyro's sentence in our words: what was given, what is allowed, what to do."""
    if union := re.match(
        r"Error parsing (--[\w-]+): no type matching (.+?) could be instantiated from (\[.*?\])\.", text
    ):
        name, kinds, given = union.groups()
        allowed = [TYRO_WORDS.get(kind.strip("{}"), kind.strip("{}")) for kind in kinds.split("|")]
        text = f"{name} {' '.join(ast.literal_eval(given)) or 'without a value'}: must be {' or '.join(allowed[::-1])}"
    elif wrong := re.match(r"Error parsing (--[\w-]+): invalid literal for int\(\) with base 10: (.+)", text):
        text = f"{wrong[1]} {ast.literal_eval(wrong[2])}: must be a whole number, written out in digits"
    elif wrong := re.match(r"Error parsing (--[\w-]+): could not convert string to float: (.+)", text):
        text = f"{wrong[1]} {ast.literal_eval(wrong[2])}: must be a number"
    elif text.startswith("Unrecognized options: --"):
        word = text.removeprefix("Unrecognized options: ").partition(",")[0].partition("=")[0]
        text += f"; the nearest to {word} is {flag(nearest(word.removeprefix('--').replace('-', '_'), known))}"
    if any(re.fullmatch(r"[\d.eE+-]+(,[\d.eE+-]+)+", word) for word in argv):
        text += "; numbers in a row are separated by spaces"
    return text


def folder_name(subject: str) -> str:
    """A subject as the name of a folder: `ALE/Pong-v5` → `ALE-Pong-v5`."""
    return re.sub(r"[^\w.+-]+", "-", subject).strip("-.") or "run"


def run_folder(resume: str) -> Path:
    """The run folder that `--resume` names: the folder itself, or the one above `checkpoints/step_…`."""
    path = Path(resume)
    return path.parent.parent if path.parent.name == "checkpoints" else path


def read_run(folder: Path) -> dict[str, Any]:
    """The content of run.json: flags and provenance of the run in `folder`. ValueError when there is none."""
    try:
        content = json.loads((folder / "run.json").read_text())
        if isinstance(content["args"], dict) and isinstance(content["algorithm"], str):
            return content
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise ValueError(f"--resume {folder}: no run folder (it has no readable run.json)")


def _stored_args(cls: type[ArgsT], typed: ArgsT, argv: list[str]) -> ArgsT:
    """The flags stored in the run folder that `typed.resume` names.

    Raises:
        ValueError: when the folder is not a run of this file, or its flags are not what this version can have written.
    """
    folder = run_folder(typed.resume)
    content = read_run(folder)
    # JSON knows no tuples
    stored = {name: tuple(v) if isinstance(v, list) else v for name, v in content["args"].items()}
    script = Path(sys.modules[cls.__module__].__file__ or "").stem
    if content["algorithm"] != script:
        raise ValueError(f"--resume {typed.resume}: a run of {content['algorithm']}.py, not of {script}.py")
    fields = {field.name: field for field in dataclasses.fields(cls) if field.name not in ("resume", "run_dir")}
    odd = set(stored) ^ set(fields)
    odd |= {name for name in set(stored) - odd if not _alike(stored[name], fields[name])}
    if odd:
        names = ", ".join(sorted(odd))
        raise ValueError(f"--resume {typed.resume}: run.json was edited or is of another version ({names})")
    args = cls(**stored, resume=typed.resume, run_dir=os.fspath(folder))
    given = {word.lstrip("-").partition("=")[0].replace("-", "_") for word in argv if word.startswith("--")}
    for name in sorted({name.removeprefix("no_") for name in given} & {*stored, "run_dir"}):
        if getattr(typed, name) != getattr(args, name):
            kept = getattr(args, name)
            print(f"note: {flag(name)} {getattr(typed, name)} ignored: the run goes on with {kept}", file=sys.stderr)
    return args


def _alike(value: Any, field: dataclasses.Field) -> bool:
    """Whether `value` can be what this flag was: of its default's type, a whole number for a float, None if allowed."""
    optional = type(None) in typing.get_args(field.type)
    if value is None or field.default is None:
        return optional and isinstance(value, str | int | float | tuple | None)
    return type(value) is type(field.default) or (isinstance(field.default, float) and type(value) is int)
