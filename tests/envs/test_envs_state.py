"""Saving, restoring and cutting environments."""

import json

import numpy as np
import pytest

from cleanrl_zoo.envs import make_vec
from cleanrl_zoo.envs.mujoco_tasks import TASKS
from cleanrl_zoo.envs.probes import LIMITS

CLASSIC = ("CartPole-v1", "Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Pendulum-v1",
           "cartpole/Balance-v0", "cartpole/SwingUp-v0")  # fmt: skip
TABULAR = ("CliffWalking-v1", "FrozenLake-v1", "Taxi-v4")
PROBES = tuple(f"probe/{probe.__name__}{suffix}-v0" for probe in LIMITS for suffix in ("", "Continuous"))


def sample(envs):
    return np.stack([envs.single_action_space.sample() for _ in range(envs.num_envs)])


def through_json(state):
    """What a checkpoint of arrays and JSON does to a state: only plain types survive."""
    if isinstance(state, dict):
        return {key: through_json(value) for key, value in state.items()}
    if isinstance(state, list):
        return [through_json(value) for value in state]
    if isinstance(state, np.ndarray):
        return np.frombuffer(state.tobytes(), state.dtype).reshape(state.shape)  # read-only, too
    return json.loads(json.dumps(state))


@pytest.mark.parametrize("env_id", (*TASKS, *CLASSIC, *TABULAR, *PROBES))
def test_a_restored_engine_continues_bit_for_bit(env_id):
    # saved after 31 steps, inside an episode that a limit of 70 cuts later
    kwargs = {"max_episode_steps": 70} if env_id in TASKS or env_id in CLASSIC else {}
    envs = make_vec(env_id, 2, seed=5, env_kwargs=kwargs)
    assert envs.exact_state
    envs.reset()
    for _ in range(31):
        envs.step(sample(envs))
    state = through_json(envs.state_dict())

    actions = [sample(envs) for _ in range(150)]
    steps = [envs.step(action) for action in actions]
    episodes = envs.pop_episodes()
    assert sum((step.terminated | step.truncated).sum() for step in steps) > 0 or env_id in TABULAR

    other = make_vec(env_id, 2, seed=6, env_kwargs=kwargs)
    for resumed in (other, envs):  # a fresh engine, and one that has gone on meanwhile
        resumed.load_state_dict(state)
        for action, expected in zip(actions, steps, strict=True):
            assert np.array_equal(action, sample(resumed))
            got = resumed.step(action)
            for name, x, y in zip(expected._fields, expected, got, strict=True):
                assert x.dtype == y.dtype and np.array_equal(x, y), name
        assert resumed.pop_episodes() == episodes
        resumed.close()


def test_a_state_of_another_size_is_refused():
    for env_id in ("Hopper-v4", "CartPole-v1"):
        envs = make_vec(env_id, 2, seed=0)
        envs.reset()
        with pytest.raises(ValueError, match="the saved state has 2 environments, this run has 3"):
            make_vec(env_id, 3, seed=0).load_state_dict(envs.state_dict())


@pytest.mark.parametrize("vec", ["gymnasium", "mujoco"])
def test_a_cut_starts_episodes_that_depend_on_the_step_alone(vec):
    envs = make_vec("Hopper-v4", 3, seed=0, vec=vec)
    first = envs.reset()
    assert envs.cut_episodes == 0
    envs.cut(512)
    assert envs.cut_episodes == 0  # nothing was under way
    for _ in range(5):
        envs.step(np.zeros((3, 3), np.float32))
    obs = envs.cut(1024)
    assert envs.cut_episodes == 3
    step = envs.step(np.zeros((3, 3), np.float32))
    assert step.episode_length.tolist() == [1, 1, 1] and np.array_equal(step.episode_return, step.reward)

    other = make_vec("Hopper-v4", 3, seed=0, vec=vec)
    other.reset()
    assert np.array_equal(other.cut(1024), obs)
    assert np.array_equal(other.step(np.zeros((3, 3), np.float32)).obs, step.obs)
    assert not np.isin(obs[:, 0], first[:, 0]).any() and not np.isin(other.cut(2048)[:, 0], obs[:, 0]).any()


def test_an_inexact_engine_says_so_and_resumes_through_a_cut():
    envs = make_vec("Hopper-v4", 2, seed=0, vec="gymnasium")
    assert not envs.exact_state
    envs.reset()
    for _ in range(3):
        envs.step(np.zeros((2, 3), np.float32))
    state = through_json(envs.state_dict())  # written at the boundary, before the cut
    expected = envs.cut(6)
    resumed = make_vec("Hopper-v4", 2, seed=0, vec="gymnasium")
    resumed.load_state_dict(state)
    assert np.array_equal(resumed.cut(6), expected)
    assert resumed.cut_episodes == envs.cut_episodes == 2
