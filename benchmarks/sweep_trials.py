"""Trials of a sweep: how they are drawn, scored, pruned, told, and taken over from a worker that is gone.

A trial is a set of settings and one run per seed. It belongs to the worker that holds its lock, a file beside its runs,
which the system frees however that worker ends. All that is known of it is in Optuna's study and in the folders of its
runs, so that another worker can go on with it.
"""

import contextlib
import fcntl
import json
import math
import os
import shutil
import statistics
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from launch import RETRIES
from records import ROOT, publish, read_summary, write_text
from run import Job, claim, start, stop
from suites import Entry

from cleanrl_zoo.core.statistics import interquartile_mean
from cleanrl_zoo.run.arguments import flag

try:
    import optuna
except ImportError:  # told by sweep.py in one line
    optuna = None

SCORES = {"last100": "train_last100", "eval": "final_eval"}  # name of a score: where summary.json has it
STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {
    "iqm": interquartile_mean,
    "mean": statistics.fmean,
    "median": statistics.median,
    "min": min,
}
LAST = 100  # training episodes that a score counts
DRAWS = 1000  # how often a point is drawn until it is a new one
RANDOM_AFTER = 20  # from then on at random: the model's favourite may be the only point that it draws
POLL_SECONDS = 1.0


class Refused(ValueError):
    """Settings that exist and cannot be combined."""


@dataclass(frozen=True)
class Plan:
    """What all workers on a sweep must agree on; it is stored with the sweep."""

    algorithm: str
    env: str
    steps: int
    seeds: int
    score: str
    statistic: str
    pruner: str
    rungs: list[int]  # steps at which a trial may be pruned
    seed: int  # of the draws
    space: str
    base: dict[str, Any]  # settings that all trials have in common


@dataclass
class Sweep:
    """A plan with everything that carries it out here."""

    plan: Plan
    study: Any  # optuna.Study
    space: Callable[[Any], dict[str, Any]]
    check: Callable[[dict[str, Any]], None]  # raises Refused for settings that the file would refuse
    runs: Path  # folder of the runs and of the locks
    results: Path
    trials: int
    place: str = ""  # which folder of runs this is: another machine may have its own
    take_over: bool = False
    launcher: str = "local"
    algos: Path = ROOT / "algos"


@dataclass
class Held:
    """A trial that this worker carries out: its runs, one per seed, side by side."""

    trial: Any  # optuna.trial.Trial
    jobs: list[Job]
    lock: int  # file descriptor
    reported: set[int] = field(default_factory=set)  # rungs that the study knows the value of
    decided: set[int] = field(default_factory=set)  # rungs where it was not pruned
    failures: list[str] = field(default_factory=list)


# Scores


def read_rows(run_dir: Path) -> list[dict[str, float]]:
    """The complete rows of a log that may be written at this moment; none before there is a log."""
    try:
        text = (run_dir / "metrics.jsonl").read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def score_at(rows: list[dict[str, float]], step: int, score: str) -> float | None:
    """A run's score as it was when it reached `step`.

    last100: mean return of the training episodes in the last rows that hold 100 together; eval: the last evaluation.
    None before the run is there, NaN where no episode has ended or nothing was evaluated.
    """
    end = next((index for index, row in enumerate(rows) if row["global_step"] >= step), None)
    if end is None:
        return None
    total, episodes = 0.0, 0.0
    for row in reversed(rows[: end + 1]):
        if score == "eval" and "eval/episodic_return" in row:
            return row["eval/episodic_return"]
        if score == "last100" and episodes < LAST and row.get("charts/episodes"):
            total += row["charts/episodic_return"] * row["charts/episodes"]
            episodes += row["charts/episodes"]
    return total / episodes if episodes else math.nan


def final_score(folder: Path, score: str) -> float | None:
    """The score of the finished run, or published run, in `folder`; None if no episode ended."""
    return read_summary(folder)[SCORES[score]]["mean"]


# Draws


