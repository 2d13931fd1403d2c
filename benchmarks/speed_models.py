"""Time of a planning step here and in mbrl-lib, and what seven members of an ensemble cost beside one.

    python -m venv ~/mbrl && ~/mbrl/bin/pip install torch==2.13.0 numpy packaging && ~/mbrl/bin/pip install --no-deps \
        mbrl==0.2.0 hydra-core==1.3.2 omegaconf==2.3.0 antlr4-python3-runtime==4.9.3 termcolor gymnasium tqdm pyyaml
    python benchmarks/speed_models.py --mbrl-python ~/mbrl/bin/python

A planning step is a whole search for a plan: the same network, plans, rounds, particles and propagation on both sides,
alternating processes on the same core, the median of the repeats. Ours is the evaluation of a run of algos/pets.py,
whose every step is such a search (`time/eval` of its log over the episode's 200 steps), compiled, with compilation
before it; mbrl-lib's is 200 calls of its agent (`peers_mbrl.py`). Training is `fit` of nn/ensemble.py for a fixed
number of epochs over the same data, compiled, with 7 members and with 1: the goal is at most 1.3 times seven times the
one. Writes `results/speed/<name>.json` (every single time) and `.md`.
"""

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
from records import ROOT, Parser, read_metrics, write_text
from speed import IDLE_CORES, check_idle, confine, disturbed, installed, thread_variables, timed

from cleanrl_zoo.nn import Adam, GaussianEnsemble, fit, fit_step
from cleanrl_zoo.run import compile_function, usage_errors
from cleanrl_zoo.run.provenance import git_commit, machine, versions

STEPS = 200  # planning steps that are timed: an episode of cartpole/SwingUp
GOAL = 1.3  # of seven times the training of one member
MEMBERS = (7, 1)
TRAINING = {"rows": 5000, "inputs": 14, "outputs": 12, "hidden": (200, 200, 200, 200), "epochs": 10}  # as on Hopper


@dataclass(frozen=True)
class Case:
    """A search for a plan."""

    title: str
    horizon: int
    population: int
    rounds: int
    kept: int
    hidden: tuple[int, ...]
    propagation: str = "tsinf"
    particles: int = 20
    members: int = 5


CASES: dict[str, Case] = {
    "swing_up": Case("preset swing_up", 30, 150, 3, 15, (64, 64)),
    "swing_up_ts1": Case("preset swing_up, TS-1", 30, 150, 3, 15, (64, 64), "ts1"),
    "default": Case("default settings of pets.py", 25, 400, 5, 40, (200, 200, 200)),
    "tiny": Case("to try the script", 3, 20, 2, 4, (8, 8)),
}


@dataclass
class Time:
    """One process."""

    what: str  # a case, or members_<E>
    who: str  # ours or mbrl
    repeat: int
    seconds: float  # of one planning step, or of one fit
    other_cores: float | None  # cores kept busy by other processes meanwhile; None where the system does not tell


def plan_ours(case: Case, repeat: int, threads: int) -> tuple[float, float | None]:
    """Seconds of a planning step, and what others did meanwhile."""
    flags = {"horizon": case.horizon, "population": case.population, "rounds": case.rounds, "kept": case.kept,
             "particles": case.particles, "members": case.members, "propagation": case.propagation, "seed": repeat,
             "threads": threads, "eval-episodes": 1, "learning-starts": 10, "total-timesteps": 12,
             "model-every": 1000, "max-epochs": 1, "checkpoint-every": 0}  # fmt: skip
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "algos/pets.py"), "--env", "cartpole/SwingUp-v0", *words]
        command += ["--hidden", *map(str, case.hidden), "--run-dir", f"{folder}/run"]
        *_, other = timed(command, thread_variables(threads))
        row = read_metrics(Path(folder) / "run/metrics.jsonl")[-1]
    return row["time/eval"] / row["eval/episodic_length"], other


