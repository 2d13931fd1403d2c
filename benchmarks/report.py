"""Makes a suite's tables and figures from its published raw files.

    python benchmarks/report.py --suite first_light

Writes `results/<suite>/README.md` and one figure per environment, and for the front page's suite rewrites two blocks of
the README: `<!-- results:start -->` to `<!-- results:end -->`, and `speed` likewise with the tables of `speed.py`.
Published numbers stand beside ours only where environment, its version, steps and metric are the same.
"""

import csv
import math
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from records import ROOT, Parser, check_made_as_asked, read_curve, read_run, read_summary, suite, write_text
from suites import FRONT_PAGE, PUBLISHED_NAMES, Entry

from cleanrl_zoo.core.statistics import interquartile_mean, probability_of_improvement, stratified_bootstrap
from cleanrl_zoo.run.arguments import usage_errors

PUBLISHED = Path(__file__).with_name("published.csv")
FREE_ARGS = ("seed", "track")  # what may differ between the seeds of one setting

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


@dataclass
class Group:
    """All published seeds of one entry."""

    entry: Entry
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


def read_group(folder: Path, entry: Entry) -> Group:
    """The published runs of `entry`; ValueError if one is damaged or was made with other flags than the suite's."""
    group, base = Group(entry), folder / entry.name / entry.env
    odd = {path.name for path in base.glob("seed_*")} - {f"seed_{seed}" for seed in entry.seeds}
    if odd:
        raise ValueError(f"{base}: {', '.join(sorted(odd))} is not among the suite's seeds: move it away")
    for seed in entry.seeds:
        place = base / f"seed_{seed}"
        if (place / "summary.json").exists():
            check_made_as_asked(place, entry, seed)
            group.seeds.append(seed)
            group.runs.append(read_run(place))
            group.summaries.append(read_summary(place))
            group.curves.append(read_curve(place / "curve.csv"))
            if not group.curves[-1] or group.curves[-1][-1]["step"] < entry.steps:
                raise ValueError(f"{place / 'curve.csv'}: damaged (it does not reach step {entry.steps})")
    return group


def check_alike(groups: list[Group]) -> None:
    """Raises ValueError, naming it, if anything differs that must be equal for numbers to stand in one row.

    Within a group: all flags but the seed, and the points of evaluation. On one environment: engine and versions.
    """
    engines: dict[str, tuple[str, dict[str, Any]]] = {}
    for group in groups:
        for seed, run, summary in zip(group.seeds, group.runs, group.summaries, strict=True):
            here = f"{group.title} seed {seed}"
            where, first = engines.setdefault(group.entry.env, (here, run["provenance"]["env"]))
            _same(where, first, here, run["provenance"]["env"])
            first_seed = f"{group.title} seed {group.seeds[0]}"
            args = [{k: v for k, v in r["args"].items() if k not in FREE_ARGS} for r in (group.runs[0], run)]
            _same(first_seed, args[0], here, args[1])
            steps = [
                {"evaluations at steps": [point[0] for point in s["eval_curve"]]} for s in (group.summaries[0], summary)
            ]
            _same(first_seed, steps[0], here, steps[1])


def _same(where: str, a: dict[str, Any], also: str, b: dict[str, Any]) -> None:
    for key in sorted(set(a) | set(b)):
        if a.get(key) != b.get(key):
            raise ValueError(f"cannot be compared: {key} is {a.get(key)} in {where} but {b.get(key)} in {also}")


def published_rows(entry: Entry, which: str) -> list[dict[str, str]]:
    """Rows of published.csv with the same algorithm, environment, version, steps and metric."""
    env, _, version = entry.env.rpartition("-")
    with open(PUBLISHED, newline="") as file:
        return [
            row
            for row in csv.DictReader(file)
            if row["algorithm"] == PUBLISHED_NAMES.get(entry.algorithm)
            and (row["env"], row["env_version"], row["step_budget"]) == (env, version, str(entry.steps))
            and row["metric"] in RETURNS[which][1]
        ]


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
    low, high = stratified_bootstrap(scores[:, None], interquartile_mean, reps=10_000, seed=0)
    iqm = f"{number(interquartile_mean(scores))} [{number(low)}, {number(high)}]"
    return f"{number(scores.mean())} ± {number(scores.std())}", iqm


def beside(scores: np.ndarray, row: dict[str, str] | None) -> list[str]:
    """The published cells of a row: mean ± std (seeds), source, bound, probability."""
    if row is None:
        return ["–", "–", "–", "–"]
    mean, known = float(row["value"]), spread(row)
    if known is None:
        return [number(mean), row["source_project"], "–", "–"]
    std, n = known
    bound = number(lower_bound(mean, std, n, len(scores))) if n > 1 else "–"
    probability = f"{probability_above(scores, mean, std):.2f}" if std > 0 else "–"
    return [f"{number(mean)} ± {number(std)} ({n})", row["source_project"], bound, probability]


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


def returns_table(groups: list[Group], which: str) -> str:
    rows = []
    for group in groups:
        scores = group.scores(which)
        if len(scores) == 0:
            continue
        of = f"{len(scores)}" if len(scores) == len(group.entry.seeds) else f"{len(scores)} of {len(group.entry.seeds)}"
        for row in published_rows(group.entry, which) or [None]:
            rows.append([group.entry.env, group.entry.name, of, *ours(scores), *beside(scores, row)])
    return table(HEADER, rows)


