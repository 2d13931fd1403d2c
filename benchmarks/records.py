"""Published results, written and read: `results/<suite>/<label>/<env>/seed_<k>/` with `curve.csv`, `clock.csv`,
`run.json` and `summary.json`.

`curve.csv` and `summary.json` hold nothing that depends on the clock or the folder, so equal runs give equal files;
`clock.csv` has the seconds at each point of the curve, and `run.json` says how, where and when the run was made.
"""

import argparse
import csv
import io
import itertools
import json
import math
import os
from collections import deque
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from suites import PACKAGES, SUITES, Entry, with_peers

from cleanrl_zoo.run.arguments import exit_with, folder_name, nearest

ROOT = Path(__file__).resolve().parents[1]
MAX_POINTS = 1000
COLUMNS = ["step", "train_return", "episodes", "eval_return"]  # of curve.csv; the losses follow
# What is said of pairs, beside the losses; not all of rewards/*, whose names are the task's
OF_PAIRS = ("rewards/accuracy", "rewards/margin", "rewards/chosen_length", "rewards/rejected_length")
# What an evaluation beside a teacher says more than the reward, and its columns
BESIDE_TEACHER = {"eval/teacher_kl": "eval_teacher_kl", "eval/episodic_length": "eval_length"}
TIMING = ("wall_clock_s", "steps_per_second")


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        exit_with(message)


def suite(name: str) -> tuple[Entry, ...]:
    """The suite of that name; `<suite>_sb3` and `<suite>_sbx` are a suite beside that package (`suites.with_peers`).

    Raises:
        ValueError: naming the nearest and all that are known.
    """
    base, _, package = name.rpartition("_")
    if name not in SUITES and base in SUITES and package in PACKAGES:
        return with_peers(base, package)
    if name not in SUITES:
        near = nearest(name, SUITES)
        raise ValueError(f"--suite {name}: the nearest is {near}; benchmarks/suites.py has {', '.join(SUITES)}")
    return SUITES[name]


def source(suite_name: str, entry: Entry, seed: int) -> tuple[Path, Entry]:
    """Where a seed's run lives, as `<suite>/<name>/<env>/seed_<k>`, and the entry that it is made by.

    Other than the suite's own folder and `entry` itself where the entry names another suite's results, or a longer run.
    """
    for other in SUITES.get(entry.results or suite_name, ()):
        if (other.name, other.env) == (entry.longer, entry.env) and seed in other.seeds:
            return source(entry.results or suite_name, other, seed)
    return Path(entry.results or suite_name) / entry.name / folder_name(entry.env) / f"seed_{seed}", entry


def check_made_as_asked(folder: Path, entry: Entry, seed: int) -> None:
    """Raises ValueError if the run in `folder` was made with other flags than the suite's.

    A preset asks for what it says today, where the suite's own flags do not say otherwise.
    """
    args = read_run(folder)["args"]
    wanted = {name.replace("-", "_"): value for name, value in entry.asked.items()} | {"seed": str(seed)}
    words = deque(part for word in entry.flags for part in (word.split("=", 1) if word.startswith("--") else [word]))
    while words:
        name, values = words.popleft().removeprefix("--").replace("-", "_"), []
        while words and not words[0].startswith("--"):
            values.append(words.popleft())
        if values:
            wanted[name] = " ".join(values)
        else:
            wanted[name.removeprefix("no_")] = str(not name.startswith("no_"))
    for name, value in preset_settings(entry.algorithm, wanted.get("preset")).items():
        have = args.get(name, value)  # a flag that came later is not in the record
        if name not in wanted and have != (list(value) if isinstance(value, tuple) else value):
            raise ValueError(
                f"{folder} was made with {name} {have}, the preset {wanted['preset']} says {value}: move that folder "
                "away"
            )
    for name, value in wanted.items():
        have = args.get(name)
        have = " ".join(map(str, have)) if isinstance(have, list) else have
        same = (
            float(value) == have
            if isinstance(have, int | float) and not isinstance(have, bool)
            else str(have) in (value, without_paths(value))  # a published run has no absolute paths
        )
        if not same:
            raise ValueError(f"{folder} was made with {name} {have}, the suite asks for {value}: move that folder away")