def plan_mbrl(case: Case, repeat: int, threads: int, python: str) -> tuple[float, float | None]:
    """The same of mbrl-lib."""
    settings = {**dataclasses.asdict(case), "threads": threads, "seed": repeat, "steps": STEPS}
    command = [python, str(Path(__file__).with_name("peers_mbrl.py")), json.dumps(settings)]
    output, *_, other = timed(command, thread_variables(threads))
    seconds = json.loads(output.strip().splitlines()[-1])
    return sum(seconds) / len(seconds), other


def train(members: int, seed: int, threads: int) -> float:
    """Seconds of a fit of that many members, in this process, after one that compiles."""
    torch.set_num_threads(threads)
    draw = torch.Generator().manual_seed(seed)
    rows, size = TRAINING["rows"], (TRAINING["inputs"], TRAINING["outputs"])
    inputs, targets = (torch.randn(rows, width, generator=draw) for width in size)
    learned = rows * 4 // 5
    bootstrap = torch.randint(learned, (members, learned), generator=draw)
    model = GaussianEnsemble(members, *size, TRAINING["hidden"], generator=draw)
    optimizer, step = Adam(model.parameters()), compile_function(fit_step, True)

    def run(epochs: int) -> float:
        started = time.perf_counter()
        fit(model, optimizer, inputs, targets, bootstrap, torch.arange(learned, rows), draw, patience=epochs,
            max_epochs=epochs, step=step)  # fmt: skip
        return time.perf_counter() - started

    run(1)
    return run(TRAINING["epochs"])


def train_apart(members: int, repeat: int, threads: int) -> tuple[float, float | None]:
    """`train` in a process of its own."""
    command = [sys.executable, __file__, "--train", str(members), str(repeat), str(threads)]
    output, *_, other = timed(command, thread_variables(threads))
    return float(output.strip().splitlines()[-1]), other


def medians(times: list[Time]) -> dict[str, dict[str, float]]:
    """Median seconds by what and who."""
    found: dict[str, dict[str, list[float]]] = {}
    for item in times:
        found.setdefault(item.what, {}).setdefault(item.who, []).append(item.seconds)
    return {what: {who: median(values) for who, values in sides.items()} for what, sides in found.items()}


def table(record: dict[str, Any]) -> str:
    """The medians as Markdown, with what is needed to judge them."""
    found, lines = record["medians"], []
    plans = [name for name in found if name in CASES]
    if plans:
        lines += ["| a planning step | ours | mbrl-lib | times as fast |", "| --- | --- | --- | --- |"]
    for name in plans:
        sides = found[name]
        cells = [CASES[name].title, f"{1000 * sides['ours']:,.1f} ms", "–", "–"]
        if "mbrl" in sides:
            cells[2:] = [f"{1000 * sides['mbrl']:,.1f} ms", f"**{sides['mbrl'] / sides['ours']:.2f}**"]
        lines.append(f"| {' | '.join(cells)} |")
    many, one = (found.get(f"members_{members}", {}).get("ours") for members in MEMBERS)
    if many and one:
        lines += ["", "| training | seconds |", "| --- | --- |", f"| {MEMBERS[0]} members | {many:.2f} |"]
        lines += [f"| 1 member | {one:.2f} |"]
        lines += [f"| {MEMBERS[0]} members over {MEMBERS[0]} × one (goal: at most {GOAL}) | "
                  f"**{many / (MEMBERS[0] * one):.2f}** |"]  # fmt: skip
    where, code = record["machine"], record["commit"] or "no commit"
    packages = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    lines += ["", f"- Median of {record['repeats']} processes each, {record['threads']} thread(s) on one core of "
              f"{where['cpu']} ({where['system']}), commit {code[:12]}{' (modified)' if record['dirty'] else ''}, "
              f"{packages}."]  # fmt: skip
    for name in plans:
        case = CASES[name]
        lines.append(
            f"- {case.title}: {case.population} plans of {case.horizon} steps, {case.rounds} rounds, {case.particles} "
            f"particles, {case.propagation}, {case.members} members of {' × '.join(map(str, case.hidden))}."
        )
    if many:
        lines.append(
            f"- Training: {TRAINING['rows']:,} rows, a fifth held out, {TRAINING['inputs']} inputs, "
            f"{TRAINING['outputs']} targets, layers {' × '.join(map(str, TRAINING['hidden']))}, batches of 256, "
            f"{TRAINING['epochs']} epochs."
        )
    lines += disturbed(record["times"])
    return "\n".join(lines) + "\n"


