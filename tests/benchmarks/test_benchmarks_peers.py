"""Stable-Baselines3 run by us: its runs are stored as ours are, and the same numbers are counted."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import speed
from records import check_made_as_asked, publish, read_curve, read_metrics, read_summary
from suites import Entry

pytest.importorskip("stable_baselines3")
import peers_sb3

from cleanrl_zoo.envs import EVAL_STREAM, make_vec, run_episodes


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """PPO on CartPole for 600 steps: rollouts of 128, so it ends at 640."""
    folder = tmp_path_factory.mktemp("peer") / "run"
    words = ["--algo", "ppo", "--env", "CartPole-v1", "--total-timesteps", "600", "--seed", "7", "--threads", "1"]
    words += ["--settings", '{"n_steps": 128}', "--log-every", "100", "--eval-every", "250", "--eval-episodes", "3"]
    peers_sb3.main([*words, "--run-dir", str(folder)])
    return folder


def test_a_stored_run_reads_like_one_of_ours(run_dir, tmp_path):
    flags = ("--algo", "ppo", "--settings", '{"n_steps": 128}', "--eval-every", "250")
    entry = Entry("peers_sb3", "CartPole-v1", (7,), 600, flags, "sb3_ppo")
    check_made_as_asked(run_dir, entry, 7)
    publish(run_dir, tmp_path / "results")
    curve, summary = read_curve(tmp_path / "results" / "curve.csv"), read_summary(tmp_path / "results")
    # rows at the first step that reaches a multiple of 100 or 250, and at the end, after the last update
    assert [point["step"] for point in curve] == [100, 200, 250, 300, 400, 500, 640]
    assert [point[0] for point in summary["eval_curve"]] == [250, 500, 640]
    assert [point["step"] for point in curve if "eval_return" in point] == [250, 500, 640]
    assert summary["final_eval"]["mean"] == summary["eval_curve"][-1][1] == curve[-1]["eval_return"]
    assert len(summary["final_eval"]["returns"]) == 3
    run = json.loads((tmp_path / "results" / "run.json").read_text())
    provenance = run["provenance"]
    assert provenance["env"]["id"] == "CartPole-v1" and provenance["env"]["engine"] == "gymnasium"
    assert set(provenance["env"]["versions"]) == {"gymnasium"} and "stable-baselines3" in provenance["versions"]
    assert run["timing"]["wall_clock_s"] > 0 and "run_dir" not in run["args"]


def test_all_episodes_are_counted_once(run_dir):
    rows, summary = read_metrics(run_dir / "metrics.jsonl"), read_summary(run_dir)
    returns = summary["train_last100"]["returns"]
    assert sum(row["charts/episodes"] for row in rows) == len(returns) > 10
    total = sum(row["charts/episodes"] * row.get("charts/episodic_return", 0.0) for row in rows)
    assert total == pytest.approx(sum(returns)) and summary["train_last100"]["mean"] == total / len(returns)
    # CartPole pays 1 per step: together the episodes are as long as the run, but for the one under way
    assert 0 <= 640 - total < 200


def test_it_is_evaluated_where_ours_are(tmp_path):
    """A policy that always pushes to the left scores as in our evaluation of that seed."""

    def left(obs, deterministic=True):
        return np.zeros(len(obs), np.int64), None

    def learn(steps, callback):
        model.num_timesteps = callback.num_timesteps = steps

    envs = make_vec("CartPole-v1", 4, 7, stream=EVAL_STREAM, threads=1)
    expected, _ = run_episodes(envs, lambda obs: left(obs)[0])
    envs.close()
    model = SimpleNamespace(num_timesteps=0, predict=left, learn=learn)
    words = ["--env", "CartPole-v1", "--seed", "7", "--eval-episodes", "4", "--total-timesteps", "10"]
    peers_sb3.record(model, peers_sb3.parse([*words, "--run-dir", str(tmp_path)]))
    assert read_summary(tmp_path)["final_eval"]["returns"] == list(expected)


def test_settings_reach_the_constructor():
    settings = '{"n_steps": 16, "batch_size": 32, "policy_kwargs": {"net_arch": [8], "activation_fn": "ReLU"}}'
    model = peers_sb3.make(peers_sb3.parse(["--env", "CartPole-v1", "--num-envs", "2", "--settings", settings]))
    assert (model.n_steps, model.batch_size, model.n_envs) == (16, 32, 2)
    assert "ReLU" in str(model.policy.mlp_extractor) and "out_features=8" in str(model.policy.mlp_extractor)
    assert type(peers_sb3.make(peers_sb3.parse(["--env", "CartPole-v1", "--algo", "dqn"]))).__name__ == "DQN"


def test_trpo_comes_from_sb3_contrib():
    pytest.importorskip("sb3_contrib")
    assert type(peers_sb3.make(peers_sb3.parse(["--env", "CartPole-v1", "--algo", "trpo"]))).__name__ == "TRPO"


@pytest.mark.parametrize("key", speed.PEERS)
def test_what_the_speed_comparison_asks_for_can_be_made(key, tmp_path, monkeypatch):
    """Its command line is read and its settings are arguments that the constructor has."""
    asked = []
    monkeypatch.setattr(speed, "timed", lambda command, *_: (asked.append(command), ("640\n", 1.0, 1.0, 0.0))[1])
    env = "CartPole-v1" if speed.PEERS[key].algo != "sac" else "Pendulum-v1"
    speed.time_peer("sb3", key, env, 500, 3, 1, sys.executable, tmp_path, "")
    args = peers_sb3.parse(asked[0][2:])
    assert (args.total_timesteps, args.seed, args.threads, args.package) == (500, 3, 1, "sb3")
    if args.algo == "trpo":
        pytest.importorskip("sb3_contrib")
    assert peers_sb3.make(args).n_envs == speed.PEERS[key].num_envs


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--algo", "x"], "ppo"),
        (["--settings", "[1]"], "must be a JSON object"),
        (["--settings", "{"], "must be a JSON object"),
        (["--settings", '{"policy_kwargs": {"activation_fn": "x"}}'], "'x'"),
        (["--package", "sbx", "--algo", "trpo"], "SBX has ppo, sac and dqn"),
        (["--total-timesteps", "0"], "--total-timesteps 0"),
    ],
)
def test_bad_command_lines_are_one_line_and_exit_code_2(capsys, words, told):
    with pytest.raises(SystemExit) as stop:
        peers_sb3.parse(words)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and told in err and err.count("\n") == 1
