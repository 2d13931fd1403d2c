"""One page per report, with nothing outside it: curves to look at, tables, and where every number comes from.

The page's own style and script are `report_page.css` and `report_page.js`, written into it; it loads nothing.
"""

import json
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from report_compare import Comparison, comparison_note, comparison_rows
from report_curves import METRICS, Band, Line
from report_imported import Imported
from report_published import RETURNS
from report_runs import Group
from report_tables import number, ours

PARTS = Path(__file__).parent
LANGUAGE_METRICS = {"train": "reward in training", "eval": "held-out reward"}


def page(
    title: str,
    made_by: str,
    groups: list[Group],
    lines: list[Line],
    bands: list[Band],
    comparisons: list[Comparison],
    imported: list[Imported],
    notes: list[str],
) -> str:
    """The page's HTML. `notes` are shown first: what is missing, what was left out."""
    places = {id(group): f"p{i}" for i, group in enumerate(groups, 1)}
    tables = [_scores(groups, places)]
    for comparison in comparisons:
        header, rows = comparison_rows(comparison)
        sources = {
            name: _links([places[id(group)] for group in own if id(group) in places])
            for name, own in comparison.groups.items()
        }
        body = [[*map(escape, row), sources[row[0]]] for row in rows]
        tables += [
            "<h2>Settings over all environments</h2>",
            f'<p class="note">{escape(comparison_note(comparison))}</p>',
            _table([*header, "from"], body),
            "<h3>Probability of improvement: a run of the row above a run of the column</h3>",
            _table(*_pairs(comparison)),
        ]
    tables += [_runs(groups, places), _provenance(groups, places), _files(imported)]
    language = all(group.entry.is_language for group in groups)
    where = {(group.entry.env, group.entry.name): _where(group) for group in groups}
    shown = [line for line in lines if line.metric in METRICS]
    content = {
        "envs": list(dict.fromkeys(line.env for line in shown)),
        "metrics": [[key, text] for key, text in (LANGUAGE_METRICS if language else METRICS).items()],
        "units": "completion tokens" if language else "environment steps",
        "lines": [_line(line, where) for line in shown],
        "bands": [_band(band, where) for band in bands],
        "profiles": [_profile(comparison) for comparison in comparisons],
    }
    return _fill(
        (PARTS / "report_page.html").read_text(),
        title=escape(title),
        made=f"Made by <code>{escape(made_by)}</code>.",
        notes="\n".join(f'<p class="note warning">{escape(note)}</p>' for note in notes),
        style=(PARTS / "report_page.css").read_text().strip(),
        script=(PARTS / "report_page.js").read_text().strip(),
        tables="\n".join(filter(None, tables)),
        # no text of a run may end the element: "<" only ever stands inside JSON's strings
        data=json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
    )


def _fill(template: str, **parts: str) -> str:
    """The template with each `{{name}}` replaced once; what is put in is not looked through again."""
    pieces = template.split("{{")
    return pieces[0] + "".join(parts[name] + rest for name, _, rest in (piece.partition("}}") for piece in pieces[1:]))


def _where(group: Group) -> str:
    source = group.provenance
    return f"commit {source['commit']}; {group.protocol}; {source['engine']}; {source['versions']}; {source['machine']}"


def _label(setting: str, imported: str) -> str:
    return f"imported: {setting} ({imported})" if imported else setting


def _rounded(values: np.ndarray, digits: int) -> list[float]:
    return [float(f"{value:.{digits}g}") for value in values]


def _line(line: Line, where: dict[tuple[str, str], str]) -> dict[str, Any]:
    """What the script draws; six digits are finer than a screen."""
    finite = np.isfinite(line.values)
    return {
        "env": line.env,
        "setting": _label(line.setting, line.imported),
        "run": line.run,
        "metric": line.metric,
        "imported": bool(line.imported),
        "where": f"read from {line.imported}: versions and protocol are not in it" if line.imported
        else where[line.env, line.setting],
        "steps": [int(step) for step in line.steps[finite]],
        "seconds": None if line.seconds is None else _rounded(line.seconds[finite], 6),
        "y": _rounded(line.values[finite], 6),
    }  # fmt: skip


def _band(band: Band, where: dict[tuple[str, str], str]) -> dict[str, Any]:
    arrays = {"x": band.x, "value": band.value, "low": band.low, "high": band.high}
    return {
        "env": band.env,
        "setting": _label(band.setting, band.imported),
        "metric": band.metric,
        "axis": band.axis,
        "runs": band.runs,
        "imported": bool(band.imported),
        "where": f"read from {band.imported}" if band.imported else where[band.env, band.setting],
        **{name: _rounded(values, 6) for name, values in arrays.items()},
    }


