"""The tables of a report of control tasks, in Markdown."""

import numpy as np
from report_published import (
    RETURNS,
    UNLIKE,
    WINDOW,
    lower_bound,
    origin,
    probability_above,
    published,
    published_rows,
    spread,
)
from report_runs import LAST, Group, environments, mean_return
from suites import PUBLISHED_NAMES

from cleanrl_zoo.core.statistics import interquartile_mean, probability_of_improvement, stratified_bootstrap

REPS = 10_000  # redraws of a bootstrap interval


def number(x: float, digits: int | None = None) -> str:
    """`x` with so many digits after the point; by its size, none or one, without a number of them."""
    return f"{x:.{digits}f}" if digits is not None else f"{x:.0f}" if abs(x) >= 100 else f"{x:.1f}"


def ours(scores: np.ndarray, digits: int | None = None) -> tuple[str, str]:
    """Mean ± std (ddof 0) and the IQM with its 95 % interval, as text."""
    if len(scores) == 1:
        return number(scores[0], digits), "–"
    low, high = stratified_bootstrap(scores[:, None], interquartile_mean, reps=REPS, seed=0)
    iqm = f"{number(interquartile_mean(scores), digits)} [{number(low, digits)}, {number(high, digits)}]"
    return f"{number(scores.mean(), digits)} ± {number(scores.std(), digits)}", iqm


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
    steps: dict[str, set[int]] = {}
    for group in groups:
        steps.setdefault(group.entry.name, set()).add(group.entry.steps)
    if len(set.union(*steps.values())) == 1:
        return {name: name for name in steps}
    return {name: f"{name}, {' or '.join(map(millions, sorted(counts)))}" for name, counts in steps.items()}


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
        minutes = np.median([run["timing"]["wall_clock_s"] for run in group.runs]) / 60
        rows.append([group.entry.env, group.entry.name, *group.provenance.values(), f"{minutes:.1f}"])
    header = ["environment", "setting", "commit", "engine", "versions", "machine", "minutes per run (median)"]
    return table(header, rows)


def short_note(groups: list[Group]) -> str:
    """Where a run has fewer than `LAST` training episodes, which then all count; "" if none has."""
    fewest: dict[str, int] = {}
    for group in groups:
        for summary in group.summaries:
            returns = summary["train_last100"].get("returns")  # not known of a longer run's beginning
            if returns and len(returns) < LAST:
                fewest[group.entry.env] = min(len(returns), fewest.get(group.entry.env, LAST))
    if not fewest:
        return ""
    short = ", ".join(f"{env} ({episodes})" for env, episodes in fewest.items())
    what = f"Fewer than {LAST} training episodes in a run, so that its mean is over all of them, from the first on"
    return f"{what}: {short}.\n"


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


def missing_note(groups: list[Group]) -> str:
    """The runs that are not published, counted and named; "" without one."""
    count = sum(group.missing for group in groups)
    if not count:
        return ""
    entries = [(group.entry, group.missing) for group in groups if group.missing]
    names = ", ".join(f"`{entry.name}` on {entry.env} ({missing} of {len(entry.seeds)})" for entry, missing in entries)
    return f"**Incomplete: {count} of the suite's runs are not published yet:** {names}.\n"


def left_out_note(damaged: list[str]) -> str:
    """The runs that were left out, counted and named; "" without one."""
    if not damaged:
        return ""
    what = "1 run has" if len(damaged) == 1 else f"{len(damaged)} runs have"
    return f"**Left out: {what} a damaged file.** {'; '.join(damaged)}.\n"
