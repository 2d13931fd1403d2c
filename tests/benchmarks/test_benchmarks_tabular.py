"""benchmarks/tabular.py: its files and table, on figures cut short."""

import csv
import json

import pytest
import tabular


@pytest.fixture
def quick(monkeypatch):
    """Two figures that take no time."""

    def one():
        """Figure 1.1: the first."""
        return tabular.Figure(
            [tabular.Number("a number", "1.5", "about 1")], [("b: c", 1, 2.0), ("b: c", 2, 3.0)], "t", ("x", "y")
        )

    def two():
        """Figure 1.2."""
        return tabular.Figure([tabular.Number("another", "2", "-")], [("c", 1, 0.5)], "t", ("x", "y"), (0, 1), True)

    monkeypatch.setattr(tabular, "FIGURES", {"one": one, "two": two})


def test_figures_become_files_and_one_table(tmp_path, quick):
    assert tabular.main(["--only", "one", "--results", str(tmp_path)]) == 0
    assert tabular.main(["--only", "two", "--results", str(tmp_path)]) == 0
    folder = tmp_path / "tabular"
    names = {f"{name}.{kind}" for name in ("one", "two") for kind in ("json", "csv", "png")}
    assert {path.name for path in folder.iterdir()} == {*names, "README.md"}
    record = json.loads((folder / "one.json").read_text())
    assert record["numbers"] == [{"what": "a number", "ours": "1.5", "textbook": "about 1"}]
    assert record["seed"] == 1 and {"commit", "versions", "machine"} <= record.keys()
    assert list(csv.reader((folder / "one.csv").open())) == [
        ["curve", "x", "y"],
        ["b: c", "1", "2"],
        ["b: c", "2", "3"],
    ]
    page = (folder / "README.md").read_text()
    assert "| a number | 1.5 | about 1 |" in page and "| another | 2 | - |" in page  # the first figure is kept
    assert "Figure 1.1: the first." in page and "![two](two.png)" in page


def test_an_unknown_figure_is_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        tabular.main(["--only", "three", "--results", str(tmp_path)])
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1 and "--only three: there is random_walk_n" in err


def test_errors_on_the_walk_are_those_of_one_run_at_a_time():
    batches = tabular.walks("RandomWalk19", 3, 2)
    assert all(len(batch.runs) == 3 and batch.terminated.sum() == 3 for batch in batches)
    assert not batches[0].obs.equal(batches[1].obs)
    both = tabular.rms_errors(batches, [0.1, 0.4], method="td", n=2)
    alone = [tabular.rms_errors(batches, [alpha], method="td", n=2)[0] for alpha in (0.1, 0.4)]
    assert both.tolist() == alone
    # nothing is learned with a step of almost 0: RMS of −0.9 … 0.9 is √0.3
    assert tabular.rms_errors(batches, [1e-12], method="td", n=2)[0] == pytest.approx(0.3**0.5)


def test_play_gives_each_runs_first_episodes():
    module = tabular.algorithm("q_learning")
    returns, lengths, state = tabular.play(module, "CliffWalking", 3, 4, learning_rate=0.5, epsilon=0.1)
    assert returns.shape == lengths.shape == (3, 4)
    falls = (-returns - lengths) / 99  # a fall costs 100 instead of 1
    assert (lengths >= 13).all() and (falls == falls.round()).all() and (falls >= 0).all()
    assert tabular.greedy_length(state.q, "CliffWalking", limit=50).max() <= 50


def test_the_figures_are_named_as_their_functions():
    assert list(tabular.FIGURES)[:2] == ["random_walk_n", "random_walk_lambda"] and len(tabular.FIGURES) == 11
    assert all(figure.__doc__ for figure in tabular.FIGURES.values())
