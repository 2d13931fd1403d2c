"""What a model is told of an environment equals what the environment does, on states that it really reaches."""

import gymnasium
import numpy as np
import pytest
import torch

from cleanrl_zoo.envs import make_vec
from cleanrl_zoo.envs.model_functions import (
    REWARDS,
    TERMINATIONS,
    _double_pendulum_tip,
    features,
    reward,
    termination,
)

IDS = [
    "Hopper-v4", "Hopper-v5", "Walker2d-v4", "Ant-v4", "Humanoid-v4", "InvertedPendulum-v4", "InvertedPendulum-v5",
    "InvertedDoublePendulum-v4", "InvertedDoublePendulum-v5", "HalfCheetah-v4", "Swimmer-v4", "Reacher-v4", "Pusher-v5",
    "Pendulum-v1", "MountainCarContinuous-v0", "cartpole/Balance-v0", "cartpole/SwingUp-v0",
]  # fmt: skip
NEVER = {"HalfCheetah", "Swimmer", "Reacher", "Pusher", "Pendulum", "cartpole/SwingUp"}
# A runner's reward is the way it went, of which observed velocities say this much (standard deviation, m/s)
APPROXIMATE = {"Hopper": 0.01, "Walker2d": 0.03, "HalfCheetah": 0.25}


def name(env_id):
    return env_id.rpartition("-v")[0]


def played(env_id, steps=400, num_envs=8):
    """obs, action, reward, next_obs and terminated of random play, as tensors [rows, ...].

    Without the rows in which the double pendulum's tip is within 0.1 mm of the limit: MuJoCo's site is where the last
    stage of its integrator saw it, up to 0.01 mm from where the observed angles put it.
    """
    envs = make_vec(env_id, num_envs, seed=0, threads=1)
    space, obs, rows = envs.single_action_space, envs.reset(), []
    space.seed(1)
    if env_id.startswith("MountainCar"):  # which random play never brings to the goal
        for env in envs._vec.envs:
            env.unwrapped.state = np.array([0.3, 0.06])
        obs = np.tile(np.array([0.3, 0.06], np.float32), (num_envs, 1))
    for _ in range(steps):
        action = np.stack([space.sample() for _ in range(num_envs)])
        step = envs.step(action)
        rows.append((obs, action, step.reward, step.final_obs, step.terminated))
        obs = step.obs
    envs.close()
    obs, action, paid, next_obs, ended = (torch.as_tensor(np.concatenate(parts)) for parts in zip(*rows, strict=True))
    clear = torch.ones_like(ended)
    if env_id.startswith("InvertedDouble"):
        clear = (_double_pendulum_tip(next_obs)[1] - 1.0).abs() > 1e-4
        assert (~clear).sum() < 10
    return obs[clear], action[clear], paid[clear], next_obs[clear], ended[clear]


def test_every_known_environment_is_looked_at():
    assert {name(env_id) for env_id in IDS} == TERMINATIONS.keys()


@pytest.mark.parametrize("env_id", IDS)
def test_terminations_equal_the_environments(env_id):
    *_, next_obs, terminated = played(env_id, 60 if name(env_id) in ("Ant", "Humanoid", "Pusher") else 250)
    found = termination(env_id)(next_obs.float())
    assert found.dtype == torch.bool and torch.equal(found, terminated)
    if name(env_id) in NEVER:
        assert not terminated.any()
    elif name(env_id) != "Ant":  # random play rarely turns it over
        assert terminated.sum() > 3


def test_an_ant_that_jumps_or_lies_has_ended():
    obs = torch.zeros(5, 27)
    obs[:, 0] = torch.tensor([0.1, 0.2, 0.7, 1.01, torch.nan])
    assert termination("Ant-v4")(obs).tolist() == [True, False, False, True, True]


@pytest.mark.parametrize("env_id", REWARDS)
def test_rewards_equal_the_environments(env_id):
    obs, action, given, next_obs, terminated = played(env_id, 250)
    found = reward(env_id)(obs.float(), action.float(), next_obs.float())
    assert found.shape == given.shape
    error = found.double() - given
    if name(env_id) in APPROXIMATE:
        assert error.std() < APPROXIMATE[name(env_id)] < 0.5 * given.std()
        assert error.mean().abs() < 0.02
        return
    if name(env_id) == "InvertedDoublePendulum":  # observed velocities are cut off at ±10
        error = error[(next_obs[:, 5:8].abs() < 10).all(1)]
        assert len(error) > 100
    assert error.abs().max() < 2e-4 * (1 + given.abs().max())
    assert given.std() > 0 or name(env_id) in ("cartpole/Balance", "InvertedPendulum")
    if env_id == "InvertedPendulum-v5":
        assert given.std() > 0  # the last step of an episode pays nothing


