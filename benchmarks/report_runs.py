"""The published runs that a report is made of: read, cut where a suite asks for a beginning, and refused where mixed.

A run with a damaged file is left out and named in its group; runs that were made otherwise than the suite asks, or of
which some have other versions or another protocol, end the report with one line that says which runs have which.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from records import check_made_as_asked, read_clock, read_curve, read_run, read_summary, source
from suites import OTHER_VERSIONS, Entry

from cleanrl_zoo.run.arguments import folder_name

FREE_ARGS = ("seed", "track")  # what may differ between the seeds of one setting
PROTOCOL_ARGS = ("eval_episodes", "eval_every")  # what may not between settings with as many steps on one environment
LAST = 100  # training episodes that count at the end

# What a report needs of run.json and summary.json.
NEEDED_OF_RUN = ("provenance.commit", "provenance.dirty", "provenance.versions", "provenance.machine.cpu",
                 "provenance.machine.cores", "provenance.machine.system", "provenance.env.engine",
                 "provenance.env.versions", "timing.wall_clock_s")  # fmt: skip
NEEDED_OF_SUMMARY = ("train_last100.mean", "final_eval.mean")


@dataclass
class Group:
    """All published seeds of one entry. `cut`: the seeds whose numbers are those of a longer run's beginning."""

    entry: Entry
    other_versions: bool = False
    cut: list[int] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)
    summaries: list[dict[str, Any]] = field(default_factory=list)
    curves: list[list[dict[str, float]]] = field(default_factory=list)
    seconds: list[np.ndarray] = field(default_factory=list)  # of each point of each curve
    damaged: list[str] = field(default_factory=list)  # one line for each run that was left out

    @property
    def missing(self) -> int:
        """How many of its runs are not published."""
        return len(self.entry.seeds) - len(self.seeds) - len(self.damaged)

    @property
    def title(self) -> str:
        return f"{self.entry.env}, {self.entry.name}"

    @property
    def protocol(self) -> str:
        """Steps and evaluations of its runs, in words."""
        args, unit = self.runs[0]["args"], "tokens" if self.entry.is_language else "steps"
        text = f"{self.entry.steps:,} {unit}"
        if all(name in args for name in PROTOCOL_ARGS):
            text += f", {args['eval_episodes']} evaluation episodes every {args['eval_every']:,} {unit}"
        return text

    @property
    def provenance(self) -> dict[str, str]:
        """Where its runs come from, each distinct value once: commit, engine, versions, machine."""
        sources = [run["provenance"] for run in self.runs]
        found = {
            "commit": {f"{(p['commit'] or 'none')[:12]}{' (modified)' if p['dirty'] else ''}" for p in sources},
            "engine": {p["env"]["engine"] for p in sources},
            "versions": {
                ", ".join(f"{k} {v}" for k, v in {**p["versions"], **p["env"]["versions"]}.items()) for p in sources
            },
            "machine": {
                f"{p['machine']['cpu']}, {p['machine']['cores']} cores, {p['machine']['system']}" for p in sources
            },
        }
        return {name: "; ".join(sorted(values)) for name, values in found.items()}

    def scores(self, which: str) -> np.ndarray:
        """One return per seed, [seeds]; empty if some run has none."""
        if which == "max":
            curves = np.asarray(
                [summary["eval_curve"] for summary in self.summaries]
            )  # [seeds, points, (step, return)]
            return curves[:, curves[:, :, 1].mean(0).argmax(), 1] if curves.size else np.asarray([])
        key = {"train": "train_last100", "final": "final_eval"}[which]
        values = [summary[key]["mean"] for summary in self.summaries]
        return np.asarray([] if None in values else values)


def environments(groups: list[Group]) -> list[str]:
    """The environments of the groups, in the order in which they first appear."""
    return list(dict.fromkeys(group.entry.env for group in groups))


