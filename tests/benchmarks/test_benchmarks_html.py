"""The page: one file that loads nothing, with all curves, tables and where every number comes from."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import report
import report_html
from suites import SUITES, Entry
from test_benchmarks_report import write_seed

NASTY = "</script><b>&x"  # in what a run says of its machine


class Reader(HTMLParser):
    """Collects tags with their attributes, the ids, and the text of every cell and of the data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[str] = []
        self.data, self._in = "", ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._in = "data" if dict(attrs).get("id") == "data" else tag
        if tag == "td":
            self.cells.append("")

    def handle_endtag(self, tag):
        self._in = ""

    def handle_data(self, data):
        if self._in == "data":
            self.data += data
        elif self.cells and self._in in ("td", "a"):
            self.cells[-1] += data


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    home = tmp_path_factory.mktemp("results")
    entries = tuple(
        Entry("ppo_continuous", env, (1, 2), 1000, (), label) for env in ("Hopper-v4", "Ant-v4") for label in "ab"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SUITES, "pages", entries)
        for entry in entries:
            for seed in entry.seeds:
                place = write_seed(home / "pages", entry, seed, 100.0 * seed + len(entry.env))
                run = json.loads((place / "run.json").read_text())
                run["provenance"]["machine"]["cpu"] = NASTY
                (place / "run.json").write_text(json.dumps(run))
        (home / "theirs.csv").write_text("global_step,episodic_return,env_id,seed\n10,1,Ant-v4,1\n900,5,Ant-v4,1\n")
        report.report("pages", home, home / "none.md", [str(home / "theirs.csv")])
    return (home / "pages" / "report.html").read_text()


def test_it_loads_nothing(page):
    reader = Reader(page)
    for tag, attributes in reader.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base") and "src" not in attributes
        assert attributes.get("href", "#").startswith("#")
    (policy,) = (a["content"] for tag, a in reader.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none';") and "http" not in policy
    assert not re.search(r"https?:|@import|url\(|fetch\(|XMLHttpRequest|import\(", page)


def test_what_a_run_says_cannot_become_a_tag(page):
    assert NASTY not in page and "<b>&" not in page
    reader = Reader(page)
    assert any(NASTY in cell for cell in reader.cells)
    assert NASTY in json.loads(reader.data)["lines"][0]["where"]


def test_all_runs_are_there_over_steps_and_seconds(page):
    data = json.loads(Reader(page).data)
    assert data["envs"] == ["Hopper-v4", "Ant-v4"] and data["units"] == "environment steps"
    ours = [line for line in data["lines"] if not line["imported"]]
    assert len(ours) == 2 * 2 * 2 * 2  # environments, settings, seeds, training and evaluation
    first = ours[0]
    assert (first["setting"], first["run"], first["metric"]) == ("a", "seed 1", "train")
    assert first["steps"] == list(range(100, 1001, 100)) and len(first["y"]) == len(first["seconds"]) == 10
    assert first["seconds"][-1] == 90.0 and first["y"][-1] == 109.0
    assert "commit 0123456789ab" in first["where"] and "1,000 steps" in first["where"]
    bands = {
        (band["env"], band["setting"], band["metric"], band["axis"]) for band in data["bands"] if not band["imported"]
    }
    assert len(bands) == 16
    (profile,) = data["profiles"]
    assert [own["name"] for own in profile["settings"]] == ["a", "b"] and len(profile["levels"]) == 101


def test_imported_curves_say_so(page):
    reader = Reader(page)
    (theirs,) = (line for line in json.loads(reader.data)["lines"] if line["imported"])
    assert theirs["setting"] == "imported: theirs (theirs.csv)" and theirs["seconds"] is None
    assert "versions and protocol are not in it" in theirs["where"]
    assert "theirs.csv" in reader.cells and "They take part in no table above." in page


def test_every_number_links_to_where_it_comes_from(page):
    reader = Reader(page)
    ids = {attributes["id"] for tag, attributes in reader.tags if tag == "tr" and "id" in attributes}
    links = {attributes["href"].removeprefix("#") for tag, attributes in reader.tags if tag == "a"}
    assert ids == links == {"p1", "p2", "p3", "p4"}
    for text in ("0123456789ab", "1, 2", "mujoco", "torch 2.13.0, gymnasium 1.4.0, mujoco 4.0.0"):
        assert text in reader.cells


def test_a_template_is_filled_once():
    assert report_html._fill("<{{a}}|{{b}}>", a="{{b}}", b="x") == "<{{b}}|x>"


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_script_has_no_syntax_error():
    script = Path(report_html.__file__).with_name("report_page.js")
    subprocess.run(["node", "--check", str(script)], check=True)
