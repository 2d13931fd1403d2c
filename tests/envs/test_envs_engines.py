"""The two engines: the same numbers, same-step autoreset, seeds that reach everything."""

import gc
import os
import subprocess
import sys
import time
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch

from cleanrl_zoo.core.returns import gae
from cleanrl_zoo.envs import EVAL_STREAM, TRAIN_STREAM, make_vec, run_episodes
from cleanrl_zoo.envs.mujoco_tasks import TASKS
from cleanrl_zoo.envs.vec import env_seeds

pytestmark = pytest.mark.filterwarnings("ignore:.*out of date:DeprecationWarning")  # of `by_hand` below

ENGINES = ("gymnasium", "mujoco")
ROOT = Path(__file__).parents[2]


def random_actions(space, num_envs, rng):
    return rng.uniform(space.low, space.high, (num_envs, *space.shape)).astype(space.dtype)


def assert_same(a, b):
    for name, x, y in zip(a._fields, a, b, strict=True):
        assert x.dtype == y.dtype and np.array_equal(x, y), name


@pytest.mark.parametrize("env_id", TASKS)
def test_both_engines_give_the_same_numbers_through_resets(env_id):
    reference = make_vec(env_id, 2, seed=3, vec="gymnasium", env_kwargs={"max_episode_steps": 30})
    batch = make_vec(env_id, 2, seed=3, vec="mujoco", threads=2, env_kwargs={"max_episode_steps": 30})
    assert (reference.engine, batch.engine) == ENGINES
    assert batch.single_action_space == reference.single_action_space
    assert batch.single_observation_space == reference.single_observation_space
    assert np.array_equal(reference.reset(), batch.reset())
    rng = np.random.default_rng(0)
    resets = 0
    for _ in range(100):
        actions = random_actions(batch.single_action_space, 2, rng)
        expected, got = reference.step(actions), batch.step(actions)
        assert got.reward == pytest.approx(expected.reward, rel=1e-14, abs=1e-14)  # sums may run in another order
        assert got.episode_return == pytest.approx(expected.episode_return, rel=1e-13, abs=1e-13)
        exact = {"reward": got.reward, "episode_return": got.episode_return}
        assert_same(expected._replace(**exact), got)
        resets += (got.terminated | got.truncated).sum()
    assert resets >= 6
    reference.close()
    batch.close()


@pytest.mark.parametrize("env_id", TASKS)
def test_time_limit_is_gymnasiums(env_id):
    assert TASKS[env_id].max_episode_steps == gymnasium.spec(env_id).max_episode_steps


def test_auto_takes_the_batch_engine_where_it_can():
    assert make_vec("Hopper-v4", 1, 0).engine == "mujoco"
    assert make_vec("Hopper-v4", 1, 0, env_kwargs={"max_episode_steps": 5}).engine == "mujoco"
    assert make_vec("Hopper-v4", 1, 0, env_kwargs={"max_episode_steps": None}).max_episode_steps == 1000
    assert make_vec("Hopper-v4", 1, 0, env_kwargs={"ctrl_cost_weight": 1.0}).engine == "gymnasium"
    assert make_vec("CartPole-v1", 1, 0).engine == "gymnasium"


@pytest.mark.parametrize("env_id", ["Hopper-v4", "Humanoid-v5"])
def test_thread_count_changes_nothing(env_id):
    one = make_vec(env_id, 5, seed=1, vec="mujoco", threads=1)
    two = make_vec(env_id, 5, seed=1, vec="mujoco", threads=2)
    assert np.array_equal(one.reset(), two.reset())
    rng = np.random.default_rng(0)
    for _ in range(60):
        actions = random_actions(one.single_action_space, 5, rng)
        assert_same(one.step(actions), two.step(actions))


def thread_count():
    """The threads of this process, MuJoCo's own included, once those that are ending have ended."""
    gc.collect()
    time.sleep(0.05)
    return len(os.listdir("/proc/self/task"))


lists_threads = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are listed on Linux only")


@lists_threads
@pytest.mark.parametrize("env_id", ["Hopper-v4", "Humanoid-v5"])
def test_one_thread_starts_none_and_closing_ends_the_others(env_id):
    before = thread_count()
    one = make_vec(env_id, 5, seed=1, vec="mujoco", threads=1)
    one.reset()
    one.step(random_actions(one.single_action_space, 5, np.random.default_rng(0)))
    assert thread_count() == before
    two = make_vec(env_id, 5, seed=1, vec="mujoco", threads=2)
    assert thread_count() == before + 1
    two.close()
    two.close()  # a second time does no harm
    assert thread_count() == before