def read_group(results: Path, name: str, entry: Entry) -> Group:
    """The published runs of `entry` of the suite `name`; damaged ones are named in the group and left out.

    Raises:
        ValueError: if one was made with other flags than the suite's.
    """
    group = Group(entry, name in OTHER_VERSIONS)
    places = {seed: source(name, entry, seed) for seed in entry.seeds}
    own = Path(name) / entry.name / folder_name(entry.env)
    odd = {path.relative_to(results) for path in (results / own).glob("seed_*")} - {path for path, _ in places.values()}
    if odd:
        names = ", ".join(sorted(path.name for path in odd))
        raise ValueError(f"{results / own}: {names} is not among the suite's seeds: move it away")
    for seed, (place, made_by) in places.items():
        folder = results / place
        if not (folder / "summary.json").exists():
            continue
        try:
            run, summary, curve, seconds = read_whole(folder, made_by.steps)
        except ValueError as error:
            group.damaged.append(str(error))
            continue
        check_made_as_asked(folder, made_by, seed)
        if made_by.steps > entry.steps:
            summary, curve = beginning(summary, curve, entry.steps)
            group.cut.append(seed)
        group.seeds.append(seed)
        group.runs.append(run)
        group.summaries.append(summary)
        group.curves.append(curve)
        group.seconds.append(seconds[: len(curve)])
    return group


def read_whole(folder: Path, steps: int) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, float]], np.ndarray]:
    """A run's description, summary and curve, and the seconds at each point of the curve.

    Raises:
        ValueError: naming the file, if it is missing, damaged, or does not reach `steps`.
    """
    run, summary, curve = read_run(folder), read_summary(folder), read_curve(folder / "curve.csv")
    for name, content, needed in (("run.json", run, NEEDED_OF_RUN), ("summary.json", summary, NEEDED_OF_SUMMARY)):
        missing = [path for path in needed if not _has(content, path)]
        if missing:
            raise ValueError(f"{folder / name}: damaged (it lacks {', '.join(missing)})")
    points = summary["eval_curve"]
    if not isinstance(points, list) or not all(_is_point(point) for point in points):
        raise ValueError(f"{folder / 'summary.json'}: damaged (eval_curve is not a list of [step, return])")
    if not curve or not all(_is_row(point) for point in curve):
        raise ValueError(f"{folder / 'curve.csv'}: damaged (a row lacks its step, its episodes or their return)")
    steps_at = np.asarray([point["step"] for point in curve])
    if steps_at[-1] < steps or not np.all(np.diff(steps_at) > 0):
        raise ValueError(f"{folder / 'curve.csv'}: damaged (its steps do not rise to {steps})")
    seconds = run["timing"]["wall_clock_s"] * steps_at / steps_at[-1]  # at the run's mean rate, where it kept no clock
    if (folder / "clock.csv").exists():
        clocked, seconds = read_clock(folder / "clock.csv")
        if not np.array_equal(clocked, steps_at):
            raise ValueError(f"{folder / 'clock.csv'}: damaged (its steps are not those of curve.csv)")
    return run, summary, curve, seconds


def _has(content: Any, path: str) -> bool:
    for key in path.split("."):
        if not isinstance(content, dict) or key not in content:
            return False
        content = content[key]
    return True


def _is_row(point: dict[str, float]) -> bool:
    return "step" in point and "episodes" in point and ("train_return" in point or point["episodes"] == 0)


def _is_point(point: Any) -> bool:
    return isinstance(point, list) and len(point) == 2 and all(isinstance(value, int | float) for value in point)


def beginning(
    summary: dict[str, Any], curve: list[dict[str, float]], steps: int
) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """Summary and curve of a run as they were after its first `steps` steps.

    The single episodes are not known any more: the last 100 are those of the last points of the curve that hold at
    least 100 together, and the evaluation at `steps`, where there was one, has a mean only.
    """
    end = next(index for index, point in enumerate(curve) if point["step"] >= steps)
    curve = curve[: end + 1]
    evaluations = [point for point in summary["eval_curve"] if point[0] <= curve[-1]["step"]]
    at_end = evaluations[-1][1] if evaluations and evaluations[-1][0] >= steps else None
    points, episodes = [], 0.0
    for point in reversed(curve):
        if episodes < LAST and point["episodes"] > 0:
            points.append(point)
            episodes += point["episodes"]
    last = {"mean": mean_return(points)}
    return {**summary, "train_last100": last, "final_eval": {"mean": at_end}, "eval_curve": evaluations}, curve


