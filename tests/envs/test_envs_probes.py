"""The probes do what their table says, and their closed-form values follow from it."""

import numpy as np
import pytest

from cleanrl_zoo.envs import make_vec, run_episodes


def play(name, actions):
    """[(obs, reward, next obs, terminated, truncated)] of one environment under these actions."""
    envs = make_vec(f"probe/{name}-v0", 1, seed=0)
    dtype = envs.single_action_space.dtype
    obs, rows = envs.reset(), []
    for action in actions:
        step = envs.step(np.array([action], dtype))
        flags = bool(step.terminated[0]), bool(step.truncated[0])
        rows.append((obs.item(), step.reward[0], step.final_obs.item(), *flags))
        obs = step.obs
    return rows


@pytest.mark.parametrize("kind, action", [("", 0), ("Continuous", [0.3])])
def test_loop_pays_one_until_it_is_cut(kind, action):
    rows = play(f"Loop{kind}", [action] * 20)
    assert rows == ([(0.0, 1.0, 0.0, False, False)] * 9 + [(0.0, 1.0, 0.0, False, True)]) * 2


@pytest.mark.parametrize("kind, action", [("", 1), ("Continuous", [-0.3])])
def test_delay_pays_on_the_second_step(kind, action):
    rows = play(f"Delay{kind}", [action] * 4)
    assert rows == [(0.0, 0.0, 1.0, False, False), (1.0, 1.0, 2.0, True, False)] * 2


@pytest.mark.parametrize("kind, action", [("", 1), ("Continuous", [0.5])])
def test_cue_pays_what_it_shows(kind, action):
    rows = play(f"Cue{kind}", [action] * 50)
    assert all(row == (row[0], row[0], row[0], True, False) for row in rows)
    assert {row[0] for row in rows} == {-1.0, 1.0}


def test_choice_pays_by_the_action_alone():
    assert [row[1] for row in play("Choice", [0, 1, 0])] == [-1.0, 1.0, -1.0]
    # 1 − (a − ½)²: at −½ it is 0, at ½ 1, at 1 ¾
    assert [row[1] for row in play("ChoiceContinuous", [[-0.5], [0.5], [1.0]])] == [0.0, 1.0, 0.75]


def test_match_pays_by_action_and_cue():
    for cue, reward, *_ in play("Match", [1] * 30):
        assert reward == cue
    for cue, reward, *_ in play("Match", [0] * 30):
        assert reward == -cue
    for cue, reward, *_ in play("MatchContinuous", [[0.5]] * 30):
        assert reward == (1.0 if cue == 1.0 else 0.0)  # 1 − (½ + ½)² = 0


@pytest.mark.parametrize("kind, action", [("", 0), ("Continuous", [0.0])])
def test_count_has_no_phantom_transition(kind, action):
    # limit 3, 8 vector steps: 8 transitions, each next = obs + 1, episodes end at steps 3 and 6
    rows = play(f"Count{kind}", [action] * 8)
    assert [row[0] for row in rows] == [0, 1, 2, 0, 1, 2, 0, 1]
    assert all(row[2] == row[0] + 1 and row[1] == 1.0 and not row[3] for row in rows)
    assert [t + 1 for t, row in enumerate(rows) if row[4]] == [3, 6]


@pytest.mark.parametrize("gamma", [0.5, 0.9])
def test_iterating_the_bellman_equation_reaches_the_tables_values(gamma):
    # V(obs) <- r + γ (1 − terminated) V(next): a cut episode bootstraps from its last observation
    known = {"Loop": {0.0: 1 / (1 - gamma)}, "Delay": {0.0: gamma, 1.0: 1.0}, "Cue": {-1.0: -1.0, 1.0: 1.0}}
    for name, expected in known.items():
        rows, values = play(name, [0] * 60), dict.fromkeys((0.0, 1.0, 2.0, -1.0), 0.0)
        for _ in range(20):
            for obs, reward, next_obs, terminated, _ in rows:
                values[obs] = reward + gamma * (1 - terminated) * values[next_obs]
        assert {obs: values[obs] for obs in expected} == pytest.approx(expected, abs=1e-9), name


def test_an_episode_without_end_is_cut_for_evaluation():
    """Count earns 1 a step; without its time limit it never ends, and what it has earned by then counts."""
    envs = make_vec("probe/Count-v0", 2, 0, env_kwargs={"max_episode_steps": 10**9})
    returns, lengths = run_episodes(envs, lambda obs: np.zeros(2, np.int64), max_steps=50)
    assert returns.tolist() == [50.0, 50.0] and lengths.tolist() == [50, 50]
