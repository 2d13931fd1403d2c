"""Stable-Baselines3 and this zoo: its policies act the same here, ours in its evaluation; others are refused."""

import json
import pickle
import zipfile
from copy import deepcopy
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch

pytest.importorskip("stable_baselines3")
from stable_baselines3 import A2C, DDPG, DQN, PPO, SAC
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecNormalize

from cleanrl_zoo import sb3, zoo
from cleanrl_zoo.envs import EVAL_STREAM, make_vec, run_episodes

pytestmark = pytest.mark.filterwarnings("ignore:.*is out of date")
SMALL = {"net_arch": [8, 6]}
MODELS = {
    "ppo_discrete": (PPO, "CartPole-v1", {"n_steps": 64, "policy_kwargs": SMALL}),
    "ppo_continuous": (PPO, "Pendulum-v1", {"n_steps": 64, "policy_kwargs": SMALL}),
    "ppo_relu": (PPO, "Hopper-v4", {"n_steps": 64, "policy_kwargs": {**SMALL, "activation_fn": torch.nn.ReLU}}),
    "ppo_linear": (PPO, "CartPole-v1", {"n_steps": 64, "policy_kwargs": {"net_arch": []}}),
    "a2c": (A2C, "CartPole-v1", {"policy_kwargs": {"net_arch": {"pi": [5], "vf": [7, 7]}}}),
    "dqn": (DQN, "CartPole-v1", {"buffer_size": 10, "policy_kwargs": SMALL}),
    "sac": (SAC, "Hopper-v4", {"buffer_size": 10, "policy_kwargs": SMALL}),
}


def make_model(name: str, **more):
    """A model with weights so large that actions reach their bounds and none is a tie."""
    kind, env, settings = MODELS[name]
    model = kind("MlpPolicy", env, seed=1, device="cpu", **deepcopy({**settings, **more}))  # SB3 adds to policy_kwargs
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.policy.parameters():
            parameter.normal_(0.0, 0.7)
    return model


def import_model(model, tmp_path: Path, env: str, *words: str) -> int:
    model.save(tmp_path / "model.zip")
    return sb3.main([str(tmp_path / "model.zip"), str(tmp_path / "policy"), "--env", env, *words])


@pytest.mark.parametrize("name", MODELS)
def test_an_imported_policy_acts_as_it_did(tmp_path, name):
    model, env = make_model(name), MODELS[name][1]
    assert import_model(model, tmp_path, env) == 0
    policy = zoo.load(tmp_path / "policy")
    obs = np.random.default_rng(0).normal(size=(300, *policy.obs_shape)) * 2
    theirs, _ = model.predict(obs, deterministic=True)
    assert len(np.unique(theirs)) > 1  # the action depends on what is seen
    np.testing.assert_allclose(policy.act(obs), theirs, rtol=0, atol=1e-6)
    assert policy.card["algorithm"] == f"sb3_{name.partition('_')[0]}"


@pytest.mark.parametrize("name", ["dqn", "sac"])
def test_evaluating_an_imported_policy_gives_what_the_model_earns_there(tmp_path, capsys, name):
    model, env = make_model(name), MODELS[name][1]
    import_model(model, tmp_path, env)
    assert zoo.main(["evaluate", str(tmp_path / "policy"), "--episodes", "3", "--seed", "4"]) == 0
    envs = make_vec(env, 3, 4, stream=EVAL_STREAM)
    returns, _ = run_episodes(envs, lambda obs: model.predict(obs, deterministic=True)[0])
    envs.close()
    assert f"{env}: {returns.mean():.1f} ± {returns.std():.1f} over 3 episodes" in capsys.readouterr().out


def test_a_sampled_action_of_an_imported_sac_has_its_clipped_deviation(tmp_path):
    """log σ beyond 2 is cut off at 2 there, not stretched: before squashing σ is e² = 7.389."""
    model = make_model("sac")
    with torch.no_grad():
        model.actor.mu.weight.zero_(), model.actor.mu.bias.zero_()
        model.actor.log_std.weight.zero_(), model.actor.log_std.bias.fill_(3.0)
    import_model(model, tmp_path, "Hopper-v4")
    policy = zoo.load(tmp_path / "policy")
    sampled = policy.act(np.zeros((20_000, 11)), torch.Generator().manual_seed(0))[:, 0]
    # P(|a| < tanh 1) = P(|u| < 1) = 2Φ(1 / 7.389) − 1 = 0.1077; four standard errors of 20,000 draws: 0.0088
    assert (np.abs(sampled) < np.tanh(1.0)).mean() == pytest.approx(0.1077, abs=0.0088)


