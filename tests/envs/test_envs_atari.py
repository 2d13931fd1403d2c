"""ale-py's vector engine behind the common interface: held against ALE itself, stepped and preprocessed by hand."""

import gc
import os
import time

import numpy as np
import pytest
from test_envs_state import sample, through_json

from cleanrl_zoo.envs import EVAL_STREAM, TRAIN_STREAM, check_spaces, make_vec, run_episodes
from cleanrl_zoo.envs.vec import env_seeds

ale_py = pytest.importorskip("ale_py")
GAME = "ALE/Breakout-v5"  # five lives; random play loses them within 250 steps


def play(envs, steps, rng=0):
    """[(obs, actions, step)] of uniform actions; the last step's `obs` go on."""
    rng, obs, rows = np.random.default_rng(rng), envs.reset(), []
    for _ in range(steps):
        actions = rng.integers(0, envs.single_action_space.n, envs.num_envs)
        rows.append((obs, actions, envs.step(actions)))
        obs = rows[-1][2].obs
    return rows


def assert_same(a, b):
    for name, x, y in zip(a._fields, a, b, strict=True):
        assert x.dtype == y.dtype and np.array_equal(x, y), name


def test_auto_takes_the_engine_where_it_can():
    envs = make_vec(GAME, 1, 0)
    assert envs.engine == "atari" and not envs.exact_state and envs.max_episode_steps == 27_000
    assert envs.single_observation_space.shape == (4, 84, 84) and envs.single_observation_space.dtype == np.uint8
    assert envs.single_action_space.n == 4 and envs.versions().keys() == {"gymnasium", "ale-py"}
    check_spaces(envs, "discrete", frames=True)
    assert make_vec(GAME, 1, 0, env_kwargs={"full_action_space": True}).single_action_space.n == 18
    assert make_vec(GAME, 1, 0, vec="gymnasium").single_observation_space.shape == (210, 160, 3)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            dict(env_id="CartPole-v1", vec="atari"),
            "vec is atari, which has no CartPole-v1, only names that begin with ALE/",
        ),
        (dict(vec="atari", env_kwargs={"mode": 1}), "vec is atari, which takes no env_kwargs mode; use vec gymnasium"),
        (dict(env_id="ALE/Breakot-v5"), "unknown environment 'ALE/Breakot-v5', nearest: ALE/Breakout-v5"),
        (dict(env_kwargs={"repeat_action_probability": 2}), "repeat_action_probability is 2, must be from 0 to 1"),
        (dict(env_kwargs={"max_episode_steps": 0}), "max_episode_steps is 0, must be at least 1"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError) as caught:
        make_vec(**{"env_id": GAME, "num_envs": 2, "seed": 0, **arguments})
    assert message in str(caught.value) and "\n" not in str(caught.value)


# By hand: one ALE, four screens an action, grey values, the maximum of the last two screens.


class ByHand:
    """One game from `seed` without starting actions, its newest frame before the resize to 84 × 84."""

    def __init__(self, seed):
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        self.ale = ale_py.ALEInterface()
        self.ale.setInt("random_seed", seed)
        self.ale.setFloat("repeat_action_probability", 0.0)
        self.ale.loadROM(ale_py.roms.get_rom_path("breakout"))
        self.ale.reset_game()
        self.actions = self.ale.getMinimalActionSet()

    def step(self, action):
        """Reward, lives, whether the game is over, and the frame [210, 160]."""
        reward, screens = 0, []
        for _ in range(4):
            reward += self.ale.act(self.actions[action])
            screens.append(self.ale.getScreenGrayscale())
            if self.ale.game_over():
                break
        return reward, self.ale.lives(), self.ale.game_over(), np.maximum(*screens[-2:]) if len(screens) == 4 else None


