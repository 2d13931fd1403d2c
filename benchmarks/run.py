"""Runs a suite: starts what is missing, resumes what was cut, publishes what is finished.

    python benchmarks/run.py --suite first_light --jobs 2
    python benchmarks/run.py --suite mujoco --only trpo a2c/Hopper-v4
    python benchmarks/run.py --redo results/classic/ppo/CartPole-v1/seed_1   # one published run again: see redo.py
    python benchmarks/run.py --suite mujoco --jobs 64 --launcher ray         # on a cluster: see docs/sweeps.md

One run is one process with one thread, unless its entry says `--threads`. Several runners may work on one suite: a
lock per run keeps them apart.
Exit code 0: every run of the suite is published; 1: some are not (failures are listed); 130: interrupted.
"""

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from launch import LAUNCHERS, STOP_SECONDS, Process, RayRun, check_flags, connect, launch, places
from records import (
    ROOT,
    Parser,
    check_made_as_asked,
    publish,
    publish_policy,
    read_run,
    read_summary,
    source,
    suite,
)
from suites import PLANNERS, Entry

from cleanrl_zoo.run.arguments import folder_name, nearest, usage_errors

BENCHMARKS = Path(__file__).parent


@dataclass
class Job:
    """One run of the suite and where it lives."""

    entry: Entry
    seed: int
    run_dir: Path
    published: Path
    lock: int = -1  # file descriptor
    process: Process | RayRun | None = None
    problem: str = ""  # why it was not started

    @property
    def is_published(self) -> bool:
        return (self.published / "summary.json").exists()

    @property
    def title(self) -> str:
        return f"{self.entry.name} {self.entry.env} seed {self.seed}"

    def beside(self, suffix: str) -> Path:
        return self.run_dir.with_name(self.run_dir.name + suffix)


