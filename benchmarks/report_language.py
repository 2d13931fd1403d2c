"""Tables and figures of suites in which language models learn; `report.py` calls it for them.

    python benchmarks/report.py --suite addition

The score is the mean reward of sampled completions of held-out prompts, the same prompts and draws in every evaluation.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
from records import read_summary
from suites import START, SUITES, Entry

from cleanrl_zoo.core.statistics import interquartile_mean, stratified_bootstrap
from cleanrl_zoo.run.arguments import folder_name

REPS = 10_000  # redraws of a bootstrap interval

LEGEND = (
    "held out: mean reward of {} sampled completions, one for each held-out prompt, at the end of the run; mean ± std "
    "(ddof 0) over seeds. IQM: interquartile mean over seeds with its 95 % bootstrap interval. best: the highest mean "
    "over seeds of an evaluation on the way. tokens: sampled completion tokens, those of dropped samples too.\n"
)


def start_score(results: Path, name: str) -> float | None:
    """The held-out reward of the model that every run of the suite `name` begins with, if it is published."""
    if name not in START:
        return None
    entry: Entry = SUITES[START[name]][0]
    folder = results / START[name] / entry.name / folder_name(entry.env) / f"seed_{entry.seeds[0]}"
    return read_summary(folder)["final_eval"]["mean"] if (folder / "summary.json").exists() else None


def scores_table(groups: list[Any], start: float | None) -> list[list[str]]:
    """One row per setting, the best first."""
    rows = []
    for group in sorted(groups, key=lambda group: -group.scores("final").mean()):
        final, best = group.scores("final"), group.scores("max")
        low, high = stratified_bootstrap(final[:, None], interquartile_mean, reps=REPS, seed=0)
        gain = "–" if start is None else f"{final.mean() - start:+.3f}"
        minutes = np.median([run["timing"]["wall_clock_s"] for run in group.runs]) / 60
        rows.append([
            group.entry.env, group.entry.name, f"{len(group.seeds)} of {len(group.entry.seeds)}",
            f"{final.mean():.3f} ± {final.std():.3f}", f"{interquartile_mean(final):.3f} [{low:.3f}, {high:.3f}]", gain,
            f"{best.mean():.3f}", ", ".join(f"{score:.3f}" for score in final), f"{group.entry.steps:,}",
            f"{minutes:.1f}",
        ])  # fmt: skip
    header = ["task", "setting", "seeds", "held out", "IQM [95 %]", "gain", "best", "each seed", "tokens", "minutes"]
    return [header, *rows]


PAIRS_LEGEND = (
    "Means over seeds of the last logged value. agreement: share of the training pairs that the policy agrees with. "
    "margin: of the implied rewards, or of what the loss compares. KL: of the policy from the model at the start, "
    "nats per token of its own held-out completions. lengths: tokens of the completions learned from.\n"
)


TEACHER_LEGEND = (
    "Means over seeds of the last evaluation. KL: exact KL(student‖teacher), nats per token of the student's held-out "
    "completions. length: their tokens.\n"
)


def pairs_table(groups: list[Any]) -> list[list[str]]:
    """What was logged of pairs: one row per setting, in the order of `scores_table`; empty where nothing was."""
    return _last_values(groups, "margin", {
        "agreement": "accuracy", "margin": "margin", "KL": "ref_kl", "chosen length": "chosen_length",
        "rejected length": "rejected_length",
    })  # fmt: skip


def teacher_table(groups: list[Any]) -> list[list[str]]:
    """How far students are from their teacher, as `pairs_table`."""
    return _last_values(groups, "eval_teacher_kl", {"KL": "eval_teacher_kl", "length": "eval_length"})


def _last_values(groups: list[Any], asked: str, columns: dict[str, str]) -> list[list[str]]:
    """A row for each group whose curves have the column `asked`: titles and what was logged last."""

    def last(group: Any, name: str) -> str:
        seen = [[point[name] for point in curve if name in point] for curve in group.curves]
        return f"{np.mean([values[-1] for values in seen]):.3f}" if all(seen) else "–"

    found = [group for group in groups if any(asked in point for curve in group.curves for point in curve)]
    rows = [
        [group.entry.env, group.entry.name, *(last(group, name) for name in columns.values())]
        for group in sorted(found, key=lambda group: -group.scores("final").mean())
    ]
    return [["task", "setting", *columns], *rows] if rows else []


def figure(groups: list[Any], start: float | None, path: Path) -> None:
    """Held-out reward over sampled tokens, mean and min–max over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    fig, axes = plt.subplots(figsize=(8.2, 4.6), layout="constrained")
    colors = plt.get_cmap("tab20").colors
    for index, group in enumerate(sorted(groups, key=lambda group: -group.scores("final").mean())):
        curves = np.asarray([summary["eval_curve"] for summary in group.summaries])  # [seeds, points, (step, reward)]
        steps, rewards = curves[:, :, 0].mean(0) / 1e3, curves[:, :, 1]
        if start is not None:
            steps = np.concatenate([[0.0], steps])
            rewards = np.concatenate([np.full((len(rewards), 1), start), rewards], 1)
        color = colors[index % len(colors)]
        axes.plot(steps, rewards.mean(0), label=f"{group.entry.name} {rewards[:, -1].mean():.3f}", color=color)
        axes.fill_between(steps, rewards.min(0), rewards.max(0), color=color, alpha=0.1, linewidth=0)
    axes.grid(alpha=0.3)
    axes.set(title=groups[0].entry.env, xlabel="completion tokens, thousands", ylabel="held-out reward, sampled")
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    fig.savefig(temporary, dpi=110, metadata={"Software": None})
    os.replace(temporary, path)
    plt.close(fig)
