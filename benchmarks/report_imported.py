"""Others' curves, from CSV files as Open RL Benchmark's tools and Weights & Biases export them.

    python benchmarks/report.py --suite mujoco --imported ppo.csv Hopper-v4=panel.csv

Two layouts are read. Long: one row per point, with a column of steps and one of returns, and where they are there the
run, seed, experiment, environment and seconds; the first name of each list in `COLUMNS` that the file has is taken.
Wide, as Weights & Biases saves a panel: a column of steps and one column `<run> - <metric>` for each run. A run named
as CleanRL names its own, `<environment>__<experiment>__<seed>__<time>`, gives all three. They are drawn beside our
curves and take no part in any number of ours: what they were measured with is not in the file.
"""

import csv
import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from report_curves import Line

COLUMNS = {
    "steps": ("global_step", "step", "Step", "_step", "timesteps"),
    "return": ("charts/episodic_return", "episodic_return", "episode_return", "train_return", "rollout/ep_rew_mean",
               "eval/episodic_return", "eval/mean_reward", "return"),
    "seconds": ("_runtime", "seconds", "wall_clock_s", "Relative Time (Wall)", "Relative Time (Process)"),
    "run": ("run", "run_name", "run_id", "name", "Name", "id"),
    "seed": ("seed",),
    "setting": ("exp_name", "algorithm", "algo"),
    "env": ("env_id", "env", "environment", "gym_id"),
}  # fmt: skip
MOST = 1000  # points of a run; more are averaged in equal stretches


@dataclass(frozen=True)
class Imported:
    """One file that was read: its curves and what can be said of where they come from."""

    file: str
    digest: str  # the first twelve digits of its SHA-256
    rows: int
    column: str  # the returns'
    lines: list[Line]


def read_imported(word: str, environments: list[str]) -> Imported:
    """The curves of `FILE.csv` or `ENVIRONMENT=FILE.csv`, all on environments of the report.

    Raises:
        ValueError: one line, if the file cannot be read, lacks a column, or is of another environment.
    """
    given_env, equals, rest = word.partition("=")
    path = Path(rest if equals and given_env in environments else word)
    given_env = given_env if equals and given_env in environments else ""
    try:
        content = path.read_bytes()
        rows = list(csv.reader(content.decode("utf-8-sig").splitlines()))
    except OSError as error:
        raise ValueError(f"--imported {path}: cannot be read ({error.strerror})") from None
    except (ValueError, csv.Error) as error:
        raise ValueError(f"--imported {path}: damaged ({error})") from None
    if len(rows) < 2:
        raise ValueError(f"--imported {path}: has no rows below a line of column names")
    header, rows = rows[0], [row for row in rows[1:] if row]
    step = _find(header, "steps")
    if step is None:
        raise ValueError(f"--imported {path}: has no column of steps ({', '.join(COLUMNS['steps'])}): {_few(header)}")
    single = _find(header, "return")
    if single is not None:
        column, points = header[single], _long(path, header, rows, step, single)
    else:
        column, points = _wide(path, header, rows, step)
    lines = [_line(path, key, values, column, given_env, environments) for key, values in points.items()]
    if not lines:
        raise ValueError(f"--imported {path}: has no return in its column {column}")
    return Imported(path.name, hashlib.sha256(content).hexdigest()[:12], len(rows), column, lines)


Key = tuple[str, str, str, str]  # run, seed, setting, environment; "" where it is not said
Points = dict[Key, list[tuple[float, float, float]]]  # step, return, seconds (NaN where they are not known)


def _find(header: list[str], what: str) -> int | None:
    return next((header.index(name) for name in COLUMNS[what] if name in header), None)


def _few(header: list[str]) -> str:
    return f"it has {', '.join(header[:6])}{' and others' if len(header) > 6 else ''}"


def _long(path: Path, header: list[str], rows: list[list[str]], step: int, value: int) -> Points:
    places = {what: _find(header, what) for what in ("run", "seed", "setting", "env")}
    clock, points = _find(header, "seconds"), {}
    for number, row in enumerate(rows, 2):
        if len(row) != len(header):
            raise ValueError(f"--imported {path}: damaged (row {number} has {len(row)} cells, not {len(header)})")
        if row[value].strip() == "" or row[step].strip() == "":  # this row logged something else
            continue
        key = tuple("" if place is None else row[place].strip() for place in places.values())
        seconds = math.nan if clock is None or row[clock].strip() == "" else _number(path, number, row[clock])
        point = _number(path, number, row[step]), _number(path, number, row[value]), seconds
        points.setdefault(key, []).append(point)
    return points


def _wide(path: Path, header: list[str], rows: list[list[str]], step: int) -> tuple[str, Points]:
    parts = {i: name.rpartition(" - ") for i, name in enumerate(header)}
    # not `...__MIN` and `...__MAX`, the ends of a smoothed curve's band
    columns = {i: (run, metric) for i, (run, dash, metric) in parts.items() if dash and metric in COLUMNS["return"]}
    if not columns:
        known = ", ".join(COLUMNS["return"])
        raise ValueError(
            f"--imported {path}: has no column of returns ({known}, or '<run> - ' and one): {_few(header)}"
        )
    points: Points = {}
    for number, row in enumerate(rows, 2):
        for i, (run, _) in columns.items():
            if i < len(row) and row[i].strip() != "":
                point = _number(path, number, row[step]), _number(path, number, row[i]), math.nan
                points.setdefault((run.strip(), "", "", ""), []).append(point)
    return ", ".join(dict.fromkeys(metric for _, metric in columns.values())), points


def _number(path: Path, row: int, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"--imported {path}: damaged (row {row} has {text!r} for a number)")
    return value


def _line(
    path: Path,
    key: Key,
    points: list[tuple[float, float, float]],
    column: str,
    given_env: str,
    environments: list[str],
) -> Line:
    """One run's curve: rows of one step averaged, then at most MOST points."""
    run, seed, setting, env = key
    parts = run.split("__")
    if len(parts) >= 3:
        env, setting, seed = env or parts[0], setting or parts[1], seed or parts[2]
    env = given_env or env or (environments[0] if len(environments) == 1 else "")
    if env not in environments:
        here = f"is of {env}" if env else "does not say of which environment it is (ENVIRONMENT=FILE does)"
        raise ValueError(f"--imported {path}: {here}; the report has {', '.join(environments)}")
    table = np.asarray(points)  # [rows, (step, return, seconds)]
    steps, place, count = np.unique(table[:, 0], return_inverse=True, return_counts=True)
    values, seconds = (np.bincount(place, table[:, k]) / count for k in (1, 2))
    width = -(-len(steps) // MOST)
    starts = np.arange(0, len(steps), width)
    sizes = np.diff(np.append(starts, len(steps)))
    values = np.add.reduceat(values, starts) / sizes
    ends = starts + sizes - 1
    clock = None if np.isnan(seconds).any() else seconds[ends]
    metric = "eval" if column.startswith("eval") else "train"
    name = f"seed {seed}" if seed else run or "one run"
    return Line(env, setting or path.stem, name, metric, steps[ends], values, clock, path.name)
