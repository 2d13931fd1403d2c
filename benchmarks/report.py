"""Makes a suite's tables and figures from its published raw files.

    python benchmarks/report.py --suite first_light

Writes `results/<suite>/README.md` and one figure per environment, and for the front page's suite rewrites two blocks of
the README: `<!-- results:start -->` to `<!-- results:end -->`, and `speed` likewise with what `speed.py` measured.
Published numbers stand beside ours only where environment, steps and metric are the same, and its version too, or in
some suites (`OTHER_VERSIONS`) another version, which is then named beside the number.
"""

import csv
import math
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import report_language
from records import (
    ROOT,
    Parser,
    check_made_as_asked,
    read_curve,
    read_json,
    read_run,
    read_summary,
    source,
    suite,
    write_text,
)
from speed import table as speed_table
from suites import FRONT_PAGE, OTHER_VERSIONS, PUBLISHED_NAMES, Entry

from cleanrl_zoo.core.statistics import interquartile_mean, probability_of_improvement, stratified_bootstrap
from cleanrl_zoo.run.arguments import folder_name, usage_errors

PUBLISHED = Path(__file__).with_name("published.csv")
FREE_ARGS = ("seed", "track")  # what may differ between the seeds of one setting
LAST = 100  # training episodes that count at the end
REPS = 10_000  # redraws of a bootstrap interval