def preset_settings(algorithm: str, preset: str | None) -> dict[str, Any]:
    """What a named preset of an algorithm's file says; nothing for a file of settings, and for other packages."""
    from launch import load_algorithm  # which needs this module

    script = ROOT / "algos" / f"{algorithm}.py"
    if preset is None or not script.is_file():
        return {}
    return load_algorithm(script).PRESETS.get(preset, {})


def write_text(path: Path, text: str) -> None:
    """Writes to a temporary name in the same folder and renames it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    os.replace(temporary, path)


def read_json(path: Path, *required: str) -> dict[str, Any]:
    """A JSON object; ValueError names the file if it is missing, damaged, or lacks a required key."""
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(f"{path}: damaged ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: damaged (not a JSON object)")
    missing = [key for key in required if key not in content]
    if missing:
        raise ValueError(f"{path}: damaged (it lacks {', '.join(missing)})")
    return content


def read_run(folder: Path) -> dict[str, Any]:
    """`run.json` of a run or of its published results."""
    return read_json(folder / "run.json", "algorithm", "args", "provenance")


def read_summary(folder: Path) -> dict[str, Any]:
    """`summary.json` of a finished run or of its published results."""
    return read_json(folder / "summary.json", "train_last100", "final_eval", "eval_curve")


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The rows of a run's `metrics.jsonl`."""
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from None


def thin(rows: list[dict[str, float]], max_points: int = MAX_POINTS) -> list[dict[str, float]]:
    """Log rows as at most `max_points` points, each over ⌈rows / max_points⌉ consecutive rows.

    A point has the last step of its rows, the mean return of all episodes that ended in them, their number, the last
    evaluation among them (with a teacher, also its distance and the lengths), and the mean of each loss and of what is
    said of pairs. What no row has is absent.
    """
    width = max(1, math.ceil(len(rows) / max_points))
    losses = sorted({tag for row in rows for tag in row if tag.startswith("losses/") or tag in OF_PAIRS})
    points = []
    for start in range(0, len(rows), width):
        group = rows[start : start + width]
        point = {"step": group[-1]["global_step"]}
        episodes = sum(row.get("charts/episodes", 0) for row in group)
        if episodes:
            total = sum(
                row["charts/episodic_return"] * row["charts/episodes"] for row in group if row.get("charts/episodes")
            )
            point["train_return"] = total / episodes if len(group) > 1 else group[0]["charts/episodic_return"]
        point["episodes"] = int(episodes)
        evaluations = [row["eval/episodic_return"] for row in group if "eval/episodic_return" in row]
        if evaluations:
            point["eval_return"] = evaluations[-1]
        for row in group:
            if "eval/teacher_kl" in row:
                point |= {name: row[tag] for tag, name in BESIDE_TEACHER.items()}
        for tag in losses:
            values = [row[tag] for row in group if tag in row]
            if values:
                point[tag.partition("/")[2]] = sum(values) / len(values)
        points.append(point)
    return points


def write_curve(points: list[dict[str, float]]) -> str:
    """CSV text: returns in full precision, losses to nine digits (exact for float32)."""
    columns = COLUMNS + sorted({name for point in points for name in point} - set(COLUMNS))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    for point in points:
        exact = [repr(point[name]) if name in point else "" for name in COLUMNS]
        writer.writerow(exact + [f"{point[name]:.9g}" if name in point else "" for name in columns[len(COLUMNS) :]])
    return out.getvalue()


def read_curve(path: Path) -> list[dict[str, float]]:
    """The points of a `curve.csv`; ValueError names the file if it is missing or damaged."""
    try:
        with open(path, newline="") as file:
            reader = csv.DictReader(file)
            if (reader.fieldnames or [])[: len(COLUMNS)] != COLUMNS:
                raise ValueError("it has other columns")
            return [{name: float(cell) for name, cell in row.items() if cell != ""} for row in reader]
    except (OSError, ValueError, TypeError) as error:
        raise _damaged(path, error) from None


