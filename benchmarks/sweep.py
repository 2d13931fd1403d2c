"""Tunes an algorithm: trials of several seeds each, drawn by Optuna, and a check of the best one on fresh seeds.

    python benchmarks/sweep.py --name ppo_cartpole --algorithm ppo --env CartPole-v1 --steps 50000 --trials 20 \\
        --workers 2 --confirm -- --no-compile

What is behind the last `--` are flags of every run. The same command goes on with a sweep that was stopped or killed;
given again in another shell, or on another machine, it helps. docs/sweeps.md says how trials are scored and pruned.

Exit code 0: all trials are finished; 1: some are with other workers, or none was completed; 130: interrupted.
"""

import contextlib
import dataclasses
import json
import sys
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import sweep_report
from launch import LAUNCHERS, check_flags, connect, load_algorithm, places
from records import ROOT, Parser, read_json, write_text
from run import listen, run_jobs
from sweep_trials import SCORES, STATISTICS, Plan, Refused, Sweep, exclusive, final_score, jobs_of, label, work

from cleanrl_zoo.run.arguments import (
    NOT_PRESET,
    LanguageArgs,
    checked_settings,
    exit_with,
    nearest,
    parse_args,
    usage_errors,
)
from cleanrl_zoo.run.provenance import git_commit, machine, versions

try:
    import optuna
except ImportError:  # told by main in one line
    optuna = None

FRESH = 1001  # first seed of the confirmation; a sweep has the seeds from 1
TRIED = 20  # draws that are looked at before a sweep begins


# Confirmation


def confirm(sweep: Sweep, count: int, slots: int) -> int:
    """Runs the best trial's settings and the defaults on `count` fresh seeds each and writes `confirm.json`."""
    best, seeds = sweep.study.best_trial, range(FRESH, FRESH + count)
    sides = {"best": (label(best.number), best.user_attrs["drawn"]["settings"]), "defaults": ("defaults", {})}
    jobs = {
        side: jobs_of(sweep, "confirm", name if side == "defaults" else f"best_{name}", settings, seeds)
        for side, (name, settings) in sides.items()
    }
    code = run_jobs(
        [job for pair in zip(*jobs.values(), strict=True) for job in pair], slots, sweep.algos, sweep.launcher
    )
    if code:
        return code
    scores = {side: [final_score(job.published, sweep.plan.score) for job in jobs[side]] for side in jobs}
    if None in scores["best"] + scores["defaults"]:
        raise ValueError("--confirm: in some of the runs no episode ended; give more --steps or --score eval")
    result = {"trial": best.number, "seeds": list(seeds), **scores, **sweep_report.compare(**scores)}
    write_text(sweep.results / "confirm.json", json.dumps(result, indent=1) + "\n")
    print(sweep_report.verdict(result), flush=True)
    return 0


# Set-up


def open_study(name: str, where: str, pruner: Any) -> Any:
    """The study of that name: in a database if `where` is a URL, else in a journal file.

    Raises:
        ValueError: if `where` cannot be read or written.
    """
    try:
        if "://" in where:
            storage = optuna.storages.RDBStorage(where)
        else:
            Path(where).parent.mkdir(parents=True, exist_ok=True)
            storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(where))
    except ImportError:
        raise ValueError(f"--storage {where}: the package that speaks with this database is not installed") from None
    except OSError as error:
        raise ValueError(f"--storage {where}: cannot be written ({error.strerror})") from None
    except (ValueError, KeyError) as error:
        raise ValueError(f"--storage {where}: damaged ({error})") from None
    sampler = optuna.samplers.RandomSampler()
    return optuna.create_study(
        storage=storage, study_name=name, direction="maximize", sampler=sampler, pruner=pruner, load_if_exists=True
    )