@lists_threads
def test_an_engine_that_is_dropped_unclosed_ends_its_threads():
    before = thread_count()
    envs = make_vec("Hopper-v4", 4, seed=0, vec="mujoco", threads=2)
    envs.reset()
    envs.step(np.zeros((4, 3), np.float32))
    assert thread_count() == before + 1
    del envs
    assert thread_count() == before


@pytest.mark.parametrize("vec", ENGINES)
def test_steps_are_never_written_again(vec):
    envs = make_vec("Hopper-v4", 3, seed=0, vec=vec)
    envs.reset()
    rng = np.random.default_rng(0)
    steps, copies = [], []
    for _ in range(30):
        steps.append(envs.step(random_actions(envs.single_action_space, 3, rng)))
        copies.append([array.copy() for array in steps[-1]])
    assert sum((step.terminated | step.truncated).sum() for step in steps) > 0
    for step, copy in zip(steps, copies, strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(step, copy, strict=True))


@pytest.mark.parametrize("vec", ENGINES)
def test_returns_and_lengths_are_raw_running_totals(vec):
    envs = make_vec("Hopper-v4", 2, seed=0, vec=vec)
    envs.reset()
    rng = np.random.default_rng(1)
    total, length, episodes = np.zeros(2), np.zeros(2, np.int64), []
    for _ in range(60):
        step = envs.step(random_actions(envs.single_action_space, 2, rng))
        total, length = total + step.reward, length + 1
        assert np.array_equal(step.episode_return, total) and np.array_equal(step.episode_length, length)
        ended = step.terminated | step.truncated
        episodes += zip(total[ended].tolist(), length[ended].tolist(), strict=True)
        total[ended], length[ended] = 0.0, 0
    assert envs.pop_episodes() == episodes and len(episodes) > 1
    assert envs.pop_episodes() == []


# Truncation: the limit of 3 cuts an episode, which nothing else ends so early. The engine is held against one plain
# environment without any wrapper, stepped and reset by hand.


def by_hand(num_steps, limit):
    """obs, next_obs [T, 4] of one InvertedPendulum-v4 (reward 1) that is reset after every `limit` steps."""
    env = gymnasium.make("InvertedPendulum-v4").unwrapped
    obs, _ = env.reset(seed=env_seeds(0, TRAIN_STREAM, 1)[0])
    rows, next_rows = [], []
    for t in range(num_steps):
        next_obs, *_ = env.step(np.zeros(1, np.float32))
        rows.append(obs)
        next_rows.append(next_obs)
        obs = env.reset()[0] if (t + 1) % limit == 0 else next_obs
    return np.array(rows), np.array(next_rows)


@pytest.mark.parametrize("vec", ENGINES)
def test_eight_steps_are_eight_transitions_each_with_its_true_successor(vec):
    envs = make_vec("InvertedPendulum-v4", 1, seed=0, vec=vec, env_kwargs={"max_episode_steps": 3})
    obs, transitions = envs.reset(), []
    for _ in range(8):
        step = envs.step(np.zeros((1, 1), np.float32))
        transitions.append((obs[0], step.final_obs[0], bool(step.terminated[0]), bool(step.truncated[0])))
        obs = step.obs
    expected_obs, expected_next = by_hand(8, limit=3)
    assert np.array_equal([t[0] for t in transitions], expected_obs)
    assert np.array_equal([t[1] for t in transitions], expected_next)
    assert [t[2] for t in transitions] == [False] * 8
    assert [t[3] for t in transitions] == [False, False, True, False, False, True, False, False]


@pytest.mark.parametrize("vec", ENGINES)
def test_advantages_bootstrap_from_the_final_observation(vec):
    # r = (1, 1, 1), V = 0 but V(final) = 10 and V(reset) = 100, γ = 0.9, λ = 1, truncated at the end:
    # A_2 = 1 + 0.9·10 = 10, A_1 = 1 + 0.9·10 = 10, A_0 = 10. From the reset observation A_2 would be 91.
    envs = make_vec("InvertedPendulum-v4", 1, seed=0, vec=vec, env_kwargs={"max_episode_steps": 3})
    envs.reset()
    steps = [envs.step(np.zeros((1, 1), np.float32)) for _ in range(3)]
    obs, next_obs = by_hand(4, limit=3)

    def value(row):
        return 10.0 if np.array_equal(row, next_obs[2]) else 100.0 if np.array_equal(row, obs[3]) else 0.0

    assert value(steps[2].obs[0]) == 100.0  # the engine already shows the next episode
    columns = ([s.reward for s in steps], [s.terminated for s in steps], [s.terminated | s.truncated for s in steps])
    rewards, terminated, done = (torch.tensor(np.array(column)) for column in columns)
    next_values = torch.tensor([[value(s.final_obs[0])] for s in steps], dtype=torch.float64)
    advantages = gae(rewards, torch.zeros(3, 1, dtype=torch.float64), next_values, terminated, done, 0.9, 1.0)
    assert advantages[:, 0].tolist() == pytest.approx([10.0, 10.0, 10.0], abs=1e-9)