def test_cheetahs_angle_is_seen_as_sine_and_cosine():
    obs = torch.arange(34.0).view(2, 17)
    seen = features("HalfCheetah-v4")(obs)
    assert seen.shape == (2, 18)
    assert torch.equal(seen[:, :16], obs[:, [0, *range(2, 17)]])
    assert torch.equal(seen[:, 16:], torch.stack([obs[:, 1].sin(), obs[:, 1].cos()], -1))
    turned = obs.clone()
    turned[:, 1] += 2 * torch.pi
    torch.testing.assert_close(features("HalfCheetah-v4")(turned), seen, rtol=0, atol=1e-4)
    assert features("Pendulum-v1")(obs) is obs


def test_what_is_unknown_is_told_in_one_line():
    for function in (termination, reward):
        with pytest.raises(ValueError, match="--env CartPole-v1: its") as error:
            function("CartPole-v1")
        assert "\n" not in str(error.value) and "Pendulum" in str(error.value)


# The cart-pole


def test_balance_is_gymnasiums_cart_pole_with_a_force_in_between():
    """Pushed fully left or right, the same float64 numbers, rewards and end."""
    ours = gymnasium.make("cartpole/Balance-v0").unwrapped
    theirs = gymnasium.make("CartPole-v1").unwrapped
    for seed in range(5):
        one, other = ours.reset(seed=seed)[0], theirs.reset(seed=seed)[0]
        assert np.array_equal(one, other) and one.dtype == other.dtype
        for step in range(200):
            right = np.random.default_rng(seed * 1000 + step).random() < 0.5
            got, expected = ours.step(np.array([1.0 if right else -1.0])), theirs.step(int(right))
            assert np.array_equal(got[0], expected[0]) and got[1:4] == expected[1:4]
            if got[2]:
                break
        assert got[2]


def test_a_force_is_proportional_and_cut_off_at_ten_newtons():
    """Upright and at rest, cos θ = 1: h = F/M, θ̈ = −h/(l(4/3 − m/M)) = −(F/1.1)/(0.5·1.242424) and
    ẍ = F/M − m l θ̈/M. F = 5: h = 4.545455, θ̈ = −7.317073, ẍ = 4.545455 + 0.332594 = 4.878049; after 0.02 s."""
    env = gymnasium.make("cartpole/Balance-v0").unwrapped
    env.reset(seed=0)
    for action, share in ((0.5, 1.0), (1.0, 2.0), (7.0, 2.0), (-0.5, -1.0)):
        env.state = np.zeros(4)
        env.step(np.array([action]))
        np.testing.assert_allclose(env.state, [0, share * 0.02 * 4.878049, 0, -share * 0.02 * 7.317073], rtol=1e-6)


def test_a_pole_that_swings_freely_keeps_its_energy():
    """E = ½Mẋ² + m l cos θ ẋ θ̇ + ½·(4/3)m l² θ̇² + m g l cos θ, with l the half length; from 20° off upright."""

    def energy(state):
        _, x_dot, theta, theta_dot = state
        moving = 0.5 * 1.1 * x_dot**2 + 0.05 * np.cos(theta) * x_dot * theta_dot + 0.5 * (4 / 3) * 0.025 * theta_dot**2
        return moving + 0.1 * 9.8 * 0.5 * np.cos(theta)

    env = gymnasium.make("cartpole/SwingUp-v0").unwrapped
    env.reset(seed=0)
    env.state = np.array([0.0, 0.0, np.pi / 9, 0.0])
    before = energy(env.state)
    lowest = 1.0
    for _ in range(200):
        env.step(np.zeros(1))
        lowest = min(lowest, np.cos(env.state[2]))
    assert lowest < -0.9 and energy(env.state) == pytest.approx(before, abs=2e-3)


def test_swing_up_by_hand():
    """It starts hanging; the reward is the tip's height after the step less 0.05 x² and 0.01 a²."""
    env = gymnasium.make("cartpole/SwingUp-v0")
    obs, _ = env.reset(seed=1)
    assert obs.shape == (5,) and obs[3] < -0.998 and np.abs(obs[[0, 1, 4]]).max() <= 0.05
    assert obs[2] ** 2 + obs[3] ** 2 == pytest.approx(1.0)
    env.unwrapped.state = np.array([2.0, 0.0, np.pi, 0.0])
    obs, paid, terminated, truncated, _ = env.step(np.array([0.0], np.float32))
    assert paid == pytest.approx(-1.0 - 0.05 * 4) and not terminated and not truncated
    obs, paid, *_ = env.step(np.array([-3.0], np.float32))  # cut off at −1
    assert paid == pytest.approx(obs[3] - 0.05 * obs[0] ** 2 - 0.01)
    for _ in range(198):
        *_, truncated, _ = env.step(np.zeros(1, np.float32))
    assert truncated
