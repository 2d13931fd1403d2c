"""Settings against each other: over all environments on a common scale, and two by two with `--versus`.

Returns of different environments have no common unit. On each environment 0 is the mean return of the first training
episodes of all runs, before anything was learned, and 1 the mean score of the best setting of the comparison; or both
are given in a file (`--references`). Where a language model learns, rewards stay as they are.
"""

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from report_published import RETURNS
from report_runs import Group
from report_tables import REPS

from cleanrl_zoo.core.statistics import (
    interquartile_mean,
    optimality_gap,
    performance_profile,
    probability_of_improvement,
    stratified_bootstrap,
)

LEVELS = 101  # thresholds of a performance profile

Task = tuple[str, int]  # an environment and how many steps
Interval = tuple[float, float, float]  # value, low, high
References = dict[str, tuple[float, float]]  # the returns that are 0 and 1 on an environment

STATISTICS = {"IQM": interquartile_mean, "mean": np.mean, "optimality gap": optimality_gap}


@dataclass(frozen=True)
class Comparison:
    """Settings that all have runs on the same tasks: their scores on a common scale, and what follows from them."""

    tasks: tuple[Task, ...]
    scores: dict[str, np.ndarray]  # each setting's [runs, tasks]
    references: References
    groups: dict[str, list[Group]]  # each setting's runs, task by task

    @property
    def where(self) -> str:
        first = next(iter(self.groups.values()))
        units = ["tokens" if group.entry.is_language else "steps" for group in first]
        tasks = zip(self.tasks, units, strict=True)
        return ", ".join(f"{env} ({steps:,} {unit})" for (env, steps), unit in tasks)

    def statistics(self, setting: str) -> dict[str, Interval]:
        """Interquartile mean, mean and optimality gap (to a score of 1) with their 95 % intervals."""
        table = self.scores[setting]
        return {
            name: (float(function(table)), *stratified_bootstrap(table, function, reps=REPS))
            for name, function in STATISTICS.items()
        }

    def improvement(self, a: str, b: str) -> Interval:
        """P(a run of `a` scores above a run of `b` on the same environment), averaged over environments."""
        return probability_of_improvement(self.scores[a], self.scores[b])

    def profiles(self) -> tuple[np.ndarray, dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]]:
        """Thresholds over all scores, and each setting's share of runs above them with its interval."""
        everything = np.concatenate([table.ravel() for table in self.scores.values()])
        levels = np.linspace(min(0.0, everything.min()), max(1.0, everything.max()), LEVELS)
        return levels, {name: performance_profile(table, levels) for name, table in self.scores.items()}


def score_name(group: Group) -> str:
    """The return that decides a comparison, of RETURNS: that of training, or of held-out prompts."""
    return "final" if group.entry.is_language or len(group.scores("train")) == 0 else "train"


def comparisons(groups: list[Group], references: References | None = None) -> tuple[list[Comparison], list[str]]:
    """The settings of a report that can be held against each other, and a line for each that has runs missing.

    Two settings belong together if the environments that each shares with any other, after as many steps, are the same.
    """
    groups = [group for group in groups if len(group.scores(score_name(group)))]
    task_of = {id(group): (group.entry.env, group.entry.steps) for group in groups}
    settings: dict[str, dict[Task, Group]] = {}
    for group in groups:
        settings.setdefault(group.entry.name, {})[task_of[id(group)]] = group
    shared = {
        task for tasks in settings.values() for task in tasks if sum(task in other for other in settings.values()) > 1
    }
    together: dict[tuple[Task, ...], list[str]] = {}
    for name, tasks in settings.items():
        if key := tuple(task for task in dict.fromkeys(task_of.values()) if task in tasks and task in shared):
            together.setdefault(key, []).append(name)

    found, left_out = [], []
    for tasks, names in together.items():
        whole = []
        for name in names:
            counts = [len(settings[name][task].seeds) for task in tasks]
            if len(set(counts)) == 1:
                whole.append(name)
            else:
                here = " and ".join(env for env, _ in tasks)
                left_out.append(f"{name} has {' and '.join(map(str, counts))} runs on {here}")
        if len(whole) > 1:
            own = {name: [settings[name][task] for task in tasks] for name in whole}
            found.append(_comparison(tasks, own, references))
    return found, left_out


def _comparison(tasks: tuple[Task, ...], groups: dict[str, list[Group]], references: References | None) -> Comparison:
    scale: References = {}
    for i, (env, _) in enumerate(tasks):
        here = [own[i] for own in groups.values()]
        if here[0].entry.is_language:
            scale[env] = (0.0, 1.0)
        elif references is not None:
            if env not in references:
                raise ValueError(f"--references has no row for {env}; it has {', '.join(references) or 'none'}")
            scale[env] = references[env]
        else:
            best = max(float(group.scores(score_name(group)).mean()) for group in here)
            scale[env] = (_untrained(here), best)
    scores = {
        name: np.stack([_scaled(group.scores(score_name(group)), scale[group.entry.env]) for group in own], 1)
        for name, own in groups.items()
    }
    return Comparison(tasks, scores, scale, groups)