def _profile(comparison: Comparison) -> dict[str, Any]:
    levels, profiles = comparison.profiles()
    return {
        "note": f"Share of all runs on {comparison.where} whose score is above τ, with its 95 % interval at each τ.",
        "levels": _rounded(levels, 6),
        "settings": [
            {"name": name, **dict(zip(("value", "low", "high"), (_rounded(v, 6) for v in profile), strict=True))}
            for name, profile in profiles.items()
        ],
    }


def _table(header: list[str], rows: list[list[str]], ids: list[str] | None = None) -> str:
    """`rows` are HTML already, `header` is text."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    lines = [
        f"<tr{f' id={ids[i]}' if ids else ''}>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>"
        for i, row in enumerate(rows)
    ]
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _links(places: list[str]) -> str:
    return " ".join(f'<a href="#{place}">{place}</a>' for place in places)


def _digits(group: Group, value: float) -> str:
    return number(value, 3 if group.entry.is_language else None)


def _names(groups: list[Group]) -> dict[str, str]:
    """Short names of the three returns."""
    if all(group.entry.is_language for group in groups):
        return {"train": "last 100 completions", "final": "held out", "max": "held out, best on the way"}
    return {"train": "last 100 episodes", "final": "final evaluation", "max": "at the maximum"}


def _scores(groups: list[Group], places: dict[int, str]) -> str:
    rows = []
    for group in groups:
        cells = []
        for which in RETURNS:
            scores = group.scores(which)
            cells += ["–", "–"] if len(scores) == 0 else ours(scores, 3 if group.entry.is_language else None)
        seeds = f"{len(group.seeds)} of {len(group.entry.seeds)}"
        rows.append([escape(group.entry.env), escape(group.entry.name), seeds, *cells, _links([places[id(group)]])])
    header = [f"{name}{text}" for name in _names(groups).values() for text in (", mean ± std", ": IQM [95 %]")]
    note = "mean ± std over seeds (ddof 0); interquartile mean over seeds with its 95 % stratified bootstrap interval."
    table = _table(["environment", "setting", "seeds", *header, "from"], rows)
    return f'<h2>Returns</h2><p class="note">{note}</p>{table}'


def _pairs(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    names, rows = list(comparison.scores), []
    for a in names:
        cells = []
        for b in names:
            p, low, high = comparison.improvement(a, b) if a != b else (0.5, 0.5, 0.5)
            cells.append("" if a == b else f"{p:.2f} [{low:.2f}, {high:.2f}]")
        rows.append([escape(a), *cells])
    return ["over", *names], rows


def _runs(groups: list[Group], places: dict[int, str]) -> str:
    rows = []
    for group in groups:
        columns = [group.scores(which) for which in RETURNS]
        for i, (seed, run) in enumerate(zip(group.seeds, group.runs, strict=True)):
            cells = [_digits(group, scores[i]) if len(scores) else "–" for scores in columns]
            minutes = f"{run['timing']['wall_clock_s'] / 60:.1f}"
            where = _links([places[id(group)]])
            rows.append([escape(group.entry.env), escape(group.entry.name), str(seed), *cells, minutes, where])
    header = ["environment", "setting", "seed", *_names(groups).values(), "minutes", "from"]
    return f"<h2>Every run</h2>{_table(header, rows)}"


def _provenance(groups: list[Group], places: dict[int, str]) -> str:
    rows, ids = [], []
    for group in groups:
        seeds = ", ".join(map(str, group.seeds))
        cut = f" (of longer runs: {', '.join(map(str, group.cut))})" if group.cut else ""
        cells = [places[id(group)], group.entry.env, group.entry.name, seeds + cut, group.protocol]
        rows.append([escape(cell) for cell in (*cells, *group.provenance.values())])
        ids.append(places[id(group)])
    header = ["", "environment", "setting", "seeds", "protocol", "commit", "engine", "versions", "machine"]
    return f"<h2>Where the numbers come from</h2>{_table(header, rows, ids)}"


def _files(imported: list[Imported]) -> str:
    if not imported:
        return ""
    rows = [
        [escape(cell) for cell in (file.file, file.digest, file.column, f"{file.rows:,}", str(len(file.lines)))]
        for file in imported
    ]
    note = "Curves of others, drawn dashed: with which versions and protocol they were measured is not in the files."
    table = _table(["file", "SHA-256", "column", "rows", "runs"], rows)
    return f'<h2>Imported</h2><p class="note">{note} They take part in no table above.</p>{table}'
