"""benchmarks/tabular.py: its files and table, on figures cut short."""

import csv
import json

import numpy as np
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


# Every figure's own function, cut to a few runs: its numbers and curves, of which the text says what it counted.
TINY = {
    "random_walk_n": (dict(runs=2, episodes=1), ("least RMS error over 1 episodes", "n = 4"), 110),
    "random_walk_lambda": (dict(runs=2, episodes=1), ("TD(λ), Dutch", "λ = "), 352),
    "cliff": (dict(runs=2, episodes=10), ("episodes 9 to 10", "2 runs"), 30),
    "cliff_alpha": (dict(repeats=1, episodes=5), ("first 1 episodes",), 60),
    "windy": (dict(runs=2, steps=2000), ("step 1,500 to 2,000", "2 runs", "15 steps"), 80),
    "dyna_maze": (dict(runs=2, episodes=2), ("50 planning steps", "mean of 2 runs"), 6),
    "blocking_maze": (dict(runs=2, steps=100), ("at step 100, at 100",), 8),
    "shortcut_maze": (dict(runs=2, steps=100), ("at step 100, at 100",), 8),
    "blackjack": (dict(runs=2, episodes=20), ("exact", "after 10 episodes"), 18),
    "blackjack_control": (dict(runs=2, steps=200), ("2 runs together", "170 whose"), 40),
    "maximization_bias": (dict(runs=20, episodes=10), ("episodes 1 to 10",), 20),
    "frozen_lake": (dict(runs=2, steps=100), ("2 runs of 100 steps",), 20),
}


@pytest.mark.parametrize("name", tabular.FIGURES)
def test_every_figure_is_computed_and_drawn(tmp_path, name):
    sizes, words, points = TINY[name]
    figure = tabular.FIGURES[name](**sizes)
    text = " ".join(word for number in figure.numbers for word in number)
    assert all(word in text for word in words) and "nan" not in text, text
    assert len(figure.curves) == points and np.isfinite([(x, y) for _, x, y in figure.curves]).all()
    tabular.draw(figure, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes()[:4] == b"\x89PNG"


def test_a_good_path_is_counted_at_two_bounds(monkeypatch):
    """Mean lengths of 30, 25, 21 and 20 steps: of at most 20 the fourth episode, of at most 25 the second."""
    lengths = np.array([[29, 24, 20, 20], [31, 26, 22, 20]])
    monkeypatch.setattr(tabular, "play", lambda *_, **__: (None, lengths, None))
    figure = tabular.dyna_maze(2, 4)
    assert [number.ours for number in figure.numbers] == ["4 (2)"] * 3 and "20 steps is ours" in figure.note
    monkeypatch.setattr(tabular, "play", lambda *_, **__: (None, lengths + 5, None))
    assert [number.ours for number in tabular.dyna_maze(2, 4).numbers] == ["none (4)"] * 3


def test_a_note_stands_under_the_table(tmp_path, quick):
    noted = tabular.Figure([tabular.Number("n", "1", "-")], [("c", 1, 0.5)], "t", ("x", "y"), note="Read it so.")
    tabular.FIGURES["two"] = lambda: noted
    assert tabular.main(["--results", str(tmp_path)]) == 0
    assert (tmp_path / "tabular/README.md").read_text().count("\nRead it so.\n") == 1
    # a figure from before there were notes, and processor's seconds
    record = json.loads((tmp_path / "tabular/one.json").read_text())
    assert record.pop("note") == "" and record.pop("processor_seconds") >= 0
    (tmp_path / "tabular/one.json").write_text(json.dumps(record))
    assert tabular.main(["--only", "two", "--results", str(tmp_path)]) == 0
    assert "| one | Figure 1.1: the first. | 0 | - |" in (tmp_path / "tabular/README.md").read_text()


def test_the_figures_are_named_as_their_functions():
    assert list(tabular.FIGURES)[:2] == ["random_walk_n", "random_walk_lambda"] and len(tabular.FIGURES) == 12
    assert all(figure.__doc__ for figure in tabular.FIGURES.values())