def mean_return(points: list[dict[str, float]]) -> float | None:
    """Mean return of all episodes that ended in these points of a curve; None without one."""
    episodes = sum(point["episodes"] for point in points)
    return sum(p["train_return"] * p["episodes"] for p in points if p["episodes"] > 0) / episodes if episodes else None


def check_alike(groups: list[Group]) -> None:
    """Raises ValueError if anything differs that must be equal in one table, and says which runs have which.

    In the whole report: each environment in one version. On one environment: engine and versions, and among settings
    with as many steps the evaluations that are asked for. Within a setting: all flags but the seed, and the points of
    evaluation.
    """
    bases = {env: match[1] for env in environments(groups) if (match := re.fullmatch(r"(.+)-v\d+", env))}
    versioned = [group for group in groups if group.entry.env in bases]
    _refuse_mixture(versioned, lambda group, i: {bases[group.entry.env]: group.entry.env}, only_where_known=True)
    for env in environments(groups):
        here = [group for group in groups if group.entry.env == env]
        own = [group for group in here if not group.entry.is_peer]  # another package has an engine of its own
        _refuse_mixture(own, lambda group, i: {"engine": group.runs[i]["provenance"]["env"]["engine"]})
        _refuse_mixture(here, _versions)
        for steps in sorted({group.entry.steps for group in here}):
            _refuse_mixture([group for group in here if group.entry.steps == steps], _protocol, only_where_known=True)
    for group in groups:
        free = (*FREE_ARGS, "total_timesteps") if group.cut else FREE_ARGS
        _refuse_mixture([group], lambda group, i, free=free: _without(group.runs[i]["args"], free))
        if not group.entry.is_language:  # there an iteration ends at whatever number of tokens it sampled
            _refuse_mixture([group], _evaluations)


def _versions(group: Group, i: int) -> dict[str, Any]:
    env = group.runs[i]["provenance"]["env"]
    return {**_without(env, ("engine", "versions")), **env["versions"]}


def _protocol(group: Group, i: int) -> dict[str, Any]:
    return {name: value for name, value in group.runs[i]["args"].items() if name in PROTOCOL_ARGS}


def _evaluations(group: Group, i: int) -> dict[str, Any]:
    return {"evaluations at steps": [point[0] for point in group.summaries[i]["eval_curve"]]}


def _without(values: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in names}


def _refuse_mixture(
    groups: list[Group], of: Callable[[Group, int], dict[str, Any]], only_where_known: bool = False
) -> None:
    """Raises ValueError, naming the runs by their values, if a value of `of(group, i)` differs between any two runs.

    What a run lacks counts as None, or with `only_where_known` is not compared.
    """
    runs = [(group.title, seed, of(group, i)) for group in groups for i, seed in enumerate(group.seeds)]
    for key in sorted({key for _, _, values in runs for key in values}):
        found: list[tuple[Any, dict[str, list[int]]]] = []  # each value with the runs that have it
        for title, seed, values in runs:
            if only_where_known and key not in values:
                continue
            who = next((who for value, who in found if value == values.get(key)), None)
            if who is None:
                found.append((values.get(key), who := {}))
            who.setdefault(title, []).append(seed)
        if len(found) > 1:
            sides = [f"{value} in {'; '.join(_named(*item) for item in who.items())}" for value, who in found]
            raise ValueError(f"cannot be compared: {key} is {' but '.join(sides)}")


def _named(title: str, seeds: list[int]) -> str:
    return f"{title} seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