def shrunk(screen):
    """[210, 160] → [84, 84] by the mean over the area that a pixel covers: 2.5 rows × 1.905 columns."""

    def weights(large, small):
        edges = np.arange(small + 1) * large / small
        rows = np.arange(large)
        covered = np.minimum(edges[1:, None], rows + 1) - np.maximum(edges[:-1, None], rows)
        return covered.clip(0) * small / large

    return weights(210, 84) @ screen.astype(float) @ weights(160, 84).T


def test_steps_are_those_of_the_game_itself():
    """Rewards, ends and frames of 300 random steps equal those of ALE by hand.

    The engine begins with FIRE and some screens without action; how many is found by trying all thirty.
    """
    seed = env_seeds(0, 0, 1)[0] >> 33
    rows = play(make_vec(GAME, 1, 0), 300)
    first = rows[0][0][0]
    assert not first[:3].any() and first[3].any()  # the frames before the first are black
    for idle in range(30):
        game = ByHand(seed)
        game.ale.act(game.actions[1])
        for _ in range(idle):
            game.ale.act(game.actions[0])
        if np.abs(shrunk(game.ale.getScreenGrayscale()) - first[3]).max() > 1:
            continue
        newest = []
        for _, actions, step in rows:
            reward, _, over, screen = game.step(actions[0])
            newest.append(None if screen is None else shrunk(screen))
            same = newest[-1] is None or np.abs(newest[-1] - step.final_obs[0, 3]).max() <= 1  # rounding
            if not (same and reward == step.reward[0] and over == step.terminated[0]):
                break
            if over:
                for frame, expected in zip(step.final_obs[0][:3], newest[-4:-1], strict=True):
                    assert np.abs(expected - frame).max() <= 1
                return  # the whole game
    pytest.fail("no number of idle screens gives the engine's game")


def test_the_true_last_observation_stands_beside_the_next_first_one():
    rows = play(make_vec(GAME, 3, 1), 400)
    ended = 0
    for obs, _, step in rows:
        done = step.terminated | step.truncated
        for env in range(3):
            assert np.array_equal(step.final_obs[env][:3], obs[env][1:])  # a step adds one frame
            if done[env]:
                assert not step.obs[env][:3].any() and not np.array_equal(step.obs[env], step.final_obs[env])
                ended += 1
            else:
                assert np.array_equal(step.obs[env], step.final_obs[env])
    assert ended >= 3


def test_a_lost_life_ends_no_game():
    """Episodic lives change `terminated` alone: the same steps, the same episodes."""
    whole, lives = make_vec(GAME, 2, 3), make_vec(GAME, 2, 3, env_kwargs={"episodic_life": True})
    marks = np.zeros(2)
    for (_, _, expected), (_, _, got) in zip(play(whole, 600), play(lives, 600), strict=True):
        assert_same(expected, got._replace(terminated=expected.terminated))
        assert (got.terminated | ~expected.terminated).all()
        marks += got.terminated
    episodes = whole.pop_episodes()
    assert episodes == lives.pop_episodes() and len(episodes) >= 4
    assert marks.sum() >= 5 * len(episodes)  # five lives to a game


def test_a_cut_game_is_truncated_and_shows_its_last_frames():
    envs = make_vec(GAME, 2, 0, env_kwargs={"max_episode_steps": 3, "episodic_life": True})
    rows = play(envs, 8)  # eight steps are eight transitions
    assert [t for t, (_, _, step) in enumerate(rows) if step.truncated.any()] == [2, 5]
    for obs, _, step in rows:
        assert np.array_equal(step.final_obs[:, :3], obs[:, 1:]) and not step.terminated.any()
    assert envs.pop_episodes() == [(0.0, 3)] * 4


def test_returns_are_the_games_own_and_whole():
    """SpaceInvaders pays 5 to 30 for a hit: rewards are not clipped."""
    envs = make_vec("ALE/SpaceInvaders-v5", 2, 0, env_kwargs={"episodic_life": True})
    rows, total, episodes = play(envs, 700), np.zeros(2), []
    for _, _, step in rows:
        total += step.reward
        assert np.array_equal(step.episode_return, total)
        new = step.episode_length > 1
        over = np.array([not np.array_equal(step.obs[i], step.final_obs[i]) for i in range(2)]) & new
        episodes += total[over].tolist()
        total[over] = 0
    assert max(step.reward.max() for _, _, step in rows) >= 10
    assert [r for r, _ in envs.pop_episodes()] == episodes and len(episodes) >= 1


