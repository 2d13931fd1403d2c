"""The figures of a report of control tasks: training return over steps, one picture per environment.

Beside another package a second panel has it over wall-clock seconds.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
from report_curves import lines_of
from report_published import published_rows
from report_runs import Group
from suites import PUBLISHED_NAMES

from cleanrl_zoo.run.arguments import folder_name


def image_name(env: str) -> str:
    """The file name of an environment's figure."""
    return f"{folder_name(env)}.png"


def binned(curve: list[dict[str, float]], edges: np.ndarray) -> np.ndarray:
    """Episode-weighted mean training return in each bin of steps; bins without an episode are interpolated."""
    points = [point for point in curve if point["episodes"] > 0]
    steps, returns, episodes = (np.asarray([p[k] for p in points]) for k in ("step", "train_return", "episodes"))
    total = np.histogram(steps, edges, weights=returns * episodes)[0]
    count = np.histogram(steps, edges, weights=episodes)[0]
    centers, seen = (edges[1:] + edges[:-1]) / 2, count > 0
    return np.interp(centers, centers[seen], total[seen] / count[seen])


def draw_over_seconds(axes: Any, groups: list[Group]) -> None:
    """Every seed's curve over wall-clock seconds, up to its own end, in the colour that `draw` gives its group."""
    for index, group in enumerate(groups):
        for line in lines_of([group]):
            if line.metric == "train":
                axes.plot(*line.over("seconds"), color=f"C{index}", linewidth=1)


def published_line(row: dict[str, str], name: str = "") -> str:
    return f"{row['source_project']}{f' ({name})' if name else ''}, last 100 episodes at the end"


def draw(axes: Any, groups: list[Group], several: bool, unit: float) -> None:
    """The curves of all groups over steps, in units of `unit`.

    Published means are in the group's colour where there are several algorithms.
    """
    for index, group in enumerate(groups):
        curves = [curve for curve in group.curves if any(point["episodes"] > 0 for point in curve)]
        if not curves:
            continue
        edges = np.linspace(0, max(curve[-1]["step"] for curve in curves), 101)
        values = np.stack([binned(curve, edges) for curve in curves])  # [seeds, bins]
        centers = (edges[1:] + edges[:-1]) / (2 * unit)
        seeds = f"{len(values)} seeds: mean, min–max" if len(values) > 1 else "1 seed"
        color, alpha = f"C{index}", 0.12 if several else 0.2
        axes.plot(centers, values.mean(0), color=color, label=f"{group.entry.name} ({seeds})")
        axes.fill_between(centers, values.min(0), values.max(0), alpha=alpha, color=color, linewidth=0)
        for row in published_rows(group.entry, "train") if several else []:
            label = published_line(row, group.entry.name)
            axes.axhline(float(row["value"]), linestyle="--", color=color, linewidth=1, label=label)
    if not several:
        for row in {row["source_project"]: row for row in published_rows(groups[0].entry, "train")}.values():
            axes.axhline(float(row["value"]), linestyle="--", color="black", linewidth=1, label=published_line(row))


def figure(groups: list[Group], path: Path) -> None:
    """Training return over steps on one environment: mean and min–max over seeds, published means as lines.

    With a package's runs among ours, every run over seconds as well.
    """
    try:
        import matplotlib
    except ImportError:
        raise ValueError("figures need matplotlib: pip install -c constraints.txt -e '.[report]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    # what is the beginning of other curves only would hide them
    groups = [group for group in groups if len(group.cut) < len(group.seeds)]
    several = len({PUBLISHED_NAMES.get(group.entry.algorithm) for group in groups}) > 1
    unit = 1e6 if max(group.entry.steps for group in groups) > 1e5 else 1e3
    lengths = sorted({group.entry.steps / unit for group in groups})
    split = len(lengths) > 1 and lengths[-1] >= 3 * lengths[-2]  # where few go on for long, the rest gets more room
    timed = any(group.entry.is_peer for group in groups)
    size = (8.2 + 3.6 * timed, 3.9) if several else (5.2, 3.4)
    widths = [2.5, *([1] if split else []), *([2.5] if timed else [])]
    fig, panels = plt.subplots(
        1, len(widths), figsize=size, layout="constrained", sharey=True, squeeze=False, width_ratios=widths
    )
    for axes in panels[0]:
        axes.grid(alpha=0.3)
    for axes in panels[0, : 1 + split]:
        draw(axes, groups, several, unit)
    first = panels[0, 0]
    if split:
        margin = 0.02 * lengths[-2]
        first.set_xlim(-margin, lengths[-2])
        panels[0, 1].set_xlim(lengths[-2], lengths[-1] + margin)
    first.set(
        title=groups[0].entry.env,
        xlabel=f"environment steps, {'millions' if unit == 1e6 else 'thousands'}",
        ylabel="training return",
    )
    if timed:
        draw_over_seconds(panels[0, -1], groups)
        panels[0, -1].set(xlabel="wall-clock seconds, every seed")
    place = {"loc": "center left", "bbox_to_anchor": (1, 0.5)} if several else {"loc": "lower right"}
    panels[0, -1].legend(*first.get_legend_handles_labels(), fontsize=7, **place)
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    fig.savefig(temporary, dpi=110, metadata={"Software": None})
    os.replace(temporary, path)
    plt.close(fig)