@pytest.mark.parametrize("name", ["ppo_discrete", "ppo_continuous"])
def test_their_evaluation_takes_a_policy_of_ours(tmp_path, name):
    model, env = make_model(name), MODELS[name][1]
    import_model(model, tmp_path, env)
    scores = []
    for candidate in (model, zoo.load(tmp_path / "policy")):
        envs = make_vec_env(env, n_envs=2, seed=3)
        scores.append(evaluate_policy(candidate, envs, n_eval_episodes=4, return_episode_rewards=True))
        envs.close()
    assert scores[0][1] == scores[1][1]  # lengths
    np.testing.assert_allclose(scores[0][0], scores[1][0], rtol=1e-5)


def test_predict_takes_one_observation_or_many_and_samples_when_asked(tmp_path):
    import_model(make_model("ppo_continuous"), tmp_path, "Pendulum-v1")
    policy, obs = zoo.load(tmp_path / "policy"), np.array([[0.3, 0.1, -0.2], [1.0, 0.0, 2.0]], np.float32)
    many, state = policy.predict(obs, state=None, episode_start=np.array([True, True]))
    one, _ = policy.predict(obs[0])
    assert many.shape == (2, 1) and one.shape == (1,) and state is None
    np.testing.assert_allclose(one, many[0], atol=1e-6)
    sampled = [policy.predict(np.repeat(obs[:1] * 0, 50, 0), deterministic=False)[0] for _ in range(2)]
    assert len(np.unique(sampled[0])) > 10 and not np.array_equal(*sampled)


@pytest.fixture(scope="module")
def normalised(tmp_path_factory):
    """A model that learned on VecNormalize's observations, its file, and the statistics as .npz."""
    folder = tmp_path_factory.mktemp("normalised")
    scales = VecNormalize(make_vec_env("Pendulum-v1", 2, seed=1), epsilon=1e-3)
    model = PPO(
        "MlpPolicy", scales, seed=1, n_steps=32, batch_size=64, n_epochs=1, policy_kwargs=dict(SMALL), device="cpu"
    )
    model.learn(64)
    model.save(folder / "model.zip")
    rms = scales.obs_rms
    np.savez(folder / "s.npz", mean=rms.mean, var=rms.var, count=rms.count, epsilon=1e-3, clip_obs=scales.clip_obs)
    return model, scales, folder


def test_statistics_of_vecnormalize_come_along(normalised, tmp_path):
    model, scales, folder = normalised
    words = [str(folder / "model.zip"), str(tmp_path / "p"), "--env", "Pendulum-v1", "--obs-stats"]
    assert sb3.main([*words, str(folder / "s.npz")]) == 0
    obs = np.random.default_rng(0).normal(size=(50, 3)) * 3
    theirs, _ = model.predict(scales.normalize_obs(obs), deterministic=True)
    np.testing.assert_allclose(zoo.load(tmp_path / "p").act(obs), theirs, rtol=0, atol=1e-6)


def test_statistics_are_missed_and_bad_ones_refused(normalised, tmp_path, capsys):
    _, _, folder = normalised
    np.savez(folder / "narrow.npz", mean=np.zeros(3), var=np.ones(3), clip_obs=5.0)
    np.savez(folder / "wide.npz", mean=np.zeros(4), var=np.ones(4))
    np.savez(folder / "empty.npz", x=np.zeros(4))
    (folder / "scales.pkl").write_bytes(pickle.dumps({}))
    for words, told in (
        ([], "was trained with VecNormalize: give --obs-stats"),
        (["--obs-stats", str(folder / "narrow.npz")], "clip_obs is 5, supported is 10"),
        (["--obs-stats", str(folder / "wide.npz")], "mean (4,) and var (4,), the policy observes (3,)"),
        (["--obs-stats", str(folder / "empty.npz")], "needs the arrays mean and var"),
        (["--obs-stats", str(folder / "scales.pkl")], "must be a .npz file, no pickle"),
    ):
        assert sb3.main([str(folder / "model.zip"), str(tmp_path / "p"), "--env", "Pendulum-v1", *words]) == 2
        err = capsys.readouterr().err
        assert told in err and err.count("\n") == 1
    words = [str(folder / "model.zip"), str(tmp_path / "p"), "--env", "Pendulum-v1", "--obs-stats", "none"]
    assert sb3.main(words) == 0 and zoo.load(tmp_path / "p").obs_norm is None