def _untrained(groups: list[Group]) -> float:
    """Mean over runs of the return of their first training episodes; 0 where there are none."""
    curves = (curve for group in groups for curve in group.curves)
    first = [next((point["train_return"] for point in curve if point["episodes"]), None) for curve in curves]
    known = [value for value in first if value is not None]
    return float(np.mean(known)) if known else 0.0


def _scaled(scores: np.ndarray, reference: tuple[float, float]) -> np.ndarray:
    low, high = reference
    return (scores - low) / (high - low if high != low else 1.0)


def read_references(path: Path) -> References:
    """The returns that are 0 and 1 on each environment, from a CSV with the columns env, low and high.

    Raises:
        ValueError: one line, naming the file.
    """
    try:
        with open(path, newline="") as file:
            found = {row["env"]: (float(row["low"]), float(row["high"])) for row in csv.DictReader(file)}
    except OSError as error:
        raise ValueError(f"--references {path}: cannot be read ({error.strerror})") from None
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"--references {path}: needs the columns env, low (number), high (number); {error}") from None
    equal = [env for env, (low, high) in found.items() if low == high]
    if equal:
        raise ValueError(f"--references {path}: low and high are equal for {', '.join(equal)}")
    return found


def versus_rows(a: list[Group], b: list[Group]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: two settings on each environment that both have with as many steps, and on all together.

    Raises:
        ValueError: if they share none.
    """
    pairs = [(x, y) for x in a for y in b if (x.entry.env, x.entry.steps) == (y.entry.env, y.entry.steps)]
    if not pairs:
        sides = [", ".join(f"{g.entry.env} ({g.entry.steps:,} steps)" for g in side) for side in (a, b)]
        raise ValueError(
            f"--versus {a[0].entry.name} {b[0].entry.name}: no environment after as many steps is in both: "
            f"{sides[0]} and {sides[1]}"
        )
    header = ["environment", "steps", "score", f"{a[0].entry.name}: IQM [95 %] (runs)",
              f"{b[0].entry.name}: IQM [95 %] (runs)", "probability of improvement [95 %]"]  # fmt: skip
    rows = []
    for which, (title, _) in RETURNS.items():
        columns = []
        for x, y in pairs:
            scores = x.scores(which), y.scores(which)
            if all(len(side) for side in scores):
                columns.append(scores)
                sides = [f"{_interval(side)} ({len(side)})" for side in scores]
                rows.append([x.entry.env, f"{x.entry.steps:,}", title, *sides, improvement(*scores)])
        sizes = {(len(x), len(y)) for x, y in columns}
        if len(columns) > 1 and len(sizes) == 1:
            tables = [np.stack(side, 1) for side in zip(*columns, strict=True)]
            rows.append([f"all {len(columns)}", "", title, "", "", improvement(*tables)])
    return header, rows


def improvement(x: np.ndarray, y: np.ndarray) -> str:
    """Probability that a run of x scores above a run of y, with its interval, as text."""
    return _spoken(probability_of_improvement(x, y))


def _interval(scores: np.ndarray) -> str:
    low, high = stratified_bootstrap(scores[:, None], interquartile_mean, reps=REPS)
    return " ".join([_short(interquartile_mean(scores)), f"[{_short(low)}, {_short(high)}]"])


def _short(x: float) -> str:
    return f"{x:.3g}" if abs(x) < 100 else f"{x:.0f}"


def comparison_rows(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the settings over all environments, the highest interquartile mean first."""
    digits = 3 if any(own[0].entry.is_language for own in comparison.groups.values()) else 2
    found = {name: comparison.statistics(name) for name in comparison.scores}
    order = sorted(found, key=lambda name: -found[name]["IQM"][0])
    rows = []
    for name in order:
        runs = " × ".join(map(str, comparison.scores[name].shape))
        above = _spoken(comparison.improvement(name, order[0])) if name != order[0] else "–"
        rows.append([name, runs, *(_spoken(interval, digits) for interval in found[name].values()), above])
    return ["setting", "runs × environments", *(f"{name} [95 %]" for name in STATISTICS), f"P over {order[0]}"], rows


def comparison_note(comparison: Comparison) -> str:
    """What was scored, on which scale, and what the columns mean."""
    first = next(iter(comparison.groups.values()))[0]
    score = "held-out reward at the end" if first.entry.is_language else RETURNS[score_name(first)][0]
    scale = [f"{env} {_short(low)} and {_short(high)}" for env, (low, high) in comparison.references.items()]
    return (
        f"{score[0].upper()}{score[1:]}; {comparison.where}; on a scale where 0 and 1 are: {'; '.join(scale)}. IQM: "
        "interquartile mean over runs and environments; optimality gap: by how much the scores miss 1 on average, "
        "those above it counting as 1; P: probability that a run scores above a run of the setting named, on the same "
        "environment, ties counting half. 95 % stratified bootstrap intervals: runs redrawn within each environment.\n"
    )


def _spoken(interval: Interval, digits: int = 2) -> str:
    value, low, high = interval
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"