def claim(job: Job) -> bool:
    """Takes the run's lock; False if another runner (or a run that outlived its runner) holds it.

    The lock belongs to the open file, which the run inherits: it is free once runner and run are both gone.
    """
    job.run_dir.parent.mkdir(parents=True, exist_ok=True)
    job.lock = os.open(job.beside(".lock"), os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(job.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(job.lock)
        return False
    return True


def start(job: Job, algos: Path, launcher: str = "local") -> None:
    """Starts the run, or resumes it from its last checkpoint; a peer's begins again.

    Raises:
        ValueError: if what lies in the run's folder is not the run that the suite asks for.
    """
    script = (BENCHMARKS if job.entry.is_peer else algos) / f"{job.entry.algorithm}.py"
    if (job.run_dir / "run.json").exists():
        check_made_as_asked(job.run_dir, job.entry, job.seed)
        if job.entry.is_peer:
            print(f"{job.title}: was cut; a peer's run cannot be resumed, it starts again", flush=True)
    own = [word for name, value in job.entry.asked.items() for word in (f"--{name}", value)]
    steps_envs = not (job.entry.is_peer or job.entry.is_language)
    one = ["--threads", 1, "--env-threads", 1] if steps_envs else ["--threads", 1]
    first = [sys.executable, script, "--run-dir", job.run_dir, *one, *own, "--seed", job.seed, *job.entry.flags]
    again = None if job.entry.is_peer else [sys.executable, script, "--resume", job.run_dir]
    files = job.run_dir, job.beside(".stdout"), job.beside(".stderr")
    job.process = launch(launcher, first, again, *files, locks=(job.lock,))


def stop(jobs: list[Job]) -> None:
    """Interrupts the runs as Ctrl-C does, waits, and kills those that do not end."""
    for job in jobs:
        job.process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + STOP_SECONDS
    try:
        for job in jobs:
            job.process.wait(max(0.0, deadline - time.monotonic()))
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        for job in jobs:
            if job.process.poll() is None:
                job.process.kill()
                job.process.wait()


def listen() -> None:
    """Makes a SIGTERM stop as cleanly as Ctrl-C, and a SIGINT too where a shell's `&` made this process ignore it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


def settle(job: Job) -> None:
    """Publishes the finished run if it is not published yet.

    Raises:
        ValueError: saying why there is nothing to publish.
    """
    if job.problem:
        raise ValueError(job.problem)
    if not job.is_published:
        if not (job.run_dir / "summary.json").exists():
            tail = job.beside(".stderr").read_text().strip().splitlines()[-8:]
            raise ValueError("\n    ".join([f"exit code {job.process.returncode}", *tail]))
        check_made_as_asked(job.run_dir, job.entry, job.seed)
        publish(job.run_dir, job.published)
    check_made_as_asked(job.published, job.entry, job.seed)


def line(job: Job) -> str:
    """What a published run scored."""
    summary, run = read_summary(job.published), read_run(job.published)
    train, final = summary["train_last100"]["mean"], summary["final_eval"]["mean"]
    digits = 3 if job.entry.is_language else 1
    episodes = "" if train is None else f"last episodes {train:.{digits}f}, "  # supervised training has none
    seconds = run["timing"]["wall_clock_s"]
    return f"{job.title}: {episodes}evaluation {final:.{digits}f}, {seconds:.0f} s"


def run_jobs(jobs: list[Job], slots: int, algos: Path = ROOT / "algos", launcher: str = "local") -> int:
    """Brings every job to its published results, `slots` at a time; returns the exit code."""
    done, elsewhere, failures = 0, 0, []
    pending, active = deque(jobs), []
    try:
        while pending or active:
            while pending and len(active) < slots:
                job = pending.popleft()
                if not claim(job):
                    print(f"{job.title}: in the hands of another runner", flush=True)
                    elsewhere += 1
                    continue
                active.append(job)
                if not job.is_published and not (job.run_dir / "summary.json").exists():
                    try:
                        start(job, algos, launcher)
                    except ValueError as error:
                        job.problem = str(error)
            for job in [job for job in active if job.process is None or job.process.poll() is not None]:
                active.remove(job)
                try:
                    settle(job)
                    text = line(job)
                    done += 1
                    print(f"[{done}/{len(jobs)}] {text}{'' if job.process else ' (was there)'}", flush=True)
                except ValueError as error:
                    failures.append(f"{job.title}: {error}")
                    print(f"FAILED {failures[-1].splitlines()[0]}", flush=True)
                os.close(job.lock)
            if active:
                time.sleep(0.1)
    except KeyboardInterrupt:
        running = [job for job in active if job.process]
        print(
            f"interrupted: stopping {len(running)} run(s); the same command goes on from here",
            file=sys.stderr,
            flush=True,
        )
        stop(running)
        return 130
    for failure in failures:
        print(failure, file=sys.stderr)
    if done < len(jobs):
        counts = f"{done} of {len(jobs)} published, {len(failures)} failed, {elsewhere} with another runner"
        print(counts, file=sys.stderr)
    return 0 if done == len(jobs) else 1


def chosen(name: str, only: list[str], entries: list[Entry] | None = None) -> list[Entry]:
    """Those of the suite's entries (or of these) that one of the words `only` names; all of them without a word.

    Raises:
        ValueError: if a word names none.
    """
    entries = list(suite(name)) if entries is None else entries
    words = {entry: {entry.name, entry.env, f"{entry.name}/{entry.env}"} for entry in entries}
    for word in only:
        if not any(word in known for known in words.values()):
            known = ", ".join(dict.fromkeys([e.name for e in entries] + [e.env for e in entries]))
            raise ValueError(f"--only {word}: the suite {name} has {known} (and name/environment)")
    return [entry for entry in entries if not only or words[entry] & set(only)]


def make_jobs(name: str, entries: list[Entry], runs_dir: Path, results: Path) -> list[Job]:
    """One job for each run that the entries need, be it another suite's; what two entries share is there once.

    Raises:
        ValueError: if the file of an algorithm does not exist, or has no such flag.
    """
    jobs: dict[Path, Job] = {}
    for entry in entries:
        folder = BENCHMARKS if entry.is_peer else ROOT / "algos"
        if not (folder / f"{entry.algorithm}.py").exists():
            near = nearest(entry.algorithm, [path.stem for path in folder.glob("*.py")])
            raise ValueError(
                f"--suite {name}: {folder.name}/{entry.algorithm}.py does not exist; the nearest is {near}"
            )
        if entry.flags and not entry.is_peer:
            check_flags(folder / f"{entry.algorithm}.py", entry.flags, f"--suite {name}: {entry.name}")
        for seed in entry.seeds:
            place, made_by = source(name, entry, seed)
            jobs.setdefault(place, Job(made_by, seed, runs_dir / place, results / place))
    return list(jobs.values())


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="benchmarks/run.py", description="Runs a suite and publishes its results.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--suite", help="a name in benchmarks/suites.py, also with _sb3 or _sbx behind it: see peers.py")
    what.add_argument("--redo", type=Path, metavar="FOLDER", help="one published run, to be run again and compared")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time, one thread each; default 1")
    parser.add_argument("--runs-dir", type=Path, help="where runs live; default runs/ (ray: <results>/runs)")
    parser.add_argument("--results", type=Path, help="published results; default results/")
    parser.add_argument(
        "--launcher", choices=LAUNCHERS, default="local", help="processes here, or tasks of a Ray cluster"
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="of the suite, these: <name>, <env> or <name>/<env>"
    )
    parser.add_argument("--zoo", action="store_true", help="run nothing; put the best policies into <results>/zoo")
    args = parser.parse_args(argv)
    results, runs_dir = places(args.results, args.runs_dir, args.launcher)
    if args.redo is not None:
        import redo  # which imports this file

        listen()
        with usage_errors():
            return redo.redo(args.redo, runs_dir)
    with usage_errors():
        if args.jobs < 1:
            raise ValueError(f"--jobs {args.jobs}: must be at least 1")
        entries = chosen(args.suite, args.only)
        jobs = make_jobs(args.suite, entries, runs_dir, results)
        runs_dir.mkdir(parents=True, exist_ok=True)
    if args.zoo:
        with usage_errors():
            for entry in entries:
                runs = [job.run_dir for job in jobs if job.entry == entry and (job.run_dir / "summary.json").exists()]
                if entry.algorithm in PLANNERS:
                    print(f"{entry.name} {entry.env}: plans with its model; there is no policy to put into the zoo")
                elif runs and not entry.is_peer:
                    folder = results / "zoo" / entry.name / folder_name(entry.env)
                    print(f"{folder}: from {publish_policy(runs, folder)}")
                elif not entry.is_peer:
                    print(f"{entry.name} {entry.env}: no finished run in {runs_dir}")
        return 0
    with usage_errors():
        connect(args.launcher)
    listen()
    return run_jobs(jobs, args.jobs, launcher=args.launcher)


if __name__ == "__main__":
    sys.exit(main())
