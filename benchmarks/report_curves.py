"""Curves over environment steps and over wall-clock seconds: every run's own points, and settings on one grid.

A point of a training curve is the mean return of the episodes that ended since the point before it. For one grid the
points of a run are joined by straight lines and averaged around each point of the grid; before its first point and
after its last one a run has no value. A setting's curve is the interquartile mean over its runs where all of them have
one: it begins with the run that begins last and ends with its shortest run.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from report_runs import Group

from cleanrl_zoo.core.statistics import interquartile_curve, resample

POINTS = 101  # of the grid, evenly from 0 to the end of the longest run on the environment
EARLY = 10  # more of them before the first, evenly on a logarithmic axis down to a tenth of it
REPS = 1000  # redraws of a bootstrap interval at each of them
METRICS = {"train": "training return", "eval": "evaluation"}
AXES = ("steps", "seconds")


@dataclass(frozen=True)
class Line:
    """One run's curve. `imported`: the file it was read from, "" for a run of ours."""

    env: str
    setting: str
    run: str
    metric: str  # of METRICS
    steps: np.ndarray  # [P], rising
    values: np.ndarray  # [P]
    seconds: np.ndarray | None = None  # [P], where they are known
    imported: str = ""

    def over(self, axis: str) -> tuple[np.ndarray, np.ndarray]:
        """Places on the axis, strictly rising, and the values there; both empty where the axis is not known."""
        x = self.steps if axis == "steps" else self.seconds
        if x is None or not len(x):
            return np.empty(0), np.empty(0)
        rises = np.diff(x, prepend=-np.inf) > 0
        return x[rises], self.values[rises]


@dataclass(frozen=True)
class Band:
    """A setting's curve on the grid: interquartile mean over runs and 95 % interval, where all runs have a value."""

    env: str
    setting: str
    metric: str
    axis: str  # of AXES
    x: np.ndarray  # [K]
    value: np.ndarray  # [K]
    low: np.ndarray  # [K]
    high: np.ndarray  # [K]
    runs: int
    imported: str = ""


def lines_of(groups: list[Group]) -> list[Line]:
    """The training and evaluation curves of all runs, those without a point left out."""
    lines = []
    for group in groups:
        for seed, summary, curve, seconds in zip(
            group.seeds, group.summaries, group.curves, group.seconds, strict=True
        ):
            steps = np.asarray([point["step"] for point in curve])
            seen = np.asarray([point["episodes"] > 0 for point in curve])
            returns = np.asarray([point.get("train_return", np.nan) for point in curve])
            evaluations = np.asarray(summary["eval_curve"], np.float64).reshape(-1, 2)
            evaluations = evaluations[evaluations[:, 0] <= steps[-1]]
            eval_seconds = np.interp(evaluations[:, 0], [0.0, *steps], [0.0, *seconds])
            for metric, x, y, at in (
                ("train", steps[seen], returns[seen], seconds[seen]),
                ("eval", evaluations[:, 0], evaluations[:, 1], eval_seconds),
            ):
                if len(x):
                    lines.append(Line(group.entry.env, group.entry.name, f"seed {seed}", metric, x, y, at))
    return lines


def grid_to(end: float) -> np.ndarray:
    """The points at which settings are compared on an axis, from 0 to `end`."""
    even = np.linspace(0.0, end, POINTS)
    return np.concatenate([even[:1], np.geomspace(even[1] / 10, even[1], EARLY + 1)[:-1], even[1:]])


def bands_of(lines: Iterable[Line]) -> list[Band]:
    """The settings' curves on the grid of their environment, metric and axis; those of one file are one setting."""
    lines, bands = list(lines), []
    for env, metric in dict.fromkeys((line.env, line.metric) for line in lines):
        here = [line for line in lines if (line.env, line.metric) == (env, metric)]
        for axis in AXES:
            ends = [x[-1] for x, _ in (line.over(axis) for line in here) if len(x)]
            if not ends:
                continue
            grid = grid_to(max(ends))
            for setting, imported in dict.fromkeys((line.setting, line.imported) for line in here):
                own = [line.over(axis) for line in here if (line.setting, line.imported) == (setting, imported)]
                if any(len(x) == 0 for x, _ in own):
                    continue
                value, low, high = interquartile_curve([resample(x, y, grid) for x, y in own], reps=REPS)
                there = ~np.isnan(value)
                points = (array[there] for array in (grid, value, low, high))
                if there.any():
                    bands.append(Band(env, setting, metric, axis, *points, len(own), imported))
    return bands