# Our three returns: title, and the metrics in published.csv that are measured the same way.
RETURNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "train": (
        "Mean return of the last 100 training episodes",
        ("mean training return over last 100 episodes", "mean return over the last 100 training episodes"),
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

    @property
    def title(self) -> str:
        return f"{self.entry.env}, {self.entry.name}"

    def scores(self, which: str) -> np.ndarray:
        """One return per seed, [seeds]; empty if some run has none."""
        if which == "max":
            curves = np.asarray(
                [summary["eval_curve"] for summary in self.summaries]
            )  # [seeds, points, (step, return)]
            return curves[:, curves[:, :, 1].mean(0).argmax(), 1]
        key = {"train": "train_last100", "final": "final_eval"}[which]
        values = [summary[key]["mean"] for summary in self.summaries]
        return np.asarray([] if None in values else values)


def read_group(results: Path, name: str, entry: Entry) -> Group:
    """The published runs of `entry` of the suite `name`.

    Raises:
        ValueError: if one is damaged or was made with other flags than the suite's.
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
        check_made_as_asked(folder, made_by, seed)
        run, summary, curve = read_run(folder), read_summary(folder), read_curve(folder / "curve.csv")
        if not curve or curve[-1]["step"] < made_by.steps:
            raise ValueError(f"{folder / 'curve.csv'}: damaged (it does not reach step {made_by.steps})")
        if made_by.steps > entry.steps:
            summary, curve = beginning(summary, curve, entry.steps)
            group.cut.append(seed)
        group.seeds.append(seed)
        group.runs.append(run)
        group.summaries.append(summary)
        group.curves.append(curve)
    return group


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
    """Raises ValueError, naming it, if anything differs that must be equal for numbers to stand in one row.

    Within a group: all flags but the seed, and the points of evaluation. On one environment: engine and versions.
    """
    engines: dict[str, tuple[str, dict[str, Any]]] = {}
    for group in groups:
        for seed, run, summary in zip(group.seeds, group.runs, group.summaries, strict=True):
            here = f"{group.title} seed {seed}"
            where, first = engines.setdefault(group.entry.env, (here, run["provenance"]["env"]))
            free = ("engine",) if group.entry.is_peer else ()  # another package has its own; the task is the same
            _same(where, _without(first, free), here, _without(run["provenance"]["env"], free))
            first_seed = f"{group.title} seed {group.seeds[0]}"
            free = (*FREE_ARGS, "total_timesteps") if group.cut else FREE_ARGS
            args = [_without(r["args"], free) for r in (group.runs[0], run)]
            _same(first_seed, args[0], here, args[1])
            if group.entry.is_language:  # an iteration ends at whatever number of tokens it sampled
                continue
            steps = [
                {"evaluations at steps": [point[0] for point in s["eval_curve"]]} for s in (group.summaries[0], summary)
            ]
            _same(first_seed, steps[0], here, steps[1])


def _without(values: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in names}


def _same(where: str, a: dict[str, Any], also: str, b: dict[str, Any]) -> None:
    for key in sorted(set(a) | set(b)):
        if a.get(key) != b.get(key):
            raise ValueError(f"cannot be compared: {key} is {a.get(key)} in {where} but {b.get(key)} in {also}")


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
    """The published row's project, and its version of the environment where that is not ours."""
    version = row["env_version"]
    return row["source_project"] + ("" if env.endswith(f"-{version}") else f", {row['env']}-{version}")


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


def number(x: float) -> str:
    return f"{x:.0f}" if abs(x) >= 100 else f"{x:.1f}"


def ours(scores: np.ndarray) -> tuple[str, str]:
    """Mean ± std (ddof 0) and the IQM with its 95 % interval, as text."""
    if len(scores) == 1:
        return number(scores[0]), "–"
    low, high = stratified_bootstrap(scores[:, None], interquartile_mean, reps=REPS, seed=0)
    iqm = f"{number(interquartile_mean(scores))} [{number(low)}, {number(high)}]"
    return f"{number(scores.mean())} ± {number(scores.std())}", iqm


def beside(scores: np.ndarray, row: dict[str, str] | None, env: str) -> list[str]:
    """The published cells of a row: mean ± std (seeds), source, bound, probability."""
    if row is None:
        return ["–", "–", "–", "–"]
    mean, known = float(row["value"]), spread(row)
    if known is None:
        return [number(mean), origin(row, env), "–", "–"]
    std, n = known
    bound = number(lower_bound(mean, std, n, len(scores))) if n > 1 else "–"
    probability = f"{probability_above(scores, mean, std):.2f}" if std > 0 else "–"
    return [f"{number(mean)} ± {number(std)} ({n})", origin(row, env), bound, probability]


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


HEADER = ["environment", "setting", "seeds", "mean ± std", "IQM [95 %]", "published (seeds)", "source", "bound", "P"]
LEGEND = (
    "mean ± std: over seeds, ddof 0. IQM: interquartile mean over seeds with its 95 % stratified bootstrap interval. "
    "published: same environment version, steps and metric. bound: published mean − 2·s·√(1/n + 1/m), two standard "
    "errors of the difference, s the published std with ddof 1, n and m the seeds. P: probability that a run of ours "
    "beats a draw from a normal with the published mean and std (the single runs are not published).\n"
)


OTHER_VERSION_NOTE = (
    "A source with an environment behind its name measured on that version of it: not like with like, shown only where "
    "nothing is published for ours. A maximum over training grows with the number of evaluations, which "
    "differs between sources; ours: {}.\n"
)


def seeds_of(group: Group) -> str:
    """Seeds that are there, of those that there should be."""
    have, want = len(group.seeds), len(group.entry.seeds)
    return str(have) if have == want else f"{have} of {want}"


def returns_table(groups: list[Group], which: str) -> str:
    rows = []
    for group in groups:
        scores, entry = group.scores(which), group.entry
        if len(scores) == 0:
            continue
        for row in published_rows(entry, which, group.other_versions) or [None]:
            rows.append([entry.env, entry.name, seeds_of(group), *ours(scores), *beside(scores, row, entry.env)])
    return table(HEADER, rows)


def columns_of(groups: list[Group]) -> dict[str, str]:
    """Each setting's title in a table of a suite: its name, with its steps where the suite's differ."""
    steps = {group.entry.steps for group in groups}
    return {
        group.entry.name: group.entry.name + (f", {millions(group.entry.steps)}" if len(steps) > 1 else "")
        for group in groups
    }


def millions(steps: int) -> str:
    return f"{steps / 1e6:g}M" if steps >= 1_000_000 else f"{steps / 1e3:g}k"


def overview_table(groups: list[Group], which: str) -> str:
    """All settings at once: environments as rows, settings as columns; mean ± std (IQM)."""
    cells: dict[str, dict[str, str]] = {}
    for group in groups:
        scores = group.scores(which)
        if len(scores):
            text = number(scores[0])
            if len(scores) > 1:
                text = f"{number(scores.mean())} ± {number(scores.std())} ({number(interquartile_mean(scores))})"
            missing = "" if len(scores) == len(group.entry.seeds) else f" [{seeds_of(group)} seeds]"
            cells.setdefault(group.entry.env, {})[group.entry.name] = text + missing
    titles = columns_of(groups)
    rows = [[env, *(cells[env].get(name, "–") for name in titles)] for env in environments(groups) if env in cells]
    return table(["environment", *titles.values()], rows)


def at_steps(group: Group, steps: int, window: int) -> np.ndarray:
    """Each seed's mean return of the training episodes that ended within `window` steps before `steps`, [seeds].

    Episodes count where their point of the curve ends. Empty if a seed has none there.
    """
    means = [
        mean_return([point for point in curve if steps - window < point["step"] <= steps]) for curve in group.curves
    ]
    return np.asarray([] if None in means else means)


def window_rows(groups: list[Group]) -> list[tuple[Group, dict[str, str], int, int]]:
    """Published windows of training, each with the group of most seeds: (group, row, steps, window).

    Only in suites that show other versions of an environment: every such row is of another version.
    """
    found = []
    for row in published():
        metric = WINDOW.fullmatch(row["metric"])
        fitting = [
            group
            for group in groups
            if metric
            and group.other_versions
            and row["algorithm"] == PUBLISHED_NAMES.get(group.entry.algorithm)
            and row["env"] == group.entry.env.rpartition("-")[0]
            and int(row["step_budget"]) <= group.entry.steps
        ]
        if fitting:
            most = max(fitting, key=lambda group: (len(group.seeds), -group.entry.steps))
            found.append((most, row, int(row["step_budget"]), 1000 * int(metric[1])))
    return sorted(found, key=lambda item: (environments(groups).index(item[0].entry.env), item[2]))


def windows_table(groups: list[Group]) -> str:
    """Our training episodes shortly before a step beside those published for the same window; "" without one."""
    rows = []
    for group, row, steps, window in window_rows(groups):
        scores, entry = at_steps(group, steps, window), group.entry
        if len(scores):
            where = [entry.env, entry.name, millions(steps), millions(window)]
            rows.append([*where, str(len(scores)), *ours(scores), *beside(scores, row, entry.env)])
    return table([*HEADER[:2], "at step", "window", *HEADER[2:]], rows) if rows else ""


def unlike_table(groups: list[Group]) -> str:
    """What is published for these algorithms, environments and steps under another or no stated protocol."""
    rows: dict[tuple[str, ...], None] = {}
    for group in groups:
        for row in published():
            if (
                group.other_versions
                and row["metric"] in UNLIKE
                and row["algorithm"] == PUBLISHED_NAMES.get(group.entry.algorithm)
                and (row["env"], row["step_budget"]) == (group.entry.env.rpartition("-")[0], str(group.entry.steps))
            ):
                value = number(float(row["value"]))
                if row["spread"]:
                    value += f" ± {number(float(row['spread']))} ({row['spread_kind']})"
                env = f"{row['env']}, version {row['env_version']}"
                rows[env, row["algorithm"], value, row["seeds"] or "–", row["metric"], row["source_project"]] = None
    header = ["environment", "algorithm", "published", "seeds", "metric as stated", "source"]
    return table(header, [list(row) for row in rows]) if rows else ""


def seeds_table(groups: list[Group]) -> str:
    """Every run's three returns: nothing hides in a mean."""
    rows = []
    for group in groups:
        columns = [group.scores(which) for which in RETURNS]
        for i, seed in enumerate(group.seeds):
            cells = [number(scores[i]) if len(scores) else "–" for scores in columns]
            rows.append([group.entry.env, group.entry.name, str(seed), *cells])
    return table(["environment", "setting", "seed", "last 100", "final evaluation", "at the maximum"], rows)


def improvement_table(groups: list[Group], once: bool = False) -> str:
    """P(a run of one setting scores above a run of another), both on one environment after as many steps.

    The score is the mean return of the last 100 training episodes. `once`: each pair in one direction only.
    """
    rows = []
    for i, a in enumerate(groups):
        for b in groups[i + 1 :] if once else groups:
            x, y = a.scores("train"), b.scores("train")
            alike = (a.entry.env, a.entry.steps) == (b.entry.env, b.entry.steps)
            if a is not b and alike and len(x) and len(y):
                p, low, high = probability_of_improvement(x[:, None], y[:, None])
                rows.append([a.entry.env, a.entry.name, b.entry.name, f"{p:.2f} [{low:.2f}, {high:.2f}]"])
    return table(["environment", "setting", "over setting", "probability of improvement [95 %]"], rows) if rows else ""


def provenance_table(groups: list[Group]) -> str:
    rows = []
    for group in groups:
        sources = [run["provenance"] for run in group.runs]
        commits = {f"{(p['commit'] or 'none')[:12]}{' (modified)' if p['dirty'] else ''}" for p in sources}
        versions = {
            ", ".join(f"{k} {v}" for k, v in {**p["versions"], **p["env"]["versions"]}.items()) for p in sources
        }
        machines = {f"{p['machine']['cpu']}, {p['machine']['cores']} cores, {p['machine']['system']}" for p in sources}
        minutes = np.median([run["timing"]["wall_clock_s"] for run in group.runs]) / 60
        cells = [
            "; ".join(sorted(values)) for values in (commits, {p["env"]["engine"] for p in sources}, versions, machines)
        ]
        rows.append([group.entry.env, group.entry.name, *cells, f"{minutes:.1f}"])
    header = ["environment", "setting", "commit", "engine", "versions", "machine", "minutes per run (median)"]
    return table(header, rows)


def cut_note(groups: list[Group]) -> str:
    """Which numbers are those of a longer run's beginning; "" if none."""
    cut = [f"{g.title}: seed {', '.join(map(str, g.cut))} up to step {g.entry.steps:,}" for g in groups if g.cut]
    if not cut:
        return ""
    return (
        f"From the beginning of a longer run ({'; '.join(cut)}): the last 100 training episodes are there those of the "
        "last rows of the log that hold at least 100 together.\n"
    )


def sources_list(groups: list[Group]) -> str:
    """Where each published number that was used comes from."""
    rows = [row for g in groups for which in RETURNS for row in published_rows(g.entry, which, g.other_versions)]
    rows += [row for _, row, _, _ in window_rows(groups)]
    lines = {f"- {row['source_project']}: {row['source_location']} ({row['notes']})" for row in rows}
    return "\n".join(sorted(lines)) + "\n" if lines else "None matches in environment version, steps and metric.\n"


def binned(curve: list[dict[str, float]], edges: np.ndarray) -> np.ndarray:
    """Episode-weighted mean training return in each bin of steps; bins without an episode are interpolated."""
    points = [point for point in curve if point["episodes"] > 0]
    steps, returns, episodes = (np.asarray([p[k] for p in points]) for k in ("step", "train_return", "episodes"))
    total = np.histogram(steps, edges, weights=returns * episodes)[0]
    count = np.histogram(steps, edges, weights=episodes)[0]
    centers, seen = (edges[1:] + edges[:-1]) / 2, count > 0
    return np.interp(centers, centers[seen], total[seen] / count[seen])


def published_line(row: dict[str, str], name: str = "") -> str:
    return f"{row['source_project']}{f' ({name})' if name else ''}, last 100 episodes at the end"


def draw(axes: Any, groups: list[Group], several: bool) -> None:
    """The curves of all groups; published means in the group's colour where there are several algorithms."""
    for group in groups:
        curves = [curve for curve in group.curves if any(point["episodes"] > 0 for point in curve)]
        if not curves:
            continue
        edges = np.linspace(0, max(curve[-1]["step"] for curve in curves), 101)
        values = np.stack([binned(curve, edges) for curve in curves])  # [seeds, bins]
        centers = (edges[1:] + edges[:-1]) / 2e6
        seeds = f"{len(values)} seeds: mean, min–max" if len(values) > 1 else "1 seed"
        (drawn,) = axes.plot(centers, values.mean(0), label=f"{group.entry.name} ({seeds})")
        color, alpha = drawn.get_color(), 0.12 if several else 0.2
        axes.fill_between(centers, values.min(0), values.max(0), alpha=alpha, color=color, linewidth=0)
        for row in published_rows(group.entry, "train") if several else []:
            label = published_line(row, group.entry.name)
            axes.axhline(float(row["value"]), linestyle="--", color=color, linewidth=1, label=label)
    if not several:
        for row in {row["source_project"]: row for row in published_rows(groups[0].entry, "train")}.values():
            axes.axhline(float(row["value"]), linestyle="--", color="black", linewidth=1, label=published_line(row))


def figure(groups: list[Group], path: Path) -> None:
    """Training return over steps on one environment: mean and min–max over seeds, published means as lines."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("figures need matplotlib: pip install -c constraints.txt -e '.[report]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    # what is the beginning of other curves only would hide them
    groups = [group for group in groups if len(group.cut) < len(group.seeds)]
    several = len({PUBLISHED_NAMES.get(group.entry.algorithm) for group in groups}) > 1
    lengths = sorted({group.entry.steps / 1e6 for group in groups})
    split = len(lengths) > 1 and lengths[-1] >= 2 * lengths[-2]  # where few go on for long, the rest gets more room
    size = (8.2, 3.9) if several else (5.2, 3.4)
    fig, panels = plt.subplots(
        1, 1 + split, figsize=size, layout="constrained", sharey=True, squeeze=False, width_ratios=[2.5, 1][: 1 + split]
    )
    for axes in panels[0]:
        draw(axes, groups, several)
        axes.grid(alpha=0.3)
    first, last = panels[0, 0], panels[0, -1]
    if split:
        margin = 0.02 * lengths[-2]
        first.set_xlim(-margin, lengths[-2])
        last.set_xlim(lengths[-2], lengths[-1] + margin)
    first.set(title=groups[0].entry.env, xlabel="environment steps, millions", ylabel="training return")
    place = {"loc": "center left", "bbox_to_anchor": (1, 0.5)} if several else {"loc": "lower right"}
    last.legend(fontsize=7, **place)
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    fig.savefig(temporary, dpi=110, metadata={"Software": None})
    os.replace(temporary, path)
    plt.close(fig)


def with_blocks(path: Path, blocks: dict[str, str]) -> str:
    """The content of `path` with each text between the markers of its name, `<!-- name:start -->` and `:end`.

    Raises:
        ValueError: unless every marker is there once, start before end.
    """
    try:
        content = path.read_text()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    for name, text in blocks.items():
        start, end = f"<!-- {name}:start -->", f"<!-- {name}:end -->"
        before, _, rest = content.partition(start)
        _, _, after = rest.partition(end)
        if content.count(start) != 1 or rest.count(end) != 1:
            raise ValueError(f"{path}: needs the markers {start} and {end}, once each and in this order")
        content = f"{before}{start}\n{text.strip()}\n{end}{after}"
    return content


def front_page(groups: list[Group], folder: Path, readme: Path) -> str:
    """The README's block: last 100 training episodes and final evaluation against what is published."""
    here, rows = os.path.relpath(folder, readme.parent), []
    for group in groups:
        train, final = group.scores("train"), group.scores("final")
        for row in published_rows(group.entry, "train") or [None]:
            rows.append(
                [
                    f"`{group.entry.env}`",
                    str(len(train)),
                    *ours(train),
                    *beside(train, row, group.entry.env),
                    ours(final)[0],
                ]
            )
    header = ["environment", "seeds", *HEADER[3:], "final evaluation"]
    images = " ".join(f'<img src="{here}/{image_name(env)}" width="32%" alt="{env}">' for env in environments(groups))
    steps = " and ".join(sorted({f"{group.entry.steps:,}" for group in groups}))
    intro = f"Mean return of the last 100 training episodes after {steps} steps, all seeds fixed beforehand:\n"
    outro = f"Every run's raw curve, the other returns, commits, versions and machines: [{here}]({here}/README.md)."
    return "\n".join([intro, table(header, rows), LEGEND, images, "", outro])


def speed_block(folder: Path) -> str:
    """What `speed.py` measured: one table of all records; below it the tables of records that an earlier one wrote."""
    paths = sorted(folder.glob("*.md"))
    contents = [read_json(path.with_suffix(".json"), "times") for path in paths]
    records = [content for content in contents if "rows" in content]
    earlier = [path.read_text() for path, content in zip(paths, contents, strict=True) if "rows" not in content]
    return "\n\n".join([*([speed_table(records)] if records else []), *earlier])


def environments(groups: list[Group]) -> list[str]:
    return list(dict.fromkeys(group.entry.env for group in groups))


def image_name(env: str) -> str:
    return f"{env.replace('/', '-')}.png"


def report(name: str, results: Path, readme: Path) -> list[Path]:
    """Reads the suite's published runs and writes its report; returns the files written.

    Raises:
        ValueError: one line, if nothing is published, a file is damaged, or runs must not be compared.
    """
    folder = results / name
    entries = suite(name)
    groups = [group for group in (read_group(results, name, entry) for entry in entries) if group.seeds]
    if not groups:
        raise ValueError(f"{folder} holds no published run: python benchmarks/run.py --suite {name}")
    check_alike(groups)
    if all(group.entry.is_language for group in groups):
        return language_report(name, groups, results)
    order = environments(groups)
    groups.sort(key=lambda group: order.index(group.entry.env))
    missing = sum(len(entry.seeds) for entry in entries) - sum(len(group.seeds) for group in groups)
    texts = {}
    if name == FRONT_PAGE:  # first, so that missing markers are told before anything is written
        blocks = {"results": front_page(groups, folder, readme)}
        if speed := speed_block(results / "speed"):
            blocks["speed"] = speed
        texts[readme] = with_blocks(readme, blocks)
    images = []
    for env in environments(groups):
        images.append(folder / image_name(env))
        figure([group for group in groups if group.entry.env == env], images[-1])

    text = [f"# {name}\n", f"Made by `python benchmarks/report.py --suite {name}` from the files in this folder.\n"]
    for lender in sorted({group.entry.results for group in groups if group.entry.results}):
        lent = ", ".join(dict.fromkeys(f"`{g.entry.name}`" for g in groups if g.entry.results == lender))
        text.append(f"The runs of {lent} are those of the suite `{lender}`, [../{lender}](../{lender}/README.md).\n")
    if missing:
        text.append(f"**Incomplete: {missing} of the suite's runs are not published yet.**\n")
    others = name in OTHER_VERSIONS
    several = len(environments(groups)) > 1 and len({group.entry.name for group in groups}) > 1
    if several:
        for which, (title, _) in RETURNS.items():
            text += [f"## All: {title[0].lower()}{title[1:]}\n", overview_table(groups, which)]
        text.append("mean ± std over seeds (interquartile mean over seeds).\n")
    for which, (title, _) in RETURNS.items():
        text += [f"## {title}\n", returns_table(groups, which)]
    if windows := windows_table(groups):
        text += ["## Mean return of the training episodes shortly before a step\n", windows]
    returns = [summary["final_eval"].get("returns") for group in groups for summary in group.summaries]
    episodes = sorted({len(values) for values in returns if values is not None})
    text.append(f"One evaluation is {' or '.join(map(str, episodes))} episodes.\n")
    text.append(LEGEND.replace("same environment version, steps", "same environment, steps") if others else LEGEND)
    if others:
        points = sorted({len(summary["eval_curve"]) for group in groups for summary in group.summaries})
        text.append(OTHER_VERSION_NOTE.format(", ".join(map(str, points))))
    if cut := cut_note(groups):
        text.append(cut)
    text += ["Published numbers:\n", sources_list(groups)]
    if unlike := unlike_table(groups):
        text += ["## Published under another protocol, or none that is stated: not compared\n", unlike]
    if improvements := improvement_table(groups, once=several):
        text += ["## Settings against each other, last 100 training episodes\n", improvements]
    text += ["## Curves\n", " ".join(f"![{path.stem}]({path.name})" for path in images) + "\n"]
    text += ["## Every run\n", seeds_table(groups), "## Provenance\n", provenance_table(groups)]
    again = f"python benchmarks/run.py --suite {name} --runs-dir again/runs --results again/results"
    text += [f"Run it again: `{again}`.\n"]
    texts[folder / "README.md"] = "\n".join(text)
    for path, content in texts.items():
        write_text(path, content)
    return [*images, *texts]


def language_report(name: str, groups: list[Group], results: Path) -> list[Path]:
    """The report of a suite in which language models learn; returns the files written."""
    folder, start = results / name, report_language.start_score(results, name)
    images = []
    for task in environments(groups):
        images.append(folder / image_name(task))
        report_language.figure([group for group in groups if group.entry.env == task], start, images[-1])
    missing = sum(len(group.entry.seeds) - len(group.seeds) for group in groups)
    missing += sum(len(entry.seeds) for entry in suite(name)) - sum(len(group.entry.seeds) for group in groups)
    header, *rows = report_language.scores_table(groups, start)
    prompts = {len(summary["final_eval"]["returns"]) for group in groups for summary in group.summaries}
    text = [f"# {name}\n", f"Made by `python benchmarks/report.py --suite {name}` from the files in this folder.\n"]
    if missing:
        text.append(f"**Incomplete: {missing} of the suite's runs are not published yet.**\n")
    if start is not None:
        text.append(f"Every run begins with the same model, whose held-out reward is {start:.3f}; gain: over that.\n")
    text += [table(header, rows), report_language.LEGEND.format(" or ".join(map(str, sorted(prompts))))]
    text += [" ".join(f"![{path.stem}]({path.name})" for path in images) + "\n"]
    text += ["## Provenance\n", provenance_table(groups)]
    again = f"python benchmarks/run.py --suite {name} --runs-dir again/runs --results again/results"
    text.append(f"Run it again: `{again}`.\n")
    write_text(folder / "README.md", "\n".join(text))
    return [*images, folder / "README.md"]


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="benchmarks/report.py", description="Tables and figures from published results.")
    parser.add_argument("--suite", required=True, help="a name in benchmarks/suites.py")
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="published results; default results/")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", help="the front page; default README.md")
    args = parser.parse_args(argv)
    with usage_errors():
        for path in report(args.suite, args.results.resolve(), args.readme.resolve()):
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
