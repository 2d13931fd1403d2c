"""Makes a suite's report from its published raw files: tables, figures, numbers as CSV, one page to look at.

    python benchmarks/report.py --suite first_light
    python benchmarks/report.py --suite mujoco --versus ppo_continuous trpo

Writes `README.md`, one figure per environment, `report.html`, `report.csv` and `curves.csv` into `results/<suite>/`;
for the front page's suite also two blocks of the README: `<!-- results:start -->` to `<!-- results:end -->`, and one
named `speed` with what `speed.py` measured. With `--versus` two settings are compared, and files are written only into
`--out`. `docs/reports.md` says what the numbers mean.

`report_runs.py` reads and refuses; `report_curves.py` and `report_compare.py` put curves and settings together;
`report_tables.py`, `report_figures.py`, `report_csv.py` and `report_html.py` write; `report_published.py` knows others'
numbers, `report_imported.py` reads their curves, and `report_language.py` is for language models.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import report_csv
import report_html
import report_language
from records import ROOT, Parser, read_json, suite, write_text
from report_compare import (
    Comparison,
    References,
    comparison_note,
    comparison_rows,
    comparisons,
    read_references,
    versus_rows,
)
from report_curves import bands_of, lines_of
from report_figures import figure, image_name
from report_imported import Imported, read_imported
from report_published import RETURNS, published_rows
from report_runs import Group, check_alike, environments, read_group
from report_tables import (
    HEADER,
    LEGEND,
    OTHER_VERSION_NOTE,
    beside,
    cut_note,
    improvement_table,
    left_out_note,
    missing_note,
    ours,
    overview_table,
    provenance_table,
    returns_table,
    seeds_table,
    short_note,
    sources_list,
    table,
    unlike_table,
    windows_table,
)
from speed import table as speed_table
from suites import FRONT_PAGE

from cleanrl_zoo.run.arguments import usage_errors


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


def latest(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records without the rows that a later one has too: the same flags, steps and threads on as many cores of a
    processor of that name."""
    seen, kept = set(), []
    for record in sorted(records, key=lambda record: record["started"], reverse=True):
        where = record["machine"]["cpu"], len(record["cores"])
        keys = [(*where, *(row[name] for name in ("setting", "flags", "steps", "threads"))) for row in record["rows"]]
        rows = [row for row, key in zip(record["rows"], keys, strict=True) if key not in seen]
        seen.update(keys)
        kept += [{**record, "rows": rows}] if rows else []
    return kept[::-1]


DEFAULT_SPEED = "hopper"  # the record of PPO with its defaults


def speed_block(folder: Path, readme: Path) -> str:
    """What `speed.py` measured: one table of all records and that of PPO with its defaults; links to all the others.

    Of what was measured again on a processor of that name, the table has the latest measurement.
    """
    contents = {path: read_json(path.with_suffix(".json"), "times") for path in sorted(folder.glob("*.md"))}
    records = latest([content for content in contents.values() if "rows" in content])
    shown = [path.read_text() for path in contents if path.stem == DEFAULT_SPEED]
    others = [path for path, content in contents.items() if "rows" not in content and path.stem != DEFAULT_SPEED]
    links = [f"[{path.stem}]({Path(os.path.relpath(path, readme.parent)).as_posix()})" for path in others]
    more = [f"Other measurements: {', '.join(links)}.\n"] if links else []
    return "\n\n".join([*([speed_table(records)] if records else []), *shown, *more])


def read_groups(results: Path, name: str) -> tuple[list[Group], list[str]]:
    """The suite's published runs, and notes on those that are not there or are left out for a damaged file.

    Raises:
        ValueError: one line, if nothing is published or runs must not be compared.
    """
    everything = [read_group(results, name, entry) for entry in suite(name)]
    damaged = tell_damaged(everything, results)
    groups = [group for group in everything if group.seeds]
    if not groups:
        whole = f", {len(damaged)} with a damaged file" if damaged else ""
        raise ValueError(f"{results / name} holds no published run{whole}: python benchmarks/run.py --suite {name}")
    check_alike(groups)
    order = environments(groups)
    groups.sort(key=lambda group: order.index(group.entry.env))
    return groups, [note for note in (missing_note(everything), left_out_note(damaged)) if note]


def tell_damaged(groups: list[Group], results: Path) -> list[str]:
    """Says on standard error which runs are left out; the same lines with paths from the results folder on."""
    damaged = [line for group in groups for line in group.damaged]
    for line in damaged:
        print(f"left out: {line}", file=sys.stderr)
    return [line.replace(f"{results}{os.sep}", "") for line in damaged]