def measure(names: list[str], repeats: int, threads: int, out: Path, python: str | None) -> dict[str, Any]:
    """Times everything `repeats` times in turns; the record is written after each process."""
    commit, dirty = git_commit(ROOT)
    times: list[Time] = []
    record: dict[str, Any] = {
        "repeats": repeats, "threads": threads, "cases": {name: dataclasses.asdict(CASES[name]) for name in names},
        "training": TRAINING, "machine": machine(), "commit": commit, "dirty": dirty,
        "versions": {**versions(), **(installed(python, "mbrl") if python else {})},
        "started": datetime.now().astimezone().isoformat(timespec="seconds"), "load_before": os.getloadavg()[0],
    }  # fmt: skip

    def note(what: str, who: str, repeat: int, found: tuple[float, float | None]) -> None:
        times.append(Time(what, who, repeat, *found))
        record["times"] = [dataclasses.asdict(item) for item in times]
        record["medians"] = medians(times)
        write_text(out, json.dumps(record, indent=1) + "\n")
        warning = "  DISTURBED by other processes" if (found[1] or 0) > IDLE_CORES else ""
        print(f"repeat {repeat}  {what + ', ' + who:24} {1000 * found[0]:10.1f} ms{warning}", flush=True)

    for repeat in range(1, repeats + 1):
        for name in names:
            note(name, "ours", repeat, plan_ours(CASES[name], repeat, threads))
            if python:
                note(name, "mbrl", repeat, plan_mbrl(CASES[name], repeat, threads, python))
        for members in MEMBERS:
            note(f"members_{members}", "ours", repeat, train_apart(members, repeat, threads))
    return record


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="benchmarks/speed_models.py", description="Planning here and in mbrl-lib; ensembles.")
    parser.add_argument("--name", default="models", help="results/speed/<name>.json and .md; default models")
    parser.add_argument("--cases", nargs="+", default=["swing_up", "swing_up_ts1", "default"],
                        help=f"of {', '.join(CASES)}")  # fmt: skip
    parser.add_argument("--mbrl-python", help="interpreter that has mbrl 0.2.0 (not needed here)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="torch threads of both sides; default 1")
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="default results/")
    parser.add_argument("--force", action="store_true", help="measure even while something else runs")
    parser.add_argument("--train", type=int, nargs=3, help=argparse.SUPPRESS)  # members, seed, threads
    args = parser.parse_args(argv)
    if args.train:
        print(train(*args.train))
        return 0
    with usage_errors():
        unknown = [name for name in args.cases if name not in CASES]
        if unknown:
            raise ValueError(f"--cases {' '.join(unknown)}: known are {', '.join(CASES)}")
        if min(args.repeats, args.threads) < 1:
            raise ValueError("--repeats and --threads must be at least 1")
        python = args.mbrl_python and str(Path(args.mbrl_python).expanduser().absolute())
        if python and not installed(python, "mbrl"):
            raise ValueError(f"--mbrl-python {args.mbrl_python}: that interpreter has no mbrl; pip install it there")
        check_idle(args.force)
        confine(1)
        out = args.results / "speed" / f"{args.name}.json"
        record = measure(args.cases, args.repeats, args.threads, out, python)
    text = table(record)
    write_text(out.with_suffix(".md"), text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