# Seeds, threads, resume


def test_seeds_reach_everything_and_threads_change_nothing():
    kwargs = {"repeat_action_probability": 0.25}
    one, two = (make_vec(GAME, 3, 7, threads=threads, env_kwargs=kwargs) for threads in (1, 2))
    for (_, _, a), (_, _, b) in zip(play(one, 150), play(two, 150), strict=True):
        assert_same(a, b)

    def tenth(stream):
        envs = make_vec(GAME, 6, 7, stream=stream)
        envs.reset()
        return [envs.step(np.zeros(6, np.int64)).obs for _ in range(10)][-1]

    frames = tenth(TRAIN_STREAM)
    # sub-environments start differently: six of thirty possible beginnings, of which two may be equal
    assert len({frames[env].tobytes() for env in range(6)}) >= 5
    assert not np.array_equal(frames, tenth(EVAL_STREAM))
    sticky, plain = play(one, 60), play(make_vec(GAME, 3, 7), 60)
    assert any(not np.array_equal(a.obs, b.obs) for (_, _, a), (_, _, b) in zip(sticky, plain, strict=True))


def test_steps_are_never_written_again():
    envs = make_vec(GAME, 2, 0)
    rows = play(envs, 50)
    copies = [[x.copy() for x in step] for _, _, step in rows]
    for _ in range(50):
        envs.step(sample(envs))
    for (_, _, step), copy in zip(rows, copies, strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(step, copy, strict=True))


def test_a_cut_starts_games_that_depend_on_the_step_alone_and_resumes_there():
    envs = make_vec(GAME, 2, 5, env_kwargs={"repeat_action_probability": 0.25})
    envs.reset()
    for _ in range(200):
        envs.step(sample(envs))
    obs = envs.cut(1024)
    assert envs.cut_episodes == 2
    state = through_json(envs.state_dict())
    actions = [sample(envs) for _ in range(150)]
    steps = [envs.step(action) for action in actions]
    assert steps[0].episode_length.tolist() == [1, 1]
    resumed = make_vec(GAME, 2, 5, threads=1, env_kwargs={"repeat_action_probability": 0.25})
    resumed.load_state_dict(state)
    for action, expected in zip(actions, steps, strict=True):
        assert np.array_equal(action, sample(resumed))
        assert_same(expected, resumed.step(action))
    assert resumed.cut_episodes == 2
    assert np.array_equal(resumed.cut(1024), obs) and not np.array_equal(resumed.cut(2048), obs)
    with pytest.raises(ValueError, match="the saved state has 2 environments, this run has 3"):
        make_vec(GAME, 3, 5).load_state_dict(state)


def test_evaluation_repeats_and_counts_whole_games():
    envs = make_vec("ALE/Pong-v5", 2, 0, stream=EVAL_STREAM, env_kwargs={"max_episode_steps": 200})
    returns, lengths = run_episodes(envs, lambda obs: np.zeros(2, np.int64))
    assert lengths.tolist() == [200, 200] and (returns < 0).all()
    assert np.array_equal(run_episodes(envs, lambda obs: np.zeros(2, np.int64))[0], returns)


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are listed on Linux only")
def test_closing_ends_the_threads():
    gc.collect()
    before = len(os.listdir("/proc/self/task"))
    envs = make_vec(GAME, 3, 0, threads=2)
    envs.reset()
    assert len(os.listdir("/proc/self/task")) > before
    envs.close()
    envs.close()  # a second time does no harm
    time.sleep(0.05)
    assert len(os.listdir("/proc/self/task")) == before
