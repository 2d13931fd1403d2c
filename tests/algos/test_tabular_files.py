"""What the six files on tables share: the grid that they print, worlds that change, and fingerprints."""

import json
import shutil

import numpy as np
import pytest
import torch
from algo_helpers import ROOT, assert_as_recorded, assert_same_run, load_algorithm, rows_without_clock
from tabular_helpers import begin

from cleanrl_zoo import zoo
from cleanrl_zoo.envs.tabular import named_policy

FILES = ("mc_prediction", "td_prediction", "mc_control", "sarsa", "q_learning", "dyna_q")


@pytest.mark.parametrize("name", FILES)
def test_render_prints_the_grid(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    module = load_algorithm(name)
    words = ["--preset", "debug", "--total-timesteps", "400", "--render", "--run-dir", name]
    module.main(module.parse_args(module.Args, module.PRESETS, words))
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 4 and all(arrow in rows[0] for arrow in ("←", "→"))


# Worlds that change: the second maze is the one that a run ends in


def in_the_changed_maze(*words):
    """A run of one maze's preset; the number of its steps is beyond the change in each of two environments."""
    module = load_algorithm("dyna_q")
    words = ["--preset", "blocking", "--num-envs", "2", "--eval-episodes", "1", "--eval-every", "0", *words]
    module.main(module.parse_args(module.Args, module.PRESETS, words))


def test_what_was_learned_after_a_change_is_evaluated_after_it(tmp_path, monkeypatch):
    """The way through the gap that opens has 16 steps; before the change it ends at a wall, and the return is 0."""
    monkeypatch.chdir(tmp_path)
    in_the_changed_maze("--total-timesteps", "4000", "--run-dir", "run")
    assert rows_without_clock(tmp_path / "run")[-1]["eval/episodic_length"] < 30
    assert json.loads((tmp_path / "run/summary.json").read_text())["final_eval"]["returns"] == [1.0]
    policy = zoo.load(tmp_path / "run/policy")
    assert policy.card["env_kwargs"] == {"changes": 1} and zoo.evaluate(policy, 1).tolist() == [1.0]
    policy.card["env_kwargs"] = {"changes": 0}
    assert zoo.evaluate(policy, 1).tolist() == [0.0]


def test_a_run_resumed_before_a_change_is_the_same_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = "--total-timesteps", "2400", "--checkpoint-every", "1600", "--eval-every", "1600"
    in_the_changed_maze(*flags, "--planning-steps", "2", "--run-dir", "whole")
    # as if killed after 800 steps of each environment; the maze changes after 1,000
    shutil.copytree("whole", "cut")
    (tmp_path / "cut/summary.json").unlink()
    shutil.rmtree("cut/policy")
    shutil.rmtree(sorted((tmp_path / "cut/checkpoints").iterdir())[-1])
    in_the_changed_maze("--resume", "cut")
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


# Fingerprints

CASES = {
    "mc_prediction": {
        "first visit": dict(),
        "every visit, constant step": dict(visits="every", learning_rate=0.1),
        "ordinary importance sampling": dict(behavior="random", policy="stick20", importance="ordinary"),
        "weighted importance sampling": dict(behavior="random", policy="stick20"),
    },
    "td_prediction": {
        "td": dict(),
        "td n=4": dict(n=4),
        "lambda_return": dict(method="lambda_return"),
        "td_lambda accumulating": dict(method="td_lambda", trace="accumulating"),
        "td_lambda replacing": dict(method="td_lambda", trace="replacing"),
        "td_lambda dutch": dict(method="td_lambda", trace="dutch"),
    },
    "mc_control": {
        "on_policy": dict(),
        "off_policy weighted": dict(method="off_policy"),
        "off_policy ordinary": dict(method="off_policy", importance="ordinary"),
    },
    "sarsa": {
        "sarsa": dict(),
        "sarsa n=3": dict(n=3),
        "expected_sarsa": dict(method="expected_sarsa"),
        "sarsa_lambda replacing": dict(method="sarsa_lambda"),
        "sarsa_lambda accumulating": dict(method="sarsa_lambda", trace="accumulating"),
    },
    "q_learning": {method: dict(method=method) for method in ("plain", "double", "watkins")},
    "dyna_q": {method: dict(method=method) for method in ("dyna_q", "dyna_q_plus", "prioritized")},
}
# where something is learned at once: episodes of a few steps, and a reward at each
WORLDS = dict.fromkeys(FILES, "textbook/WindyGridworld-v0") | dict.fromkeys(
    ("mc_prediction", "mc_control"), "textbook/Blackjack-v0"
)
WORLDS["td_prediction"] = "textbook/RandomWalk5-v0"


def fingerprint(name):
    """The errors that 20 updates report, and the tables after them: a weighted sum of each run's."""
    found = {}
    for label, flags in CASES[name].items():
        module, args, envs, state = begin(name, WORLDS[name], 4, **flags)
        what = [args]
        if "prediction" in name:
            policy = torch.from_numpy(named_policy(envs, args.policy))
            acting = torch.from_numpy(named_policy(envs, getattr(args, "behavior", None) or args.policy))
            what = [policy, args] if name == "mc_prediction" else [args]
        errors = []
        while len(errors) < 20:
            batch = module.collect(state, envs, acting if "prediction" in name else args)
            report = {} if batch is None else module.update(state, batch, *what)
            errors += [float(error) for error in report.values()]
        tables = [state.values] if "prediction" in name else [state.q, state.q2] if name == "q_learning" else [state.q]
        rows = torch.cat(tables, 1).flatten(1)
        weights = torch.linspace(1.0, 2.0, rows.shape[1], dtype=torch.float64)
        found[label] = {"losses/td_error": errors, "tables": (rows * weights).sum(1).tolist()}
    return found


@pytest.mark.parametrize("name", FILES)
def test_fingerprint_of_twenty_updates(name):
    """What 20 updates report. A change needs a reason; this writes the files anew:

    python -c "import sys; sys.path[:0] = ['.', 'tests/algos']; import test_tabular_files as t; t.write_fingerprints()"
    """
    now = fingerprint(name)
    assert all(len(row["losses/td_error"]) == 20 and np.abs(row["tables"]).max() > 0 for row in now.values())
    assert_as_recorded(ROOT / f"tests/algos/fingerprints/{name}.json", now, rtol=1e-9)  # float64


def write_fingerprints():
    for name in FILES:
        (ROOT / f"tests/algos/fingerprints/{name}.json").write_text(json.dumps(fingerprint(name), indent=1) + "\n")
