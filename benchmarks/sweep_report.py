"""The report of a sweep: best settings as a preset, tables, figures; `sweep.py` calls it."""

import csv
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from launch import load_algorithm
from records import ROOT, read_json, write_text
from report_tables import table

from cleanrl_zoo.core.statistics import probability_of_improvement, stratified_bootstrap

REPS = 10_000  # redraws of a bootstrap interval
TOP = 10  # trials in the report's table
QUANTILE = 0.25  # share of the completed trials that importance is about
ENOUGH = 8  # completed trials, from which on importance is worth a figure
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#999999"  # told apart by the colour-blind, too

SCORE = {"last100": "mean return of the last 100 training episodes", "eval": "final deterministic evaluation"}
STATISTIC = {"iqm": "interquartile mean", "mean": "mean", "median": "median", "min": "minimum"}


def compare(best: list[float], defaults: list[float]) -> dict[str, Any]:
    """How far the best settings are from the defaults, scores [seeds] each, with 95 % bootstrap intervals."""
    scores = np.stack([best, defaults], axis=1)  # [seeds, 2], each column redrawn by itself
    interval = stratified_bootstrap(scores, lambda table: float(table[:, 0].mean() - table[:, 1].mean()), reps=REPS)
    probability, *its_interval = probability_of_improvement(best, defaults, reps=REPS)
    return {
        "difference": float(np.mean(best) - np.mean(defaults)),
        "difference_interval": list(interval),
        "probability": probability,
        "probability_interval": its_interval,
    }


def verdict(result: dict[str, Any]) -> str:
    """What the confirmation found, in two sentences."""
    seeds, (low, high) = result["seeds"], result["difference_interval"]
    (p_low, p_high), best, defaults = result["probability_interval"], result["best"], result["defaults"]
    found = (
        "the best settings are better"
        if low > 0
        else "the defaults are better"
        if high < 0
        else "no difference is shown"
    )
    return (
        f"Trial {result['trial']} against the defaults on the fresh seeds {seeds[0]} to {seeds[-1]}: "
        f"{spread(best)} against {spread(defaults)} (mean ± std), mean difference {number(result['difference'])} "
        f"[{number(low)}, {number(high)}], probability of improvement {result['probability']:.2f} "
        f"[{p_low:.2f}, {p_high:.2f}]: {found}."
    )


def spread(scores: list[float]) -> str:
    return f"{number(float(np.mean(scores)))} ± {number(float(np.std(scores)))}"


def number(x: float) -> str:
    return f"{x:.0f}" if abs(x) >= 100 else f"{x:.1f}" if abs(x) >= 10 else f"{x:.2f}"


def shown(value: Any) -> str:
    """A setting as a table shows it."""
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value)


def relative(path: Path) -> str:
    """A path as a command in the repository's folder takes it."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def settings_of(trial: Any) -> dict[str, Any]:
    return trial.user_attrs.get("drawn", {}).get("settings", {})


def value_of(trial: Any) -> float | None:
    """A trial's score; that at its last rung if it was pruned."""
    return trial.value if trial.value is not None and np.isfinite(trial.value) else None


def trials_csv(trials: list[Any]) -> str:
    """All trials, a row each, with what the score was made of."""
    names = list(dict.fromkeys(name for trial in trials for name in settings_of(trial)))
    rungs = sorted({step for trial in trials for step in trial.intermediate_values})
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["trial", "state", "score", "seeds", *names, *(f"seeds at {step}" for step in rungs)])
    for trial in trials:
        seeds = [trial.user_attrs.get("scores"), *(trial.user_attrs.get(f"seeds at {step}") for step in rungs)]
        final, *earlier = (" ".join(map(repr, values)) if values else "" for values in seeds)
        score = "" if value_of(trial) is None else repr(value_of(trial))
        settings = [json.dumps(settings_of(trial)[name]) if name in settings_of(trial) else "" for name in names]
        writer.writerow([trial.number, trial.state.name.lower(), score, final, *settings, *earlier])
    return out.getvalue()