def seeds_table(groups: list[Group]) -> str:
    """Every run's three returns: nothing hides in a mean."""
    rows = []
    for group in groups:
        columns = [group.scores(which) for which in RETURNS]
        for i, seed in enumerate(group.seeds):
            cells = [number(scores[i]) if len(scores) else "–" for scores in columns]
            rows.append([group.entry.env, group.entry.name, str(seed), *cells])
    return table(["environment", "setting", "seed", "last 100", "final evaluation", "at the maximum"], rows)


def improvement_table(groups: list[Group]) -> str:
    """P(a run of one setting scores above a run of another) on the same environment, last 100 training episodes."""
    rows = []
    for a in groups:
        for b in groups:
            x, y = a.scores("train"), b.scores("train")
            if a is not b and a.entry.env == b.entry.env and len(x) and len(y):
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


def sources_list(groups: list[Group]) -> str:
    """Where each published number that was used comes from."""
    rows = [row for group in groups for which in RETURNS for row in published_rows(group.entry, which)]
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


def figure(groups: list[Group], path: Path) -> None:
    """Training return over steps on one environment: mean and min–max over seeds, published means as lines."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("figures need matplotlib: pip install -c constraints.txt -e '.[report]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    fig, axes = plt.subplots(figsize=(5.2, 3.4), layout="constrained")
    for group in groups:
        curves = [curve for curve in group.curves if any(point["episodes"] > 0 for point in curve)]
        if not curves:
            continue
        edges = np.linspace(0, max(curve[-1]["step"] for curve in curves), 101)
        values = np.stack([binned(curve, edges) for curve in curves])  # [seeds, bins]
        centers = (edges[1:] + edges[:-1]) / 2e6
        (drawn,) = axes.plot(centers, values.mean(0), label=f"{group.entry.name} ({len(values)} seeds: mean, min–max)")
        axes.fill_between(centers, values.min(0), values.max(0), alpha=0.2, color=drawn.get_color(), linewidth=0)
    for row in {row["source_project"]: row for row in published_rows(groups[0].entry, "train")}.values():
        label = f"{row['source_project']}, last 100 episodes at the end"
        axes.axhline(float(row["value"]), linestyle="--", color="black", linewidth=1, label=label)
    axes.set(title=groups[0].entry.env, xlabel="environment steps, millions", ylabel="training return")
    axes.legend(fontsize=7, loc="lower right")
    axes.grid(alpha=0.3)
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
            rows.append([f"`{group.entry.env}`", str(len(train)), *ours(train), *beside(train, row), ours(final)[0]])
    header = ["environment", "seeds", *HEADER[3:], "final evaluation"]
    images = " ".join(f'<img src="{here}/{image_name(env)}" width="32%" alt="{env}">' for env in environments(groups))
    steps = " and ".join(sorted({f"{group.entry.steps:,}" for group in groups}))
    intro = f"Mean return of the last 100 training episodes after {steps} steps, all seeds fixed beforehand:\n"
    outro = f"Every run's raw curve, the other returns, commits, versions and machines: [{here}]({here}/README.md)."
    return "\n".join([intro, table(header, rows), LEGEND, images, "", outro])


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
    groups = [group for group in (read_group(folder, entry) for entry in entries) if group.seeds]
    if not groups:
        raise ValueError(f"{folder} holds no published run: python benchmarks/run.py --suite {name}")
    check_alike(groups)
    missing = sum(len(entry.seeds) for entry in entries) - sum(len(group.seeds) for group in groups)
    texts = {}
    if name == FRONT_PAGE:  # first, so that missing markers are told before anything is written
        blocks = {"results": front_page(groups, folder, readme)}
        speed = sorted((results / "speed").glob("*.md"))
        if speed:
            blocks["speed"] = "\n\n".join(path.read_text() for path in speed)
        texts[readme] = with_blocks(readme, blocks)
    images = []
    for env in environments(groups):
        images.append(folder / image_name(env))
        figure([group for group in groups if group.entry.env == env], images[-1])

    text = [f"# {name}\n", f"Made by `python benchmarks/report.py --suite {name}` from the files in this folder.\n"]
    if missing:
        text.append(f"**Incomplete: {missing} of the suite's runs are not published yet.**\n")
    for which, (title, _) in RETURNS.items():
        text += [f"## {title}\n", returns_table(groups, which)]
    episodes = sorted({len(summary["final_eval"]["returns"]) for group in groups for summary in group.summaries})
    text.append(f"One evaluation is {' or '.join(map(str, episodes))} episodes.\n")
    text += [LEGEND, "Published numbers:\n", sources_list(groups)]
    if improvements := improvement_table(groups):
        text += ["## Settings against each other, last 100 training episodes\n", improvements]
    text += ["## Curves\n", " ".join(f"![{path.stem}]({path.name})" for path in images) + "\n"]
    text += ["## Every run\n", seeds_table(groups), "## Provenance\n", provenance_table(groups)]
    again = f"python benchmarks/run.py --suite {name} --runs-dir again/runs --results again/results"
    text += [f"Run it again: `{again}`.\n"]
    texts[folder / "README.md"] = "\n".join(text)
    for path, content in texts.items():
        write_text(path, content)
    return [*images, *texts]


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