def report(
    name: str,
    results: Path,
    readme: Path | None,
    imported: Sequence[str] = (),
    references: References | None = None,
) -> list[Path]:
    """Reads the suite's published runs and writes its report; returns the files written.

    readme: the front page, of which the suite `FRONT_PAGE` fills two blocks; imported: words of `--imported`;
    references: the returns that are 0 and 1 on the common scale.

    Raises:
        ValueError: one line, if nothing is published, a file cannot be imported, or runs must not be compared.
    """
    folder = results / name
    groups, notes = read_groups(results, name)
    others = [read_imported(word, environments(groups)) for word in imported]
    found, uneven = comparisons(groups, references)
    texts = {}
    if name == FRONT_PAGE and readme is not None:  # first, so that missing markers are told before anything is written
        blocks = {"results": "\n".join([front_page(groups, folder, readme), *notes])}
        if speed := speed_block(results / "speed", readme):
            blocks["speed"] = speed
        texts[readme] = with_blocks(readme, blocks)

    language = all(group.entry.is_language for group in groups)
    start = report_language.start_score(results, name) if language else None
    images = [folder / image_name(env) for env in environments(groups)]
    folder.mkdir(parents=True, exist_ok=True)  # a suite beside a package may have no runs of its own yet
    for env, path in zip(environments(groups), images, strict=True):
        here = [group for group in groups if group.entry.env == env]
        if language:
            report_language.figure(here, start, path)
        else:
            figure(here, path)

    command = f"python benchmarks/report.py --suite {name}"
    text = [f"# {name}\n", f"Made by `{command}` from the files in this folder.\n", PAGES]
    for lender in sorted({group.entry.results for group in groups if group.entry.results}):
        lent = ", ".join(dict.fromkeys(f"`{g.entry.name}`" for g in groups if g.entry.results == lender))
        text.append(f"The runs of {lent} are those of the suite `{lender}`, [../{lender}](../{lender}/README.md).\n")
    text += notes
    pictures = " ".join(f"![{path.stem}]({path.name})" for path in images) + "\n"
    if language:
        text += [*language_tables(groups, start), pictures, *common_scale(found, uneven)]
    else:
        text += [*control_tables(groups), *common_scale(found, uneven)]
        text += ["## Curves\n", pictures, "## Every run\n", seeds_table(groups)]
    text += ["## Provenance\n", provenance_table(groups)]
    again = f"python benchmarks/run.py --suite {name} --runs-dir again/runs --results again/results"
    text.append(f"Run it again: `{again}`.\n")
    texts[folder / "README.md"] = "\n".join(text)
    command += "".join(f" --imported {file.file}" for file in others)
    notes = [note.replace("**", "").strip() for note in notes]
    texts |= pages(folder, name, command, groups, found, others, notes)
    for path, content in texts.items():
        write_text(path, content)
    return [*images, *texts]


PAGES = (
    "Curves to look into: [report.html](report.html), one file that needs nothing else. Every score and mean with "
    "where it comes from: [report.csv](report.csv); the curves on one grid: [curves.csv](curves.csv).\n"
)


def pages(
    folder: Path,
    title: str,
    command: str,
    groups: list[Group],
    found: list[Comparison],
    others: list[Imported],
    notes: list[str],
) -> dict[Path, str]:
    """The page and the two CSV files of a report, by their paths."""
    lines = [*lines_of(groups), *(line for file in others for line in file.lines)]
    bands = bands_of(lines)
    return {
        folder / "report.html": report_html.page(title, command, groups, lines, bands, found, others, notes),
        folder / "report.csv": report_csv.numbers(groups, found),
        folder / "curves.csv": report_csv.curves(bands, found),
    }


def control_tables(groups: list[Group]) -> list[str]:
    """The parts of a report on control tasks: three returns beside what is published, settings against each other."""
    text, others = [], any(group.other_versions for group in groups)
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
    if short := short_note(groups):
        text.append(short)
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
    return text


def language_tables(groups: list[Group], start: float | None) -> list[str]:
    """The parts of a report on language models: held-out rewards, and what they gained over the model at the start."""
    header, *rows = report_language.scores_table(groups, start)
    prompts = {len(summary["final_eval"].get("returns", ())) for group in groups for summary in group.summaries}
    text = [table(header, rows), report_language.LEGEND.format(" or ".join(map(str, sorted(prompts))))]
    if start is not None:
        first = f"Every run begins with the same model, whose held-out reward is {start:.3f}; gain: over that.\n"
        text.insert(0, first)
    for title, found, legend in (
        ("Pairs", report_language.pairs_table(groups), report_language.PAIRS_LEGEND),
        ("Beside the teacher", report_language.teacher_table(groups), report_language.TEACHER_LEGEND),
    ):
        if found:
            text += [f"## {title}\n", table(found[0], found[1:]), legend]
    return text


def common_scale(found: list[Comparison], uneven: list[str]) -> list[str]:
    """The part of a report that holds settings against each other over all environments; empty where none can be."""
    text = []
    for comparison in found:
        text += ["## Settings on a common scale\n", table(*comparison_rows(comparison)), comparison_note(comparison)]
    if found and uneven:
        text.append(f"Not among them, since runs are missing: {'; '.join(uneven)}.\n")
    return text


