"""Runs one published run again and says whether the same came out: `python benchmarks/run.py --redo <its folder>`.

The flags are those stored with the run. On the same kind of machine, with the same versions and the same code, all
numbers are the same to the last bit. Where they are not, the new returns are compared with the published seeds of that
setting: they should lie in the interval in which one more seed lies with a probability of 95 %.
"""

import json
import math
import os
import shutil
import statistics
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import metadata
from pathlib import Path
from typing import Any

import run
from records import COLUMNS, ROOT, read_curve, read_json, read_run, read_summary, write_text
from suites import PEERS, Entry

from cleanrl_zoo.run.provenance import git_commit, machine, versions

RETURNS = {"last episodes": "train_last100", "evaluation": "final_eval"}
# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom; the last one serves for more
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def redo(folder: Path, runs_dir: Path, algos: Path = ROOT / "algos") -> int:
    """Runs what was published in `folder` again and prints the outcome; exit code 0 for equal or within, else 1.

    An interrupted call goes on from its last checkpoint when it is made again (a peer's run starts again).

    Raises:
        ValueError: one line, if the folder is not a published run or a file is damaged.
    """
    check_is_a_run(folder)
    then, shown = read_run(folder), shown_path(folder)
    read_summary(folder)
    place = Path("redo").joinpath(*folder.resolve().parts[-4:])
    job = make_job(then, runs_dir / place, runs_dir / "redo" / "published" / place.relative_to("redo"))
    now = here(then["provenance"])
    prepare(job, then, now)
    print(f"{shown}: running again in {job.run_dir}{took(then)}", file=sys.stderr, flush=True)
    os.chdir(ROOT)  # paths among a run's flags are relative to it
    try:
        train(job, then, algos)
    except ValueError as error:
        print(f"{shown}: could not be run again: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    difference = first_difference(folder, job.published)
    if difference is None:
        points = len(read_curve(folder / "curve.csv"))
        print(f"{shown}: bit-equal, {points} points of the curve and all returns")
    else:
        inside, text = compare(folder, job.published)
        print(f"{shown}: not bit-equal ({difference}), {'within' if inside else 'outside'} the published seeds: {text}")
    changes = differences(then, now, read_run(job.published)["args"])
    print(f"differs from then: {'; '.join(changes)}" if changes else "same commit, versions, machine and flags as then")
    return 0 if difference is None or inside else 1


def shown_path(folder: Path) -> str:
    """The folder as the README's commands write it."""
    return str(folder.resolve().relative_to(ROOT)) if folder.resolve().is_relative_to(ROOT) else str(folder)


def check_is_a_run(folder: Path) -> None:
    """Raises ValueError, saying what is there instead, unless `folder` is that of a published run."""
    if (folder / "run.json").exists() and folder.name.startswith("seed_"):
        return
    if "tabular" in folder.resolve().parts:
        raise ValueError(
            f"--redo {folder}: the textbook's figures are no single runs; made again they are by "
            "python benchmarks/tabular.py --only <figure> --results again"
        )
    known = [str(path.parent.relative_to(ROOT)) for path in ROOT.glob("results/*/*/*/seed_*/run.json")]
    near = get_close_matches(shown_path(folder), known, n=1, cutoff=0.3)
    advice = f"; the nearest is {near[0]}" if near else ""
    raise ValueError(
        f"--redo {folder}: no published run, which is a folder results/<suite>/<name>/<env>/seed_<k>{advice}"
    )


def make_job(then: dict[str, Any], run_dir: Path, published: Path) -> run.Job:
    """The job that makes the run `then` (its run.json) again; a peer is asked by all of its stored flags."""
    args, algorithm = then["args"], then["algorithm"]
    language = "task" in args
    names = ("task", "total_tokens") if language else ("env", "total_timesteps")
    missing = [name for name in (*names, "seed") if name not in args]
    if missing:
        raise ValueError(f"run.json of {published.name}: damaged (its flags lack {', '.join(missing)})")
    flags: list[str] = []
    if algorithm in PEERS:
        for name, value in args.items():
            if name not in (*names, "seed", "threads") and value is not None and value is not False:
                flags += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    entry = Entry(algorithm, args[names[0]], (args["seed"],), args[names[1]], tuple(flags))
    return run.Job(entry, args["seed"], run_dir, published)


def here(then: dict[str, Any]) -> dict[str, Any]:
    """Commit, versions and machine of now, in the words of a run's provenance `then`."""
    commit, dirty = git_commit(ROOT)
    found = versions()
    for name in (*then["versions"], *then["env"]["versions"]):
        if name not in found:
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                found[name] = "not installed"
    return {"commit": commit, "dirty": dirty, "versions": found, "machine": machine()}


def prepare(job: run.Job, then: dict[str, Any], now: dict[str, Any]) -> None:
    """Leaves the run's folder as a cut run that `run.start` goes on with, from an earlier call's checkpoint or from 0.

    An earlier call's is taken up only if it was cut, of the same run, and by the same code on the same machine.
    """
    note = job.beside(".json")
    asked = json.loads(json.dumps({"run": then, "now": now}))
    same = note.exists() and not (job.run_dir / "summary.json").exists() and read_json(note) == asked
    shutil.rmtree(job.published, ignore_errors=True)
    if same and (job.run_dir / "run.json").exists():
        return
    shutil.rmtree(job.run_dir, ignore_errors=True)
    write_text(note, json.dumps(asked, indent=1))
    if not job.entry.is_peer:
        write_text(job.run_dir / "run.json", json.dumps(then, indent=1))


def train(job: run.Job, then: dict[str, Any], algos: Path) -> None:
    """Runs the job to its end and publishes it.

    A run whose file has other flags by now cannot be resumed: it is started by its stored command line instead.
    """
    script = (run.BENCHMARKS if job.entry.is_peer else algos) / f"{job.entry.algorithm}.py"
    if not script.exists():
        raise ValueError(f"{script.parent.name}/{script.name} does not exist any more")
    if not run.claim(job):
        raise ValueError(f"{job.run_dir}: another process is at it; wait for it")
    try:
        run_once(job, algos)
        if "of another version" in job.beside(".stderr").read_text() and not (job.run_dir / "summary.json").exists():
            shutil.rmtree(job.run_dir)
            job.entry = Entry(
                job.entry.algorithm, job.entry.env, job.entry.seeds, job.entry.steps, own_flags(then.get("command", ()))
            )
            run_once(job, algos)
        run.settle(job)
    finally:
        os.close(job.lock)


def run_once(job: run.Job, algos: Path) -> None:
    run.start(job, algos)
    try:
        job.process.wait()
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from here", file=sys.stderr, flush=True)
        run.stop([job])
        sys.exit(130)


def own_flags(command: Sequence[str]) -> tuple[str, ...]:
    """The words of a stored command line without the script and what `run.start` says itself."""
    given = ("run-dir", "env-threads", "env", "task", "seed", "total-timesteps", "total-tokens")
    words: list[str] = []
    skip = False
    for word in command[2:]:
        if word.startswith("--"):
            skip = word.removeprefix("--").partition("=")[0] in given
        if not skip:
            words.append(word)
    return tuple(words)


def took(then: dict[str, Any]) -> str:
    seconds = then.get("timing", {}).get("wall_clock_s")
    return "" if seconds is None else f"; it took {seconds:,.0f} s then"


def first_difference(published: Path, again: Path) -> str | None:
    """Where two runs' published files differ first; None if all that both have is equal to the last bit.

    A loss that only one of them noted does not count.
    """
    old, new = read_curve(published / "curve.csv"), read_curve(again / "curve.csv")
    known = [{name for point in curve for name in point} for curve in (old, new)]
    shared = [*COLUMNS, *sorted((known[0] & known[1]) - set(COLUMNS))]
    for a, b in zip(old, new, strict=False):
        for name in shared:
            if a.get(name) != b.get(name):
                return f"at step {a['step']:.0f} {name} was {a.get(name)}, is {b.get(name)}"
    if len(old) != len(new):
        return f"the curve had {len(old)} points, has {len(new)}"
    before, after = read_summary(published), read_summary(again)
    for key in (*RETURNS.values(), "eval_curve"):
        if before[key] != after[key]:
            return f"{key} differs"
    return None


def compare(published: Path, again: Path) -> tuple[bool, str]:
    """Whether the new returns lie in the intervals of all published seeds of the setting, and the numbers."""
    folders = sorted(path.parent for path in published.parent.glob("seed_*/summary.json"))
    seeds, new = [read_summary(folder) for folder in folders], read_summary(again)
    if len(seeds) < 2:
        return False, "there is only one, which gives no interval"
    inside, texts = True, []
    for title, key in RETURNS.items():
        values, value = [summary[key]["mean"] for summary in seeds], new[key]["mean"]
        if value is None or None in values:
            continue
        low, high = interval(values)
        inside = inside and low <= value <= high
        texts.append(f"{title} {value:.5g} (interval {low:.5g} to {high:.5g})")
    return inside, f"{', '.join(texts)}; 95 % for one more seed beside {len(seeds)}"


def interval(values: Sequence[float]) -> tuple[float, float]:
    """In which one more draw lies with 95 %: mean ± t·s·√(1 + 1/n), s with ddof 1, for normal draws."""
    n = len(values)
    t = STUDENT[min(n - 1, len(STUDENT)) - 1]
    half = t * statistics.stdev(values) * math.sqrt(1 + 1 / n)
    return statistics.fmean(values) - half, statistics.fmean(values) + half


def differences(then: dict[str, Any], now: dict[str, Any], flags: dict[str, Any]) -> list[str]:
    """What is not as it was when the run was published: commit, versions, machine, flags."""
    old, changes = then["provenance"], []
    commits = [f"{(p['commit'] or 'none')[:12]}{' (modified)' if p['dirty'] else ''}" for p in (old, now)]
    pairs = [("commit", *commits)]
    pairs += [(n, v, now["versions"].get(n)) for n, v in {**old["versions"], **old["env"]["versions"]}.items()]
    pairs += [(name, value, now["machine"].get(name)) for name, value in old["machine"].items()]
    before = then["args"]
    pairs += [(f"flag {n}", before.get(n, "absent"), flags.get(n, "absent")) for n in {**before, **flags}]
    changes += [f"{name} {a} → {b}" for name, a, b in pairs if a != b]
    return changes
