"""Stable-Baselines3 run by us: its runs are stored as ours are, the same numbers are counted, beside any suite."""

import importlib.util
import json
import runpy
import sys
from types import SimpleNamespace

import numpy as np
import peers
import pytest
import speed
from records import check_made_as_asked, publish, read_clock, read_curve, read_metrics, read_summary, source, suite
from suites import PACKAGES, SUITES, Entry, with_peers

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


def test_the_log_has_the_wall_clock_of_collecting_updating_and_evaluating(run_dir, tmp_path):
    rows, summary = read_metrics(run_dir / "metrics.jsonl"), read_summary(run_dir)
    phases = {name: sum(row.get(f"time/{name}", 0.0) for row in rows) for name in ("collect", "update", "eval")}
    assert all(seconds > 0 for seconds in phases.values())
    assert sum(phases.values()) == pytest.approx(summary["wall_clock_s"], abs=0.1)
    # three evaluations: at 250, at 500 and at the end
    assert [row["global_step"] for row in rows if "time/eval" in row] == [250, 500, 640]
    publish(run_dir, tmp_path / "results")
    steps, seconds = read_clock(tmp_path / "results" / "clock.csv")
    assert list(steps) == [100, 200, 250, 300, 400, 500, 640] and (np.diff(seconds) > 0).all()


def test_a_finished_run_is_left_and_a_cut_one_starts_again(run_dir, tmp_path, capsys):
    before = (run_dir / "metrics.jsonl").read_bytes()
    peers_sb3.main(["--env", "CartPole-v1", "--run-dir", str(run_dir)])
    assert "is finished" in capsys.readouterr().err and (run_dir / "metrics.jsonl").read_bytes() == before
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text('{"global_step": 50}\n')
    words = ["--env", "CartPole-v1", "--total-timesteps", "20", "--settings", '{"n_steps": 20, "batch_size": 20}']
    peers_sb3.main([*words, "--eval-episodes", "1", "--run-dir", str(tmp_path)])
    assert "cannot be resumed and starts again" in capsys.readouterr().err
    assert [row["global_step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [20]


def test_running_scales_are_frozen_in_evaluations(tmp_path):
    """VecNormalize sees what is trained on and not what is evaluated on; returns are raw."""
    words = ["--env", "Pendulum-v1", "--total-timesteps", "200", "--normalize", "--eval-episodes", "2", "--seed", "3"]
    args = peers_sb3.parse(
        [*words, "--settings", '{"n_steps": 100, "batch_size": 50, "gamma": 0.9}', "--run-dir", str(tmp_path)]
    )
    model = peers_sb3.make(args)
    peers_sb3.record(model, args)
    scales = model.get_vec_normalize_env()
    assert scales.gamma == 0.9 and scales.obs_rms.count == pytest.approx(201, abs=0.01)  # 200 steps and a reset
    envs = make_vec("Pendulum-v1", 2, 3, stream=EVAL_STREAM, threads=1)
    expected, _ = run_episodes(envs, lambda obs: model.predict(scales.normalize_obs(obs), deterministic=True)[0])
    envs.close()
    assert read_summary(tmp_path)["final_eval"]["returns"] == list(expected) and expected.max() < -100


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


def test_a_falling_rate_is_written_as_rl_zoo_writes_it():
    """lin_0.2: 0.2 at the start, half of it when half of the run is left."""
    settings = peers_sb3.keywords('{"learning_rate": "lin_0.2", "device": "cpu", "gamma": 0.9}')
    assert settings["learning_rate"](1.0) == 0.2 and settings["learning_rate"](0.5) == 0.1
    assert (settings["device"], settings["gamma"]) == ("cpu", 0.9)


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


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--env", "Nowhere-v0"], "Nowhere"),
        (["--env", "CartPole-v1", "--algo", "sac"], "--algo sac --env CartPole-v1"),
        (["--env", "CartPole-v1", "--settings", '{"n_step": 3}'], "unexpected keyword argument 'n_step'"),
    ],
)
def test_what_the_package_refuses_is_one_line_and_exit_code_2(capsys, words, told):
    with pytest.raises(SystemExit) as stop:
        peers_sb3.main(words)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and told in err and err.count("\n") == 1