def importances(study: Any) -> dict[str, float]:
    """Each drawn parameter's share (PED-ANOVA) in what tells the best quarter of the completed trials from all."""
    import optuna

    evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=QUANTILE)
    return optuna.importance.get_param_importances(study, evaluator=evaluator)


def history_figure(trials: list[Any], title: str, unit: str, path: Path) -> None:
    """Every trial's score, and the best so far."""
    plt = pyplot()
    fig, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    scored = [trial for trial in trials if value_of(trial) is not None]
    pruned = [trial for trial in scored if trial.state.name == "PRUNED"]
    complete = [trial for trial in scored if trial.state.name == "COMPLETE"]
    axes.scatter(
        [t.number for t in complete], [t.value for t in complete], color=BLUE, s=22, label="complete", zorder=3
    )
    if pruned:
        axes.scatter([t.number for t in pruned], [t.value for t in pruned], color=GREY, marker="x", s=26,
                     label="pruned: at its last rung", zorder=3)  # fmt: skip
    best = np.maximum.accumulate([t.value for t in complete])
    axes.step([t.number for t in complete], best, where="post", color=ORANGE, label="best so far")
    axes.set(title=title, xlabel="trial", ylabel=unit)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save(fig, path)


def importance_figure(shares: dict[str, float], title: str, path: Path) -> None:
    """A bar for each parameter, the most important on top."""
    plt = pyplot()
    fig, axes = plt.subplots(figsize=(6.4, 0.9 + 0.3 * len(shares)), layout="constrained")
    axes.barh(list(shares)[::-1], list(shares.values())[::-1], color=BLUE)
    axes.set(title=title, xlabel="importance (share of all parameters)")
    axes.grid(alpha=0.3, axis="x")
    save(fig, path)


def pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ValueError("figures need matplotlib: pip install -c constraints.txt -e '.[report]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def save(fig: Any, path: Path) -> None:
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    fig.savefig(temporary, dpi=110, metadata={"Software": None})
    os.replace(temporary, path)
    pyplot().close(fig)


def best_table(settings: dict[str, Any], defaults: Any) -> str:
    rows = [[f"`{name}`", shown(value), shown(getattr(defaults, name))] for name, value in settings.items()]
    return table(["setting", "best", "default"], rows)


def top_table(complete: list[Any]) -> str:
    best = sorted(complete, key=lambda trial: -trial.value)[:TOP]
    names = list(dict.fromkeys(name for trial in best for name in settings_of(trial)))
    rows = [
        [
            str(trial.number),
            number(trial.value),
            ", ".join(number(score) for score in trial.user_attrs["scores"]),
            *(shown(settings_of(trial)[name]) if name in settings_of(trial) else "" for name in names),
        ]
        for trial in best
    ]
    return table(["trial", "score", "seeds", *names], rows)


def write(study: Any, count: int, folder: Path, algos: Path = ROOT / "algos") -> list[Path]:
    """Writes the report of the first `count` trials into `folder`, which has `sweep.json`; returns the files."""
    content = read_json(folder / "sweep.json", "plan", "provenance")
    plan, provenance = content["plan"], content["provenance"]
    trials = study.get_trials(deepcopy=False)[:count]
    states = [trial.state.name for trial in trials]
    complete = [trial for trial in trials if trial.state.name == "COMPLETE"]
    write_text(folder / "trials.csv", trials_csv(trials))
    seeds, steps = plan["seeds"], plan["steps"]
    score = f"{STATISTIC[plan['statistic']]} over the seeds of the {SCORE[plan['score']]}"
    text = [
        f"# {content['name']}: {plan['algorithm']} on {plan['env']}\n",
        "Made by `benchmarks/sweep.py` from `trials.csv`, which has every trial with its seeds' scores, and "
        "`sweep.json`, which has the plan. How scoring and pruning work: docs/sweeps.md.\n",
        f"{count} trials: {states.count('COMPLETE')} complete, {states.count('PRUNED')} pruned, {states.count('FAIL')} "
        f"failed. A trial is {seeds} runs of {steps:,} steps (seeds 1 to {seeds}) and its score the {score}.\n",
    ]
    unfinished = count - sum(states.count(state) for state in ("COMPLETE", "PRUNED", "FAIL"))
    if unfinished:
        text.append(f"**Incomplete: {unfinished} trials are not finished yet.**\n")
    files = [folder / "trials.csv"]
    if complete:
        best = max(complete, key=lambda trial: trial.value)
        write_text(folder / "best.json", json.dumps(plan["base"] | settings_of(best), indent=1) + "\n")
        files.append(folder / "best.json")
        text += [
            f"## Best: trial {best.number}\n",
            f"Its score is {number(best.value)}. **That number is optimistic**: it is the highest of {len(complete)} "
            f"scores, each with the luck of {seeds} seeds, and the settings were chosen for it. What they are worth on "
            "other seeds is below.\n",
            best_table(settings_of(best), load_algorithm(algos / f"{plan['algorithm']}.py").Args()),
            f"`python algos/{plan['algorithm']}.py --preset {relative(folder / 'best.json')}`\n",
        ]
        text += confirmation(folder, best.number)
        title, unit = (
            f"{content['name']}: {plan['algorithm']} on {plan['env']}, {steps:,} steps",
            f"return ({STATISTIC[plan['statistic']]} of {seeds} seeds)",
        )
        history_figure(trials, title, unit, folder / "history.png")
        files.append(folder / "history.png")
        text += [
            "## Trials\n",
            "![history](history.png)\n",
            f"The best {min(TOP, len(complete))}:\n",
            top_table(complete),
        ]
        text.append("## Importance\n")
        if len(complete) >= ENOUGH:
            shares = importances(study)
            importance_figure(shares, f"{content['name']}: importance", folder / "importance.png")
            files.append(folder / "importance.png")
            text += [
                "![importance](importance.png)\n",
                f"PED-ANOVA: each parameter's share in what tells the best {QUANTILE:.0%} of the {len(complete)} "
                "completed trials from all of them. Pruned trials do not count; with so few trials it is a hint.\n",
            ]
        else:
            text.append(f"Not computed from fewer than {ENOUGH} completed trials; there are {len(complete)}.\n")
    where = ", ".join(f"{name} {version}" for name, version in provenance["versions"].items())
    on = provenance["machine"]
    changed = " with changes" if provenance["dirty"] else ""
    text += [
        "## Provenance\n",
        f"Begun at commit {provenance['commit']}{changed}; {where}; {on['cpu']}, {on['cores']} cores, "
        f"{on['system']}.\n",
    ]
    write_text(folder / "README.md", "\n".join(text))
    return [*files, folder / "README.md"]


def confirmation(folder: Path, best: int) -> list[str]:
    """The report's part about fresh seeds."""
    heading = "## On fresh seeds\n"
    if not (folder / "confirm.json").exists():
        return [heading, "Not run yet: the same command with `--confirm`.\n"]
    result = read_json(folder / "confirm.json", "trial", "seeds", "best", "defaults")
    if result["trial"] != best:
        return [heading, f"Run for trial {result['trial']}, which is not the best any more: `--confirm` again.\n"]
    rows = [
        [str(seed), number(ours), number(theirs)]
        for seed, ours, theirs in zip(result["seeds"], result["best"], result["defaults"], strict=True)
    ]
    legend = (
        "Intervals: 95 %, bootstrap over seeds, 10,000 redraws. Probability of improvement: that a run with the best "
    )
    legend += "settings scores above one with the defaults.\n"
    return [heading, verdict(result) + "\n", legend, table(["seed", "best", "defaults"], rows)]