class Frames(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 255, (36, 36, 1), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)


def refused(model, tmp_path: Path, capsys, env: str = "CartPole-v1") -> str:
    assert import_model(model, tmp_path, env) == 2 and not (tmp_path / "policy").exists()
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return err


def test_other_architectures_are_refused_by_what_differs(tmp_path, capsys):
    small = {"buffer_size": 10, "device": "cpu"}
    other = DDPG("MlpPolicy", "Pendulum-v1", policy_kwargs=dict(SMALL), **small)
    assert "stable_baselines3.td3.policies" in refused(other, tmp_path, capsys)
    noisy = SAC("MlpPolicy", "Pendulum-v1", use_sde=True, policy_kwargs=dict(SMALL), **small)
    assert "actor.log_std" in refused(noisy, tmp_path, capsys, "Pendulum-v1")
    noisy = PPO("MlpPolicy", "Pendulum-v1", use_sde=True, policy_kwargs=dict(SMALL), device="cpu")
    assert "use_sde" in refused(noisy, tmp_path, capsys, "Pendulum-v1")
    odd = make_model("ppo_discrete", policy_kwargs={**SMALL, "activation_fn": torch.nn.GELU})
    assert "GELU" in refused(odd, tmp_path, capsys)
    frames = DQN("CnnPolicy", Frames(), buffer_size=10, device="cpu")
    assert "features_extractor.cnn" in refused(frames, tmp_path, capsys)


def test_another_environment_than_its_own_is_told(tmp_path, capsys):
    assert "actions are a Box" in refused(make_model("dqn"), tmp_path, capsys, "Pendulum-v1")
    assert "has 6 observations and 3 actions" in refused(make_model("dqn"), tmp_path, capsys, "Acrobot-v1")
    model = make_model("ppo_continuous")  # of torques up to 2
    assert "low is [-1.0], that of" in refused(model, tmp_path, capsys, "MountainCarContinuous-v0")
    assert "unknown environment" in refused(model, tmp_path, capsys, "Pendulums-v1")


def test_a_file_that_is_no_model_is_told_and_nothing_pickled_is_opened(tmp_path, capsys):
    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "sprung",))

    words = [str(tmp_path / "policy"), "--env", "CartPole-v1"]
    (tmp_path / "text.zip").write_text("no archive")
    make_model("dqn").save(tmp_path / "good.zip")
    with zipfile.ZipFile(tmp_path / "good.zip") as good, zipfile.ZipFile(tmp_path / "trap.zip", "w") as trap:
        torch.save({"q_net.q_net.0.weight": Trap()}, tmp_path / "policy.pth")
        for name in good.namelist():
            trap.writestr(name, (tmp_path / "policy.pth").read_bytes() if name == "policy.pth" else good.read(name))
    with zipfile.ZipFile(tmp_path / "good.zip") as good, zipfile.ZipFile(tmp_path / "empty.zip", "w") as empty:
        empty.writestr("data", json.dumps({"policy_class": json.loads(good.read("data"))["policy_class"]}))
    for name, told in (
        ("nowhere.zip", "cannot be read"),
        ("text.zip", "not a model saved by Stable-Baselines3"),
        ("empty.zip", "no item named 'policy.pth'"),
        ("trap.zip", "holds more than tensors"),
    ):
        assert sb3.main([str(tmp_path / name), *words]) == 2
        err = capsys.readouterr().err
        assert told in err and err.count("\n") == 1
    assert not (tmp_path / "sprung").exists()


def test_a_folder_with_a_policy_is_left_alone(tmp_path, capsys):
    model = make_model("dqn")
    assert import_model(model, tmp_path, "CartPole-v1") == 0
    capsys.readouterr()
    assert import_model(model, tmp_path, "CartPole-v1") == 2
    assert "holds a policy already" in capsys.readouterr().err


def test_trpo_is_known_by_its_own_settings(tmp_path):
    contrib = pytest.importorskip("sb3_contrib")
    model = contrib.TRPO("MlpPolicy", "CartPole-v1", n_steps=128, seed=1, policy_kwargs=dict(SMALL), device="cpu")
    assert import_model(model, tmp_path, "CartPole-v1") == 0
    assert zoo.load(tmp_path / "policy").card["algorithm"] == "sb3_trpo"