def test_a_missing_package_is_one_line_that_names_the_extra(monkeypatch, capsys, tmp_path):
    """Both where a suite is run and where a single run starts."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sb3_contrib" else found(name))
    with pytest.raises(SystemExit) as stop:
        peers.main(["--suite", "mujoco", "--runs-dir", str(tmp_path), "--results", str(tmp_path)])
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1
    assert "sb3_contrib is not installed: pip install -c constraints.txt -e '.[peers]'" in err
    monkeypatch.setitem(sys.modules, "stable_baselines3", None)
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(peers_sb3.__file__)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1
    assert err.startswith("error: stable_baselines3 is not installed: pip install -c constraints.txt -e '.[peers]'")


def test_any_suite_has_peers_with_its_environments_seeds_steps_and_evaluations():
    name, entries = peers.with_package("mujoco", "sb3")
    assert name == "mujoco_sb3" and len(suite(name)) == len(entries) + 9  # PPO, TRPO and A2C of ours on three tasks
    hopper = {entry.name: entry for entry in entries if entry.env == "Hopper-v4"}
    assert set(hopper) == {"sb3_ppo", "sb3_trpo", "sb3_a2c"}
    flags = ("--package", "sb3", "--algo", "trpo", "--eval-every", "100000")
    assert hopper["sb3_trpo"] == Entry("peers_sb3", "Hopper-v4", (1, 2, 3, 4, 5), 1_000_000, flags, "sb3_trpo")
    ours = {entry.name: source(name, entry, 2)[0] for entry in suite(name) if not entry.is_peer}
    assert str(ours["trpo"]) == "mujoco/trpo/HalfCheetah-v4/seed_2"
    assert str(ours["ppo_continuous"]) == "first_light/ppo_continuous/HalfCheetah-v4/seed_2"
    assert str(source(name, hopper["sb3_ppo"], 2)[0]) == "mujoco_sb3/sb3_ppo/Hopper-v4/seed_2"


def test_where_steps_differ_the_names_say_so_and_longer_runs_are_borrowed_too():
    entries = with_peers("sac", "sbx")
    hopper = {entry.name: entry.steps for entry in entries if entry.is_peer and entry.env == "Hopper-v4"}
    assert hopper == {"sbx_sac_300k": 300_000, "sbx_sac_1000k": 1_000_000, "sbx_sac_100k": 100_000}
    (short,) = (entry for entry in entries if entry.name == "sac_100k")
    assert str(source("sac_sbx", short, 1)[0]) == "sac/sac_1m/Hopper-v4/seed_1"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_suite_beside_a_package_has_unique_folders(package):
    for name in SUITES:
        folders = [(entry.name, entry.env) for entry in with_peers(name, package)]
        assert len(set(folders)) == len(folders), name


def test_a_flag_with_several_values_is_checked_as_a_whole(tmp_path):
    args = {"env": "E-v1", "seed": 1, "total_timesteps": 10, "hidden": [256, 64], "anneal_lr": False}
    (tmp_path / "run.json").write_text(json.dumps({"algorithm": "dqn", "args": args, "provenance": {}}))
    check_made_as_asked(tmp_path, Entry("dqn", "E-v1", (1,), 10, ("--hidden", "256", "64", "--no-anneal-lr")), 1)
    with pytest.raises(ValueError, match="hidden 256 64, the suite asks for 256 128"):
        check_made_as_asked(tmp_path, Entry("dqn", "E-v1", (1,), 10, ("--hidden", "256", "128")), 1)
    with pytest.raises(ValueError, match="hidden 256 64, the suite asks for 256:"):
        check_made_as_asked(tmp_path, Entry("dqn", "E-v1", (1,), 10, ("--no-anneal-lr", "--hidden", "256")), 1)


def test_a_suite_that_names_its_peers_is_taken_as_it_is():
    name, entries = peers.with_package("peers", "sb3")
    assert name == "peers" and entries == [entry for entry in SUITES["peers"] if entry.is_peer]
    assert len(entries) == 7 and peers.with_package("peers", "sbx")[0] == "peers_sbx"
    by_name = {entry.name: peers.settings(entry) for entry in entries}
    assert by_name["sb3_dqn"] == "sb3 with its defaults" and by_name["sb3_ppo_norm"] == "sb3 with --normalize"
    assert by_name["sb3_sac_zoo"] == """sb3 with --settings {"learning_rate": 0.001}"""


@pytest.mark.parametrize(
    "entry", [entry for entry in SUITES["peers"] if entry.is_peer], ids=lambda e: f"{e.name} {e.env}"
)
def test_the_settings_of_the_suite_can_be_made(entry):
    args = peers_sb3.parse(["--env", entry.env, *entry.flags])
    model = peers_sb3.make(args)
    assert type(model).__name__ == args.algo.upper() and (model.get_vec_normalize_env() is None) != args.normalize


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--suite", "mujocco"], "the nearest is mujoco"),
        (["--suite", "tabular"], "the nearest is"),
        (["--suite", "addition"], "--package sb3 has none of its algorithms, only a2c, dqn, ppo, sac, trpo"),
        (["--suite", "peers", "--only", "dqn"], "--only dqn: the suite peers has sb3_ppo"),
        (["--suite", "peers", "--package", "tianshou"], "sb3"),
        (["--suite", "peers", "--jobs", "0"], "--jobs 0"),
    ],
)
def test_bad_words_beside_a_suite_are_one_line_and_exit_code_2(capsys, words, told):
    with pytest.raises(SystemExit) as stop:
        peers.main(words)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and told in err and err.count("\n") == 1


def test_finished_peers_are_skipped_and_the_report_is_named(tmp_path, monkeypatch, capsys):
    """Two seeds: the second is there already."""
    flags = ("--algo", "ppo", "--settings", '{"n_steps": 20, "batch_size": 20}', "--eval-episodes", "1")
    entry = Entry("peers_sb3", "CartPole-v1", (1, 2), 20, flags, "sb3_ppo")
    monkeypatch.setitem(SUITES, "s", (Entry("ppo", "CartPole-v1", (1, 2), 20), entry))
    run_dir = tmp_path / "made"
    words = ["--env", "CartPole-v1", "--total-timesteps", "20", "--seed", "2", "--threads", "1", *flags]
    peers_sb3.main([*words, "--run-dir", str(run_dir)])
    publish(run_dir, tmp_path / "results" / "s" / "sb3_ppo" / "CartPole-v1" / "seed_2")
    capsys.readouterr()
    words = ["--suite", "s", "--runs-dir", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    assert peers.main(words) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("sb3_ppo on CartPole-v1, 20 steps, 2 seeds: sb3 with --settings")
    assert out[-1] == "table and figures: python benchmarks/report.py --suite s"
    assert sum("(was there)" in line for line in out) == 1
    folder = tmp_path / "results" / "s" / "sb3_ppo" / "CartPole-v1"
    assert [path.name for path in sorted(folder.iterdir())] == ["seed_1", "seed_2"]
    check_made_as_asked(folder / "seed_1", entry, 1)