def sample(sweep: Sweep, number: int, attempt: int, random: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """A point of trial `number` and the settings that the space makes of it.

    It depends on the plan's seed, the trial, the attempt and the earlier trials, not on the process that draws. It is
    drawn in a copy of the study, since what a study has once suggested cannot be taken back.
    """
    seed = int(np.random.SeedSequence((sweep.plan.seed, number, attempt)).generate_state(1)[0])
    samplers = optuna.samplers
    sampler = samplers.RandomSampler(seed=seed) if random else samplers.TPESampler(seed=seed, constant_liar=True)
    copy = optuna.create_study(
        study_name=sweep.study.study_name, direction="maximize", sampler=sampler, pruner=sweep.study.pruner
    )
    copy.add_trials([t for t in sweep.study.get_trials(deepcopy=False) if t.number < number])
    trial = copy.ask()
    settings = json.loads(json.dumps(sweep.space(trial)))  # as they will be read again: lists for tuples
    return trial.params, settings


def draw(sweep: Sweep, trial: Any) -> dict[str, Any]:
    """The settings of a trial: those it has, or new ones that the algorithm's file takes and no other trial has.

    A worker writes its candidate down before it looks at those of the others. Of two workers with equal candidates the
    one that wrote later sees the other's, whatever the storage, so that never both keep them.

    Raises:
        ValueError: if no such point is found.
    """
    if not trial.params:
        for attempt in range(DRAWS):
            point, settings = sample(sweep, trial.number, attempt, attempt >= RANDOM_AFTER)
            try:
                sweep.check(settings)
            except Refused:
                continue
            if settings in others(sweep, trial.number):
                continue
            trial.set_user_attr("drawn", {"point": point, "settings": settings})
            if settings not in others(sweep, trial.number):
                break
        else:
            raise ValueError(
                f"trial {trial.number}: {DRAWS} draws gave nothing new that {sweep.plan.algorithm}.py takes; "
                f"the space {sweep.plan.space} is too small for --trials {sweep.trials}"
            )
    drawn = trial.user_attrs["drawn"]
    sweep.study.sampler = optuna.samplers.PartialFixedSampler(drawn["point"], optuna.samplers.RandomSampler())
    sweep.space(trial)
    return drawn["settings"]


def others(sweep: Sweep, number: int) -> list[dict[str, Any]]:
    """The settings of all other trials, and the candidates of those that are being drawn."""
    trials = sweep.study.get_trials(deepcopy=False)
    return [t.user_attrs["drawn"]["settings"] for t in trials if t.number != number and "drawn" in t.user_attrs]


# Trials


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Only one process at a time is in here."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def lock_trial(sweep: Sweep, number: int) -> int | None:
    """The trial's lock, which the system frees when this process ends in whatever way; None if another one has it."""
    descriptor = os.open(sweep.runs / f"{label(number)}.lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def label(number: int) -> str:
    return f"trial_{number:03d}"


def take(sweep: Sweep) -> Held | None:
    """A trial whose worker is gone, or a new one; None while all are finished or in other hands.

    Raises:
        ValueError: if nothing new can be drawn.
    """
    with exclusive(sweep.runs / ".take.lock"):
        frozen, lock = abandoned(sweep) or new(sweep) or (None, None)
        if frozen is None:
            return None
        trial = optuna.trial.Trial(sweep.study, frozen._trial_id)
        trial.set_user_attr("place", sweep.place)
        settings = draw(sweep, trial)
    words = [
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in settings.items()
    ]
    print(f"trial {trial.number}: {', '.join(words)}", flush=True)
    jobs = jobs_of(sweep, "trials", label(trial.number), settings, range(1, sweep.plan.seeds + 1))
    reported = sorted(frozen.intermediate_values)
    # the last one is decided again: its worker may have been killed between the report and what followed from it
    return Held(trial, jobs, lock, reported=set(reported), decided=set(reported[:-1]))


def abandoned(sweep: Sweep) -> tuple[Any, int] | None:
    """A trial that nobody works on any more, and its lock."""
    running = optuna.trial.TrialState.RUNNING
    for trial in sweep.study.get_trials(deepcopy=False)[: sweep.trials]:
        here = sweep.take_over or trial.user_attrs.get("place") == sweep.place
        if trial.state != running or not here or (lock := lock_trial(sweep, trial.number)) is None:
            continue
        trial = sweep.study.get_trials(deepcopy=False)[trial.number]
        if trial.state == running:  # else its worker has just told it
            print(f"trial {trial.number}: goes on where its worker left it", flush=True)
            return trial, lock
        os.close(lock)
    return None


def new(sweep: Sweep) -> tuple[Any, int] | None:
    """A new trial and its lock; None if there are as many as there should be."""
    states, token = optuna.trial.TrialState, uuid.uuid4().hex
    if len(sweep.study.get_trials(deepcopy=False)) >= sweep.trials:
        return None
    attributes = {"place": sweep.place, "token": token}
    sweep.study.add_trial(optuna.trial.create_trial(state=states.RUNNING, user_attrs=attributes))
    trials = sweep.study.get_trials(deepcopy=False)
    trial = next(trial for trial in trials if trial.user_attrs.get("token") == token)
    if trial.number >= sweep.trials:  # a machine without this folder was faster: one too many, which nothing counts
        sweep.study.tell(trial.number, state=states.FAIL)
        return None
    return trial, lock_trial(sweep, trial.number)


def jobs_of(sweep: Sweep, folder: str, name: str, settings: dict[str, Any], seeds: Sequence[int]) -> list[Job]:
    """One run per seed with these settings, which it gets as a preset file."""
    plan, preset = sweep.plan, sweep.runs / f"{name}.json"
    write_text(preset, json.dumps(plan.base | settings, indent=1) + "\n")
    own = [(flag(key), str(plan.base[key])) for key in ("threads", "env_threads", "device") if key in plan.base]
    flags = ("--preset", str(preset), *(word for pair in own for word in pair))
    entry = Entry(plan.algorithm, plan.env, tuple(seeds), plan.steps, flags, name)
    return [
        Job(entry, seed, sweep.runs / name / f"seed_{seed}", sweep.results / folder / name / f"seed_{seed}")
        for seed in seeds
    ]


def is_finished(job: Job) -> bool:
    return (job.run_dir / "summary.json").exists()


def advance(sweep: Sweep, held: Held) -> bool:
    """Starts what is to be started, reports the rungs that all seeds have reached; True once the trial is told."""
    plan, trial, state = sweep.plan, held.trial, optuna.trial.TrialState
    for job in held.jobs:
        if job.process is not None and job.process.poll() is not None:
            if job.process.returncode == 2:
                raise ValueError(
                    f"trial {trial.number}, seed {job.seed}{last_line(job)}; mend that, and the same command goes on"
                )
            if not is_finished(job):
                held.failures.append(f"seed {job.seed}: exit code {job.process.returncode}{last_line(job)}")
                print(f"trial {trial.number}: {held.failures[-1]}", flush=True)
            release(job)
    if len(held.failures) > RETRIES:
        trial.set_user_attr("problem", held.failures[-1])
        return end(sweep, held, None, state.FAIL, f"failed {len(held.failures)} times")
    for job in held.jobs:
        # the lock is taken while a run lives on whose worker was killed: its log is read all the same
        if job.process is None and not is_finished(job) and claim(job):
            if is_finished(job):
                release(job)
            else:
                start(job, sweep.algos, sweep.launcher)

    all_finished = all(is_finished(job) for job in held.jobs)  # first, so that then the logs are whole
    logs = [read_rows(job.run_dir) for job in held.jobs]
    for rung in [rung for rung in plan.rungs if rung not in held.decided]:
        values = [score_at(rows, rung, plan.score) for rows in logs]
        if None in values:
            break
        held.decided.add(rung)
        if any(math.isnan(value) for value in values):
            continue  # a seed without an episode so far: nothing to compare
        if rung not in held.reported:
            held.reported.add(rung)
            trial.set_user_attr(f"seeds at {rung}", values)
            trial.report(STATISTICS[plan.statistic](values), rung)
        if trial.should_prune():
            value = STATISTICS[plan.statistic](values)
            return end(sweep, held, None, state.PRUNED, f"pruned at step {rung:,} with {value:.4g}")

    if not all_finished:
        return False
    scores = [final_score(job.run_dir, plan.score) for job in held.jobs]
    if None in scores:
        trial.set_user_attr("problem", "no episode ended: give more --steps or --score eval")
        return end(sweep, held, None, state.FAIL, "no episode ended")
    for job in held.jobs:
        publish(job.run_dir, job.published)
    trial.set_user_attr("scores", scores)
    value = STATISTICS[plan.statistic](scores)
    told = ", ".join(f"{score:.4g}" for score in scores)
    return end(sweep, held, value, state.COMPLETE, f"{value:.4g} (seeds: {told})")


def last_line(job: Job) -> str:
    """The end of what a run said about its failure."""
    lines = job.beside(".stderr").read_text().strip().splitlines()
    return f" ({lines[-1]})" if lines else ""


def release(job: Job) -> None:
    os.close(job.lock)
    job.process = None


def end(sweep: Sweep, held: Held, value: float | None, state: Any, outcome: str) -> bool:
    """Tells the study how the trial ended, which counts once whoever else tells it, and stops what still runs of it."""
    stop_runs([held])
    sweep.study.tell(held.trial.number, value, state=state, skip_if_finished=True)
    os.close(held.lock)
    for job in held.jobs:  # nothing goes on from these any more
        shutil.rmtree(job.run_dir / "checkpoints", ignore_errors=True)
    trials = sweep.study.get_trials(deepcopy=False)[: sweep.trials]
    finished = sum(trial.state.is_finished() for trial in trials)
    print(f"[{finished}/{sweep.trials}] trial {held.trial.number}: {outcome}", flush=True)
    return True


def stop_runs(helds: list[Held]) -> None:
    """Stops the runs of these trials; each can be gone on with from its last checkpoint."""
    running = [job for held in helds for job in held.jobs if job.process is not None]
    stop(running)
    for job in running:
        release(job)


def work(sweep: Sweep, workers: int) -> None:
    """Carries out trials, `workers` at a time, until none is left to take.

    Whatever ends it early stops the runs; their trials go on with the next worker.
    """
    active: list[Held] = []
    try:
        while True:
            while len(active) < workers and (held := take(sweep)) is not None:
                active.append(held)
            if not active:
                return
            for held in list(active):
                if advance(sweep, held):
                    active.remove(held)
            time.sleep(POLL_SECONDS)
    finally:
        if active:
            stop_runs(active)
            for held in active:
                os.close(held.lock)