def clock(rows: list[dict[str, float]], wall_clock_s: float, max_points: int = MAX_POINTS) -> list[tuple[int, float]]:
    """Step and wall-clock seconds of training at each point that `thin` makes of these log rows.

    The seconds of the phases (`time/*`) are added up row by row; what no phase covers, set-up and checkpoints, is
    spread over the run in proportion, so that the last point is at `wall_clock_s`. Empty where the log has no phases.
    """
    spent = [sum(value for tag, value in row.items() if tag.startswith("time/")) for row in rows]
    total, so_far = sum(spent), list(itertools.accumulate(spent))
    if total <= 0:
        return []
    width = max(1, math.ceil(len(rows) / max_points))
    ends = [min(start + width, len(rows)) - 1 for start in range(0, len(rows), width)]
    return [(rows[end]["global_step"], so_far[end] / total * wall_clock_s) for end in ends]


def read_clock(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Steps and seconds of a `clock.csv`, [points] each; ValueError names the file if it is damaged."""
    try:
        with open(path, newline="") as file:
            rows = [(float(row["step"]), float(row["seconds"])) for row in csv.DictReader(file)]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _damaged(path, error) from None
    steps, seconds = np.asarray(rows, np.float64).reshape(-1, 2).T
    return steps, seconds


def _damaged(path: Path, error: Exception) -> ValueError:
    """A table that `error` kept from being read; a cell that is missing is None, and no number can be made of it."""
    reason = "a line is cut short" if isinstance(error, TypeError) else error
    return ValueError(f"{path}: cannot be read ({reason})")


def without_paths(value: Any) -> Any:
    """`value` with every absolute path made relative to the repository, or cut to its last name outside it."""
    if isinstance(value, dict):
        return {key: without_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_paths(item) for item in value]
    if not isinstance(value, str):
        return value
    flag, equals, path = value.rpartition("=") if value.startswith("--") else ("", "", value)
    if not Path(path).is_absolute():
        return value
    inside = Path(path).is_relative_to(ROOT)
    return flag + equals + (str(Path(path).relative_to(ROOT)) if inside else Path(path).name)


def publish(run_dir: Path, folder: Path) -> None:
    """Writes a finished run's results into `folder`.

    Raises:
        ValueError: if a file of the run is missing or damaged.
    """
    run, summary = read_run(run_dir), read_summary(run_dir)
    rows = read_metrics(run_dir / "metrics.jsonl")
    curve = write_curve(thin(rows))
    run["timing"] = {key: summary.pop(key) for key in TIMING if key in summary}
    for key in ("run_dir", "resume"):
        run["args"].pop(key, None)
    write_text(folder / "curve.csv", curve)
    if times := clock(rows, run["timing"].get("wall_clock_s", 0.0)):
        write_text(folder / "clock.csv", "step,seconds\n" + "".join(f"{step},{s:.3f}\n" for step, s in times))
    write_text(folder / "run.json", json.dumps(without_paths(run), indent=1) + "\n")
    write_text(folder / "summary.json", json.dumps(summary, indent=1) + "\n")  # last: its presence says "complete"


def publish_policy(run_dirs: list[Path], folder: Path) -> Path:
    """Copies the policy with the best final evaluation among finished runs into `folder`; returns its run's folder.

    The card says among how many runs it was chosen: a choice by score is for use, not for comparison.
    """
    from cleanrl_zoo import zoo  # here, since it imports torch and the simulators

    best = max(run_dirs, key=lambda run_dir: read_summary(run_dir)["final_eval"]["mean"])
    policy = zoo.load(best / "policy")
    card = {**without_paths(policy.card), "chosen": f"best final evaluation of {len(run_dirs)} runs"}
    zoo.save(folder, policy=policy, card=card)
    return best
