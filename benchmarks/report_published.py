"""Numbers that others published, from `published.csv`, and which of them may stand beside ours.

Only where environment, steps and metric are the same, and its version too, or in some suites (`OTHER_VERSIONS`) another
version, which is then named beside the number.
"""

import csv
import math
import re
from pathlib import Path

import numpy as np
from suites import PUBLISHED_NAMES, Entry

PUBLISHED = Path(__file__).with_name("published.csv")

# Our three returns: title, and the metrics in published.csv that are measured the same way.
RETURNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "train": (
        "Mean return of the last 100 training episodes",
        (
            "mean training return over last 100 episodes",
            "mean return over the last 100 training episodes",
            "average training return at the end of training (window not stated)",
        ),
    ),
    "final": (
        "Final evaluation of the deterministic policy",
        ("last deterministic evaluation, mean of 10 episodes",),
    ),
    "max": (
        "Maximum over training of the across-seed mean evaluation (deterministic policy)",
        (
            "max over training of the across-seed mean of deterministic evaluation return (10 episodes each)",
            "max over training of the across-seed mean of deterministic evaluation return (10 episodes)",
        ),
    ),
}

# The mean return of the training episodes that ended in the last thousands of steps before a step: `at_steps`.
WINDOW = re.compile(r"mean training return \(sampled actions\) over the preceding (\d+)k steps")

# Numbers that are shown for orientation and never beside ours: how they were measured is another matter, or not said.
UNLIKE = (
    "mean return (protocol not stated beyond 3 seeds)",
    "benchmark table value (metric not stated)",
    "mean evaluation return, deterministic policy",
)


def published() -> list[dict[str, str]]:
    """All rows of published.csv."""
    with open(PUBLISHED, newline="") as file:
        return list(csv.DictReader(file))


def published_rows(entry: Entry, which: str, other_versions: bool = False) -> list[dict[str, str]]:
    """Rows of published.csv with the same algorithm, environment, version, steps and metric.

    With `other_versions`, those of other versions where no row of the same version is there.
    """
    env, _, version = entry.env.rpartition("-")
    rows = [
        row
        for row in published()
        if row["algorithm"] == PUBLISHED_NAMES.get(entry.algorithm)
        and (row["env"], row["step_budget"]) == (env, str(entry.steps))
        and row["metric"] in RETURNS[which][1]
    ]
    same = [row for row in rows if row["env_version"] == version]
    return same if same or not other_versions else rows


def origin(row: dict[str, str], env: str) -> str:
    """The published row's project, its version of the environment where that is not ours, and a metric half stated."""
    version = row["env_version"]
    other = "" if env.endswith(f"-{version}") else f", {row['env']}-{version}"
    return row["source_project"] + other + (", window not stated" if "window not stated" in row["metric"] else "")


def spread(row: dict[str, str]) -> tuple[float, int] | None:
    """Standard deviation over seeds (as published) and their number, where both are stated."""
    if not row["spread_kind"].startswith("std over seeds") or not row["spread"] or not row["seeds"]:
        return None
    return float(row["spread"]), int(row["seeds"])


def lower_bound(mean: float, std: float, seeds: int, our_seeds: int) -> float:
    """`mean` minus two standard errors of the difference of two means with a common standard deviation.

    The published `std` has ddof 0; s = std·√(n/(n−1)) is its unbiased form. Bound: mean − 2·s·√(1/n + 1/m).
    """
    return mean - 2 * std * math.sqrt(seeds / (seeds - 1)) * math.sqrt(1 / seeds + 1 / our_seeds)


def probability_above(scores: np.ndarray, mean: float, std: float) -> float:
    """Probability that one of `scores`, drawn at random, exceeds a draw from a normal with this mean and std."""
    return float(np.mean([0.5 * (1 + math.erf((score - mean) / (std * math.sqrt(2)))) for score in scores]))
