"""The scores and means of a report as CSV: `report.csv`, each row with where it comes from, and `curves.csv`."""

import csv
import io

from report_compare import Comparison, score_name
from report_curves import Band
from report_published import RETURNS
from report_runs import Group
from report_tables import REPS

from cleanrl_zoo.core.statistics import interquartile_mean, stratified_bootstrap

COLUMNS = ("environment", "setting", "statistic", "of", "at", "value", "low", "high", "runs", "seeds", "protocol",
           "commit", "engine", "versions", "machine")  # fmt: skip
CURVE_COLUMNS = ("kind", "environment", "setting", "source", "of", "axis", "x", "value", "low", "high", "runs")


def numbers(groups: list[Group], comparisons: list[Comparison]) -> str:
    """`report.csv`: scores of single runs, their statistics on each environment, and over all environments."""
    rows = []
    for group in groups:
        for which in RETURNS:
            scores = group.scores(which)
            for seed, score in zip(group.seeds, scores, strict=len(scores) > 0):
                rows.append(_row([group], "score", which, f"seed {seed}", (score,)))
            if len(scores):
                low, high = stratified_bootstrap(scores[:, None], interquartile_mean, reps=REPS)
                rows.append(_row([group], "mean", which, "", (scores.mean(),)))
                rows.append(_row([group], "std (ddof 0)", which, "", (scores.std(),)))
                rows.append(_row([group], "IQM", which, "", (interquartile_mean(scores), low, high)))
    for comparison in comparisons:
        for name, own in comparison.groups.items():
            which = f"{score_name(own[0])}, on the common scale"
            for statistic, interval in comparison.statistics(name).items():
                rows.append(_row(own, statistic, which, "", interval))
            for other in comparison.groups:
                if other != name:
                    interval = comparison.improvement(name, other)
                    rows.append(_row(own, "probability of improvement", which, f"over {other}", interval))
    return _text(COLUMNS, rows)


def _row(groups: list[Group], statistic: str, of: str, at: str, values: tuple[float, ...]) -> list[str]:
    first = groups[0]
    seeds = "; ".join(dict.fromkeys(" ".join(map(str, group.seeds)) for group in groups))
    protocol = "; ".join(dict.fromkeys(group.protocol for group in groups))
    sources = [group.provenance for group in groups]
    numbers = [repr(float(value)) for value in values] + [""] * (3 - len(values))
    return [
        ", ".join(group.entry.env for group in groups), first.entry.name, statistic, of, at, *numbers,
        "; ".join(dict.fromkeys(str(len(group.seeds)) for group in groups)), seeds, protocol,
        *("; ".join(dict.fromkeys(source[name] for source in sources)) for name in sources[0]),
    ]  # fmt: skip


def curves(bands: list[Band], comparisons: list[Comparison]) -> str:
    """`curves.csv`: settings over steps and seconds on the common grid, and performance profiles over scores."""
    rows = []
    for band in bands:
        where = [
            "curve",
            band.env,
            band.setting,
            band.imported and f"imported: {band.imported}",
            band.metric,
            band.axis,
        ]
        for point in zip(band.x, band.value, band.low, band.high, strict=True):
            rows.append([*where, *(f"{value:.6g}" for value in point), str(band.runs)])
    for comparison in comparisons:
        levels, profiles = comparison.profiles()
        for name, profile in profiles.items():
            own, envs = comparison.groups[name], ", ".join(env for env, _ in comparison.tasks)
            where = ["profile", envs, name, "", score_name(own[0]), "score on the common scale"]
            for point in zip(levels, *profile, strict=True):
                runs = str(comparison.scores[name].size)
                rows.append([*where, *(f"{value:.6g}" for value in point), runs])
    return _text(CURVE_COLUMNS, rows)


def _text(columns: tuple[str, ...], rows: list[list[str]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return out.getvalue()