# Seeds.


def test_seeds_of_neighbouring_runs_streams_and_cuts_share_nothing():
    seeds = [
        seed
        for run in range(1, 6)
        for stream in (TRAIN_STREAM, EVAL_STREAM)
        for step in (None, 2048, 4096)
        for seed in env_seeds(run, stream, 16, step)
    ]
    assert len(set(seeds)) == len(seeds)


@pytest.mark.parametrize("vec", ENGINES)
def test_reset_repeats_and_environments_and_streams_differ(vec):
    train = make_vec("Hopper-v4", 3, seed=1, vec=vec)
    first = train.reset()
    train.step(np.zeros((3, 3), np.float32))
    assert np.array_equal(first, train.reset())
    assert len(np.unique(first[:, 0])) == 3
    evaluation = make_vec("Hopper-v4", 3, seed=1, vec=vec, stream=EVAL_STREAM)
    assert not np.isin(evaluation.reset()[:, 0], first[:, 0]).any()


HASH = """
import hashlib, sys
import numpy as np
from cleanrl_zoo.envs import make_vec
for vec in ("gymnasium", "mujoco"):
    envs = make_vec("Hopper-v4", 2, seed=int(sys.argv[1]), vec=vec)
    digest = hashlib.sha256(envs.reset().tobytes())
    for _ in range(500):
        step = envs.step(np.stack([envs.single_action_space.sample() for _ in range(2)]))
        for array in step:
            digest.update(array.tobytes())
    print(digest.hexdigest())
"""


def in_process(script, *arguments, cwd):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "default", "-c", script, *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done


def test_two_processes_agree_and_another_seed_does_not(tmp_path):
    first, second, other = (in_process(HASH, seed, cwd=tmp_path).stdout.split() for seed in "112")
    assert first == second and first[0] == first[1]  # both processes, both engines
    assert other[0] == other[1] != first[0]


# What MuJoCo and Gymnasium have to say.

SILENT = """
import numpy as np
from cleanrl_zoo.envs import make_vec
for env_id in ("Hopper-v4", "HalfCheetah-v4", "Ant-v4", "InvertedPendulum-v5", "CartPole-v1", "probe/Match-v0"):
    for vec in ("gymnasium", "auto"):
        envs = make_vec(env_id, 2, seed=0, vec=vec)
        envs.reset()
        for _ in range(40):
            envs.step(np.stack([envs.single_action_space.sample() for _ in range(2)]))
        envs.close()
"""


def test_nothing_is_written_to_stderr_or_the_working_directory(tmp_path):
    done = in_process(SILENT, cwd=tmp_path)
    assert done.stderr == "" and done.stdout == ""
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("vec", ENGINES)
def test_an_unstable_simulation_is_a_python_warning(vec, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    envs = make_vec("Hopper-v4", 2, seed=0, vec=vec, threads=2)  # reported from another thread than this one, too
    envs.reset()
    with pytest.warns(RuntimeWarning, match="MuJoCo: Nan, Inf or huge value in CTRL"):
        envs.step(np.full((2, 3), np.nan, np.float32))
    assert os.listdir(tmp_path) == []


# Episodes.


@pytest.mark.parametrize("vec", ENGINES)
def test_run_episodes_plays_the_first_episode_of_each_environment(vec):
    envs = make_vec("InvertedPendulum-v5", 4, seed=2, vec=vec)

    def act(obs):  # lets the pole fall, which takes as long as its first lean is small
        return np.zeros((4, 1), np.float32)

    returns, lengths = run_episodes(envs, act)
    # reward 1 per step except the terminal one
    assert np.array_equal(returns, lengths - 1.0) and len(set(lengths.tolist())) > 1
    again, _ = run_episodes(envs, act)
    assert np.array_equal(returns, again)