@contextlib.contextmanager
def storage_errors(where: str) -> Iterator[None]:
    """Turns what a storage may say, at any moment, into a ValueError of one line."""
    import sqlalchemy.exc

    try:
        yield
    except (optuna.exceptions.OptunaError, sqlalchemy.exc.SQLAlchemyError) as error:
        reason = (str(error.__cause__ or error).strip() or type(error).__name__).splitlines()[0]
        advice = "see that the address is right and the server runs; the same command goes on"
        if "locked" in reason:
            advice = "wait for who holds it, or leave --storage out: the journal file has no such lock"
        raise ValueError(f"--storage {where}: cannot be used ({reason}); {advice}") from None


def make_pruner(plan: Plan) -> Any:
    pruners = optuna.pruners
    if plan.pruner == "none" or not plan.rungs:
        return pruners.NopPruner()
    if plan.pruner == "hyperband":
        return pruners.HyperbandPruner(min_resource=plan.rungs[0], max_resource=plan.steps)
    return pruners.MedianPruner()


def make_plan(args: Any, cls: type, given: Any) -> Plan:
    """The plan of a command line; `given`: the flags of every run, parsed."""
    language = issubclass(cls, LanguageArgs)
    default = cls()
    base = {
        field.name: getattr(given, field.name)
        for field in dataclasses.fields(cls)
        if field.name not in (*NOT_PRESET, "seed") and getattr(given, field.name) != getattr(default, field.name)
    }
    steps, rungs = given.total_steps, args.rungs
    base |= (
        {"task": given.subject, "total_tokens": steps} if language else {"env": given.subject, "total_timesteps": steps}
    )
    between = max(1, steps // (rungs + 1))
    if "log_every" not in base and given.log_every > between // 5:  # a rung is read off the log
        base["log_every"] = max(1, between // 5)
    if args.score == "eval" and rungs and "eval_every" not in base:
        base["eval_every"] = between
    return Plan(
        algorithm=args.algorithm,
        env=given.subject,
        steps=steps,
        seeds=args.seeds,
        score=args.score,
        statistic=args.statistic,
        pruner=args.pruner,
        rungs=[steps * k // (rungs + 1) for k in range(1, rungs + 1)],
        seed=args.seed,
        space=args.space or args.algorithm,
        base=json.loads(json.dumps(base)),
    )


def load_space(name: str) -> Callable[[Any], dict[str, Any]]:
    """The space of that name in spaces.py, or the function of a file: `my_spaces.py:wide`.

    Raises:
        ValueError: if there is none; the nearest is named.
    """
    import spaces

    path, colon, function = name.rpartition(":")
    if colon and not Path(path).is_file():
        raise ValueError(f"--space {name}: {path} does not exist; give file.py:function")
    module = load_algorithm(Path(path).resolve()) if colon else spaces
    known = [key for key, value in vars(module).items() if callable(value) and value.__module__ == module.__name__]
    if function not in known:
        raise ValueError(
            f"{path or 'benchmarks/spaces.py'} has no space {function}; the nearest is "
            f"{nearest(function, known)}, all are {', '.join(known)}; add one, a few lines, or name another by --space"
        )
    return getattr(module, function)


def make_check(cls: type, plan: Plan) -> Callable[[dict[str, Any]], None]:
    """What raises ValueError for names and values that are no settings, Refused for a combination that is refused."""

    def check(settings: dict[str, Any]) -> None:
        args = cls(**checked_settings(plan.base | settings, cls, f"space {plan.space}"))
        try:
            args.check()
        except ValueError as error:
            raise Refused(str(error)) from None

    return check


def check_space(name: str, space: Callable, check: Callable, fixed: set[str]) -> None:
    """Raises ValueError for a space that names what is no setting or is fixed, or of which nothing can be run."""
    problems = []
    for number in range(TRIED):
        trial = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=number)).ask()
        settings = json.loads(json.dumps(space(trial)))
        both = sorted(settings.keys() & fixed)
        if both:
            raise ValueError(f"space {name} draws {both[0]}, which is fixed for all trials: leave out one of them")
        try:
            check(settings)
        except Refused as error:
            problems.append(error)
    if len(problems) == TRIED:
        raise ValueError(f"space {name}: none of {TRIED} draws can be run; the first: {problems[0]}")


def join(sweep: Sweep) -> None:
    """Stores the plan of a new sweep, or sees that this command asks for the same as the one that began it.

    Raises:
        ValueError: naming what differs, or a folder that another sweep of this name has left.
    """
    study, name = sweep.study, sweep.study.study_name
    wanted = dataclasses.asdict(sweep.plan)
    with exclusive(sweep.runs / ".take.lock"):
        if "plan" not in study.user_attrs:
            if study.get_trials(deepcopy=False):
                raise ValueError(
                    f"--name {name}: the storage has a study of this name that is no sweep; give another name"
                )
            study.set_user_attr("id", uuid.uuid4().hex)
            study.set_user_attr("plan", wanted)
        stored = study.user_attrs["plan"]
        for key in wanted:
            if stored.get(key) != wanted[key]:
                raise ValueError(
                    f"--name {name}: this sweep was begun with {key} {stored.get(key)}, not {wanted[key]}; "
                    "give the command that began it, or another name"
                )
        for path in (sweep.runs / "place.json", sweep.results / "sweep.json"):
            if not path.exists():
                continue
            if read_json(path, "id")["id"] != study.user_attrs["id"]:
                raise ValueError(f"{path.parent}: belongs to another sweep of the name {name}; move it away")
        if not (sweep.runs / "place.json").exists():
            place = {"id": study.user_attrs["id"], "place": uuid.uuid4().hex}
            write_text(sweep.runs / "place.json", json.dumps(place) + "\n")
        if not (sweep.results / "sweep.json").exists():
            commit, dirty = git_commit(Path(__file__).parent)
            provenance = {"commit": commit, "dirty": dirty, "machine": machine(),
                          "versions": {**versions(), "optuna": optuna.__version__}}  # fmt: skip
            content = {"id": study.user_attrs["id"], "name": name, "plan": wanted, "provenance": provenance}
            write_text(sweep.results / "sweep.json", json.dumps(content, indent=1) + "\n")
    sweep.place = read_json(sweep.runs / "place.json", "place")["place"]


def parse(argv: list[str] | None) -> Any:
    parser = Parser(
        prog="benchmarks/sweep.py", description="Tunes an algorithm with Optuna. Behind --: flags of every run."
    )
    parser.add_argument("--name", required=True, help="of the sweep: the folder results/sweeps/<name>")
    parser.add_argument("--algorithm", required=True, help="a file in algos/, without .py")
    parser.add_argument("--env", help="environment (or task); default: the algorithm's")
    parser.add_argument("--steps", type=int, help="of each run; default: the algorithm's")
    parser.add_argument("--trials", type=int, required=True, help="settings that are tried, all workers together")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each trial, seeds 1, 2, ...; default 3")
    parser.add_argument("--workers", type=int, default=1, help="trials at the same time here, each with all its seeds")
    parser.add_argument(
        "--score", choices=SCORES, default="last100", help="last training episodes, or final evaluation"
    )
    parser.add_argument("--statistic", choices=STATISTICS, default="iqm", help="of the seeds' scores; default iqm")
    parser.add_argument("--pruner", choices=("median", "hyperband", "none"), default="median")
    parser.add_argument("--rungs", type=int, default=4, help="equally spaced steps at which a trial may be pruned")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    parser.add_argument(
        "--space", help="function in benchmarks/spaces.py, or file.py:function; default: the algorithm's"
    )
    parser.add_argument("--storage", help="database as Optuna takes it (postgresql://...), or a journal file")
    parser.add_argument(
        "--launcher", choices=LAUNCHERS, default="local", help="processes here, or tasks of a Ray cluster"
    )
    parser.add_argument("--runs-dir", type=Path, help="where runs live; default runs/ (ray: <results>/runs)")
    parser.add_argument("--results", type=Path, help="default results/")
    told = "then run the best settings and the defaults on N fresh seeds each; default 10"
    parser.add_argument("--confirm", type=int, nargs="?", const=10, metavar="N", help=told)
    parser.add_argument("--take-over", action="store_true", help="also trials of machines that do not come back")
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="flags of every run")
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        exit_with(f"{unknown[0]} is no flag of sweep.py; flags of the runs stand behind --")
    for name, least in (("trials", 1), ("seeds", 1), ("workers", 1), ("rungs", 0), ("seed", 0), ("confirm", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            exit_with(f"--{name} {value}: must be at least {least}")
    if args.seeds >= FRESH:
        exit_with(f"--seeds {args.seeds}: must be below {FRESH}, the first seed of the confirmation")
    if not args.name.replace("-", "_").isidentifier():
        exit_with(f"--name {args.name}: letters, digits, - and _ are allowed, since it is a folder's name")
    return args


def set_up(args: Any, algos: Path = ROOT / "algos") -> Sweep:
    """The sweep of a command line, joined.

    Raises:
        ValueError, ImportError, OSError: one line.
    """
    if optuna is None:
        raise ImportError("optuna is not installed; install it with pip install -c constraints.txt -e '.[sweep]'")
    script = algos / f"{args.algorithm}.py"
    module = load_algorithm(script)
    check_flags(script, args.flags, "behind --")
    language = issubclass(module.Args, LanguageArgs)
    words = [*args.flags]
    words += ["--task" if language else "--env", args.env] if args.env else []
    words += ["--total-tokens" if language else "--total-timesteps", str(args.steps)] if args.steps is not None else []
    given = parse_args(module.Args, module.PRESETS, words, getattr(module, "VARIANTS", None))
    plan = make_plan(args, module.Args, given)
    space, check = load_space(plan.space), make_check(module.Args, plan)
    named = {word.partition("=")[0].strip("-").replace("-", "_").removeprefix("no_") for word in args.flags}
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    check_space(plan.space, space, check, {"seed", *plan.base, *named})
    connect(args.launcher)
    results, runs = (folder / "sweeps" / args.name for folder in places(args.results, args.runs_dir, args.launcher))
    args.storage = args.storage or str(results / "journal.log")
    runs.mkdir(parents=True, exist_ok=True)
    with storage_errors(args.storage):
        study = open_study(args.name, args.storage, make_pruner(plan))
        sweep = Sweep(plan, study, space, check, runs, results, args.trials)
        sweep.take_over, sweep.launcher, sweep.algos = args.take_over, args.launcher, algos
        join(sweep)
    return sweep


def main(argv: list[str] | None = None, algos: Path = ROOT / "algos") -> int:
    args = parse(argv)
    with usage_errors():
        sweep = set_up(args, algos)
    listen()
    try:
        with usage_errors(), storage_errors(args.storage):
            work(sweep, args.workers)
            trials = sweep.study.get_trials(deepcopy=False)[: sweep.trials]
            left = sweep.trials - sum(trial.state.is_finished() for trial in trials)
            complete = [trial for trial in trials if trial.state == optuna.trial.TrialState.COMPLETE]
            code = 1 if left or not complete else 0
            if left:
                told = f"{left} of {sweep.trials} trials are with other workers"
                print(f"{told}; should one of them not come back, the same command goes on", file=sys.stderr)
            elif not complete:
                print("no trial was completed: benchmarks/sweep.py printed why", file=sys.stderr)
            elif args.confirm:
                code = confirm(sweep, args.confirm, args.workers * sweep.plan.seeds)
            for path in sweep_report.write(sweep.study, sweep.trials, sweep.results, sweep.algos):
                print(path)
            return code
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