def read_side(results: Path, name: str, word: str) -> tuple[list[Group], list[str]]:
    """One side of `--versus`: the groups of a setting, `<setting>` of the suite `name` or `<suite>/<setting>`.

    Raises:
        ValueError: if there is no such setting, or none of its runs is published.
    """
    suite_name, slash, setting = word.rpartition("/")
    suite_name = suite_name if slash else name
    try:
        entries = [entry for entry in suite(suite_name) if entry.name == setting]
    except ValueError as error:
        raise ValueError(str(error).replace("--suite ", f"--versus {word}: no suite ", 1)) from None
    if not entries:
        known = ", ".join(dict.fromkeys(entry.name for entry in suite(suite_name)))
        raise ValueError(f"--versus {word}: the suite {suite_name} has {known} (another suite's: <suite>/<setting>)")
    everything = [read_group(results, suite_name, entry) for entry in entries]
    damaged = tell_damaged(everything, results)
    groups = [group for group in everything if group.seeds]
    if not groups:
        raise ValueError(f"--versus {word}: no run is published: python benchmarks/run.py --suite {suite_name}")
    for group in groups:
        group.entry = replace(group.entry, label=word)
    return groups, damaged


def versus(
    name: str,
    words: tuple[str, str],
    results: Path,
    out: Path | None = None,
    imported: Sequence[str] = (),
    references: References | None = None,
) -> tuple[str, list[Path]]:
    """Two settings against each other: the text, and the files written into `out`.

    Raises:
        ValueError: one line, if a word names no setting, or their runs must not be compared.
    """
    if words[0] == words[1]:
        raise ValueError(f"--versus {words[0]} {words[1]}: give two settings")
    sides = [read_side(results, name, word) for word in words]
    groups, damaged = [g for side, _ in sides for g in side], [line for _, lines in sides for line in lines]
    check_alike(groups)
    header, rows = versus_rows(sides[0][0], sides[1][0])
    shared = {(row[0], row[1]) for row in rows}
    groups = [group for group in groups if (group.entry.env, f"{group.entry.steps:,}") in shared]
    others = [read_imported(word, environments(groups)) for word in imported]
    found, uneven = comparisons(groups, references)
    command = " ".join(["python benchmarks/report.py --suite", name, "--versus", *words])
    notes = [left_out_note(damaged)] if damaged else []
    text = [f"# {words[0]} and {words[1]}\n", f"Made by `{command}`.\n", *notes, table(header, rows), VERSUS_LEGEND]
    text += [*common_scale(found, uneven), "## Provenance\n", provenance_table(groups)]
    written = {}
    if out is not None:
        title, plain = f"{words[0]} and {words[1]}", [note.replace("**", "").strip() for note in notes]
        written = pages(out, title, command, groups, found, others, plain)
        written[out / "README.md"] = "\n".join([text[0], text[1], PAGES, *text[2:]])
        for path, content in written.items():
            write_text(path, content)
    return "\n".join(text), list(written)


VERSUS_LEGEND = (
    "IQM: interquartile mean over runs. Probability of improvement: that a run of the first scores above a run of the "
    "second on the same environment, ties counting half; over all environments its mean over them. 95 % stratified "
    "bootstrap intervals.\n"
)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="benchmarks/report.py", description="Tables, figures and pages from published results.")
    parser.add_argument("--suite", required=True, help="a name in benchmarks/suites.py")
    parser.add_argument(
        "--versus",
        nargs=2,
        metavar=("SETTING", "OTHER"),
        help="compare two settings and print the table: names of the suite, or <suite>/<setting> of another",
    )
    parser.add_argument("--out", type=Path, help="a folder for the files of --versus; default: it is only printed")
    parser.add_argument(
        "--imported",
        nargs="+",
        default=[],
        metavar="FILE",
        help="CSV files with others' curves, drawn on the page beside ours: FILE or ENVIRONMENT=FILE",
    )
    parser.add_argument(
        "--references",
        type=Path,
        metavar="FILE",
        help="CSV with the columns env, low, high: the returns that are 0 and 1 on the common scale",
    )
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="published results; default results/")
    parser.add_argument(
        "--readme", type=Path, help="the front page; default README.md, with other --results than results/ none"
    )
    args = parser.parse_args(argv)
    with usage_errors():
        references = read_references(args.references) if args.references else None
        results = args.results.resolve()
        readme = args.readme or (ROOT / "README.md" if results == ROOT / "results" else None)
        if args.versus:
            text, paths = versus(args.suite, tuple(args.versus), results, args.out, args.imported, references)
            print(text)
        elif args.out:
            raise ValueError(f"--out {args.out}: only with --versus; a suite's report goes into its own folder")
        else:
            paths = report(args.suite, results, readme and readme.resolve(), args.imported, references)
        for path in paths:
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
