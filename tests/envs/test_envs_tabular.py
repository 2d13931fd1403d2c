"""The textbook's worlds: their exact values, the engine that steps them as arrays, and what a user may get wrong."""

import json

import gymnasium
import numpy as np
import pytest
import torch

from cleanrl_zoo.envs import EVAL_STREAM, make_vec
from cleanrl_zoo.envs import tabular as tb

WORLDS = tuple(f"textbook/{name}-v0" for name in tb.WORLDS)
TOY_TEXT = ("FrozenLake-v1", "FrozenLake8x8-v1", "CliffWalking-v1", "CliffWalkingSlippery-v1", "Taxi-v4")


def start_value(name: str, gamma: float = 1.0) -> float:
    model = tb.world(name).models[0]
    return float(tb.optimal_values(model, gamma) @ model.start)


# Models and their values


@pytest.mark.parametrize("env_id", (*WORLDS, *TOY_TEXT))
def test_probabilities_sum_to_one(env_id):
    for model in make_vec(env_id, 1, 0).world.models:
        assert model.probs.sum(-1) == pytest.approx(1.0) and (model.probs >= 0).all()
        assert model.start.sum() == pytest.approx(1.0)
        ends = (model.probs * model.terminated).sum(-1)
        assert tb.transition_tensor(model).sum(-1) == pytest.approx(1.0 - ends)


def test_random_walks_have_linear_values():
    # V(k) = k/6 with 0 and 1 at the ends; with −1 and 1 at the ends of 19 states V(k) = (k − 10)/10
    evenly = np.full((7, 2), 0.5)
    assert tb.policy_values(tb.world("RandomWalk5").models[0], evenly, 1.0)[1:6] * 6 == pytest.approx([1, 2, 3, 4, 5])
    values = tb.policy_values(tb.world("RandomWalk19").models[0], np.full((21, 2), 0.5), 1.0)
    assert values[1:20] == pytest.approx(np.arange(-9, 10) / 10, abs=1e-12)


@pytest.mark.parametrize(
    "name, gamma, value",
    [
        ("CliffWalking", 1.0, -13.0),  # up, eleven to the right, down
        ("WindyGridworld", 1.0, -15.0),  # example 6.5
        ("WindyGridworldKings", 1.0, -7.0),  # exercise 6.9
        ("DynaMaze", 0.95, 0.95**13),  # fourteen steps, the last one is paid
        ("BlockingMaze", 0.95, 0.95**9),  # ten by the gap at the right
        ("ShortcutMaze", 0.95, 0.95**15),  # sixteen by the gap at the left
        ("MaximizationBias", 1.0, 0.0),  # right
    ],
)
def test_optimal_values(name, gamma, value):
    assert start_value(name, gamma) == pytest.approx(value, abs=1e-9)


def test_a_maze_after_its_change():
    for name, steps in (("BlockingMaze", 16), ("ShortcutMaze", 10)):
        after = tb.world(name).models[1]
        assert tb.optimal_values(after, 0.95) @ after.start == pytest.approx(0.95 ** (steps - 1))


def test_blackjack_by_the_textbook():
    envs = make_vec("textbook/Blackjack-v0", 1, 0)
    model = tb.exact_model(envs)
    values = tb.policy_values(model, tb.named_policy(envs, "stick20"), 1.0)
    assert values[(10 + 13 - 12) * 10 + 2 - 1] == pytest.approx(-0.27726, abs=2e-4)  # example 5.4, from 10⁸ episodes
    # a 20 that sticks against a six wins unless the dealer gets 20 or 21
    last = tb._dealer(*tb._draw(0, False, 6))
    assert sum(last.values()) == pytest.approx(1.0)
    assert values[(20 - 12) * 10 + 6 - 1] == pytest.approx(1.0 - last[20] - 2 * last[21])
    assert last[0] == pytest.approx(0.4232, abs=1e-4)  # a six goes bust in 42.3 % of the games
    optimal = tb.greedy_policy(tb.action_values(model, tb.optimal_values(model, 1.0), 1.0))
    hard, usable = optimal.argmax(1).reshape(2, 10, 10)  # figure 5.2: 1 hits
    assert usable[:, 0].tolist() == [1] * 7 + [0] * 3  # against an ace
    assert hard[:, 1].tolist() == [1] + [0] * 9 and hard[:, 6].tolist() == [1] * 5 + [0] * 5  # deuce, seven


def test_frozen_lake_is_won_in_74_of_100_within_its_limit():
    envs = make_vec("FrozenLake-v1", 1, 0)
    policy = tb.named_policy(envs, "optimal")
    assert tb.policy_values(tb.exact_model(envs), policy, 1.0, horizon=100)[0] == pytest.approx(0.7402, abs=1e-4)
    assert tb.policy_values(tb.exact_model(envs), policy, 1.0)[0] == pytest.approx(14 / 17)  # without one


def test_values_under_a_horizon_count_that_many_rewards():
    left = np.tile([1.0, 0.0], (21, 1))
    model = tb.world("RandomWalk19").models[0]
    assert tb.policy_values(model, left, 1.0, horizon=9)[10] == 0.0  # ten steps from the end
    assert tb.policy_values(model, left, 1.0, horizon=10)[10] == -1.0


def test_values_that_are_not_finite_are_refused():
    up = np.tile([1.0, 0, 0, 0], (48, 1))
    with pytest.raises(ValueError, match="an episode may never end; give gamma below 1"):
        tb.policy_values(tb.world("CliffWalking").models[0], up, 1.0)
    assert tb.policy_values(tb.world("CliffWalking").models[0], up, 0.9)[36] == pytest.approx(-10.0)


def test_wind_lifts_by_the_column_that_is_left():
    model = tb.world("WindyGridworld").models[0]
    place = lambda row, column: row * 10 + column  # noqa: E731
    assert model.next_state[place(3, 3), 1, 0] == place(2, 4)  # right, wind 1
    assert model.next_state[place(3, 2), 1, 0] == place(3, 3)  # wind 0, though the next column has 1
    assert model.next_state[place(5, 6), 2, 0] == place(4, 6)  # down, wind 2
    stochastic = tb.world("WindyGridworldStochastic").models[0]
    found = dict(zip(stochastic.next_state[place(3, 3), 1], stochastic.probs[place(3, 3), 1], strict=True))
    assert found == pytest.approx({place(3, 4): 1 / 3, place(2, 4): 1 / 3, place(1, 4): 1 / 3})
    assert stochastic.probs[place(3, 0), 1].max() == 1.0  # no wind, nothing random


def test_the_cliff_costs_100_and_does_not_end_the_episode():
    model = tb.world("CliffWalking").models[0]
    assert (model.next_state[36, 1, 0], model.reward[36, 1, 0], model.terminated[36, 1, 0]) == (36, -100.0, False)
    assert (model.next_state[35, 2, 0], model.reward[35, 2, 0], model.terminated[35, 2, 0]) == (47, -1.0, True)


# The engine


@pytest.mark.parametrize("env_id", WORLDS)
def test_both_engines_give_the_same_numbers_through_resets(env_id):
    kwargs = {"max_episode_steps": 12}
    reference = make_vec(env_id, 3, 4, vec="gymnasium", env_kwargs=kwargs)
    arrays = make_vec(env_id, 3, 4, env_kwargs=kwargs)
    assert (reference.engine, arrays.engine) == ("gymnasium", "tabular")
    assert arrays.single_observation_space == reference.single_observation_space
    assert arrays.single_action_space == reference.single_action_space
    assert arrays.max_episode_steps == reference.max_episode_steps == 12
    assert np.array_equal(reference.reset(), arrays.reset())
    rng, ended = np.random.default_rng(0), 0
    for _ in range(60):
        actions = rng.integers(arrays.single_action_space.n, size=3)
        expected, got = reference.step(actions), arrays.step(actions)
        for name, x, y in zip(expected._fields, expected, got, strict=True):
            assert np.array_equal(x, y), name
        ended += (got.terminated | got.truncated).sum()
    assert ended >= 9 and reference.pop_episodes() == arrays.pop_episodes()


def through_json(state):
    if isinstance(state, dict):
        return {key: through_json(value) for key, value in state.items()}
    if isinstance(state, list):
        return [through_json(value) for value in state]
    return state.copy() if isinstance(state, np.ndarray) else json.loads(json.dumps(state))


@pytest.mark.parametrize("env_id", (*WORLDS, "FrozenLake-v1"))
def test_a_restored_engine_continues_bit_for_bit(env_id):
    envs = make_vec(env_id, 4, 1)
    assert envs.exact_state
    envs.reset()
    rng = np.random.default_rng(1)
    actions = rng.integers(envs.single_action_space.n, size=(1300, 4))
    for action in actions[:700]:
        envs.step(action)
    state = through_json(envs.state_dict())
    steps = [envs.step(action) for action in actions[700:]]  # over the end of a block, and of a maze's change
    episodes = envs.pop_episodes()
    other = make_vec(env_id, 4, 2)
    other.load_state_dict(state)
    for action, expected in zip(actions[700:], steps, strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(expected, other.step(action), strict=True))
    assert other.pop_episodes() == episodes
    with pytest.raises(ValueError, match="the saved state has 4 environments, this run has 3"):
        make_vec(env_id, 3, 0).load_state_dict(state)


def test_an_environment_is_the_same_among_few_and_many():
    few, many = make_vec("textbook/Blackjack-v0", 2, 7), make_vec("textbook/Blackjack-v0", 50, 7)
    assert np.array_equal(few.reset(), many.reset()[:2])
    for _ in range(300):
        one, two = few.step(np.ones(2, int)), many.step(np.ones(50, int))
        assert all(np.array_equal(x, y[:2]) for x, y in zip(one, two, strict=True))
    other = make_vec("textbook/Blackjack-v0", 50, 7, stream=EVAL_STREAM)
    assert (other.reset() != make_vec("textbook/Blackjack-v0", 50, 7).reset()).mean() > 0.8  # nor any stream's
    assert len(set(many.step(np.ones(50, int)).obs.tolist())) > 10


def test_a_limit_truncates_and_the_last_observation_is_the_true_one():
    envs = make_vec("textbook/RandomWalk19-v0", 2, 0, env_kwargs={"max_episode_steps": 3})
    assert envs.reset().tolist() == [10, 10]
    steps = [envs.step(np.array([1, 0])) for _ in range(4)]
    assert [step.obs.tolist() for step in steps] == [[11, 9], [12, 8], [10, 10], [11, 9]]
    assert steps[2].final_obs.tolist() == [13, 7] and steps[2].truncated.all() and not steps[2].terminated.any()
    assert envs.pop_episodes() == [(0.0, 3), (0.0, 3)]


def test_a_maze_changes_by_the_steps_of_its_life_not_of_the_episode():
    envs = make_vec("textbook/BlockingMaze-v0", 1, 0, env_kwargs={"max_episode_steps": 10})
    envs.reset()
    below = 4 * 9 + 8  # under the gap at the right
    for life in range(1100):
        envs._state = np.array([below])
        moved = int(envs.step(np.array([0])).final_obs[0])
        assert moved == (below - 9 if life < 1000 else below)


def greedy_act(model):
    actions = tb.action_values(model, tb.optimal_values(model, 0.95), 0.95).argmax(1)
    return lambda obs: actions[obs]


@pytest.mark.parametrize("vec", ["tabular", "gymnasium"])
@pytest.mark.parametrize("name, change, steps", [("BlockingMaze", 1000, (10, 16)), ("ShortcutMaze", 3000, (16, 10))])
def test_an_evaluation_has_the_world_as_it_is_by_then(vec, name, change, steps):
    envs, play = tb.make_tabular(f"textbook/{name}-v0", 3, 2, 0, vec)
    before, after = map(greedy_act, tb.known_world(envs).models)
    # one step before the change the maze is still the first, and stays it for the whole way
    for global_step, act, length in ((0, before, steps[0]), (3 * change - 1, before, steps[0]),
                                     (3 * change, after, steps[1]), (9 * change, after, steps[1])):  # fmt: skip
        returns, lengths = play(act, global_step)
        assert returns.tolist() == [1.0, 1.0] and lengths.tolist() == [length, length]
    # the training environments did not move
    assert envs.state_dict()["elapsed"].tolist() == [0, 0, 0] and envs.pop_episodes() == []


def test_a_way_that_is_closed_by_then_leads_nowhere():
    envs, play = tb.make_tabular("textbook/BlockingMaze-v0", 1, 1, 0)
    before, after = map(greedy_act, tb.known_world(envs).models)
    for act, global_step in ((before, 1000), (after, 999)):
        returns, lengths = play(act, global_step)
        assert returns.tolist() == [0.0] and lengths.tolist() == [tb.LIMIT]


def test_the_world_of_an_evaluation_is_named():
    maze, still = make_vec("textbook/BlockingMaze-v0", 2, 0), make_vec("textbook/DynaMaze-v0", 2, 0)
    assert [tb.present_world(maze, step) for step in (0, 1999, 2000, 2001)] == [{"changes": k} for k in (0, 0, 1, 1)]
    assert tb.present_world(still, 9000) == tb.present_world(make_vec("CartPole-v1", 1, 0), 9000) == {}
    fixed = make_vec("textbook/BlockingMaze-v0", 2, 0, env_kwargs={"changes": 1})
    assert fixed.world.changes == () and tb.exact_model(fixed) is maze.world.models[1]


def test_outcomes_come_as_often_as_the_model_says():
    envs = make_vec("FrozenLake-v1", 8000, 3)
    model = tb.exact_model(envs)
    envs.reset()
    envs._state = np.full(8000, 9)
    found = np.bincount(envs.step(np.full(8000, 1)).final_obs, minlength=16) / 8000  # down from 9: 8, 13 or 10
    expected = np.bincount(model.next_state[9, 1], model.probs[9, 1], minlength=16)
    assert found == pytest.approx(expected, abs=5 * (1 / 3 * 2 / 3 / 8000) ** 0.5)
    assert set(np.flatnonzero(found)) == {8, 10, 13}


def test_first_states_come_as_often_as_the_model_says():
    envs = make_vec("textbook/Blackjack-v0", 8000, 3)
    start = tb.exact_model(envs).start
    found = np.bincount(envs.reset(), minlength=200) / 8000
    assert (np.abs(found - start) <= 5 * np.sqrt(start * (1 - start) / 8000) + 1e-9).all()
    # a soft 12 is two aces, and the dealer shows a third: 1/13³; a soft 21 with an ace against it is an ace and a ten,
    # 2·4/13³, or 10 in two cards or three, drawn to by an ace
    assert start[100] == pytest.approx(13**-3) and start[190] > 8 * 13**-3


def test_the_reward_of_b_is_normal_around_minus_a_tenth():
    envs = make_vec("textbook/MaximizationBias-v0", 8000, 5)
    envs.reset()
    first = envs.step(np.zeros(8000, int))
    assert (first.reward == 0).all() and (first.obs == 1).all()
    rewards = envs.step(np.arange(8000) % 10).reward
    assert rewards.mean() == pytest.approx(-0.1, abs=5 / 8000**0.5) and rewards.std() == pytest.approx(1.0, abs=0.04)
    assert tb.allowed_actions(envs).sum(1).tolist() == [2, 10, 10]


def test_steps_are_never_written_again():
    envs = make_vec("textbook/Blackjack-v0", 5, 0)
    first = envs.reset()
    before = first.copy()
    steps = [envs.step(np.ones(5, int)) for _ in range(20)]
    copies = [[array.copy() for array in step] for step in steps]
    for _ in range(20):
        envs.step(np.ones(5, int))
    assert np.array_equal(first, before)
    assert all(np.array_equal(x, y) for s, c in zip(steps, copies, strict=True) for x, y in zip(s, c, strict=True))


# Which engine, and what is refused


def test_auto_takes_arrays_where_the_model_is_known():
    for env_id in TOY_TEXT:
        assert make_vec(env_id, 1, 0).engine == make_vec(env_id, 1, 0, vec="tabular").engine == "tabular"
    assert make_vec("FrozenLake-v1", 1, 0).max_episode_steps == 100
    easy = make_vec("FrozenLake-v1", 1, 0, env_kwargs={"is_slippery": False})
    assert easy.engine == "tabular" and tb.optimal_values(tb.exact_model(easy), 1.0)[0] == 1.0
    assert make_vec("Taxi-v4", 1, 0, env_kwargs={"fickle_passenger": True}).engine == "gymnasium"
    assert make_vec("CartPole-v1", 1, 0).engine == "gymnasium"
    assert make_vec("FrozenLake-v1", 1, 0, vec="gymnasium").engine == "gymnasium"


def test_a_tuple_of_discrete_observations_is_one_number():
    envs = make_vec("Blackjack-v1", 3, 0)
    assert envs.engine == "gymnasium" and envs.single_observation_space == gymnasium.spaces.Discrete(32 * 11 * 2)
    env = gymnasium.make("Blackjack-v1")
    seeds = tb.env_seeds(0, 0, 3)
    by_hand = [np.ravel_multi_index(list(map(int, env.reset(seed=seed)[0])), (32, 11, 2)) for seed in seeds]
    assert envs.reset().tolist() == by_hand
    step = envs.step(np.zeros(3, int))
    assert step.terminated.all() and step.obs.dtype == step.final_obs.dtype == np.int64


class Mixed(gymnasium.Env):
    observation_space = gymnasium.spaces.Tuple([gymnasium.spaces.Discrete(3), gymnasium.spaces.Box(0, 1, (2,))])
    action_space = gymnasium.spaces.Discrete(2)


def test_what_a_table_cannot_hold_is_refused_in_one_line():
    gymnasium.register("test/Mixed-v0", Mixed)
    try:
        with pytest.raises(ValueError, match="test/Mixed-v0 observes a Tuple space"):
            make_vec("test/Mixed-v0", 1, 0)
    finally:
        del gymnasium.registry["test/Mixed-v0"]
    for env_id in ("CartPole-v1", "Pendulum-v1"):
        with pytest.raises(ValueError, match="a table needs both to be Discrete") as caught:
            tb.check_tabular(make_vec(env_id, 1, 0))
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="CartPole-v1 has no model that is known"):
        make_vec("CartPole-v1", 1, 0, vec="tabular")
    with pytest.raises(ValueError, match=r"actions have shape \(1,\), textbook/DynaMaze-v0 takes \(2,\)"):
        envs = make_vec("textbook/DynaMaze-v0", 2, 0)
        envs.step(np.zeros(1, int))


def test_policies_by_name():
    walk, game = make_vec("textbook/RandomWalk5-v0", 1, 0), make_vec("textbook/Blackjack-v0", 1, 0)
    assert (tb.named_policy(walk, "random") == 0.5).all()
    assert tb.named_policy(walk, "optimal")[1:6].tolist() == [[0.0, 1.0]] * 5
    assert tb.named_policy(game, "stick20")[:, 1].reshape(2, 10, 10)[0, :, 0].tolist() == [1.0] * 8 + [0.0] * 2
    with pytest.raises(ValueError, match="--policy stick20: textbook/RandomWalk5-v0 has random, optimal$"):
        tb.named_policy(walk, "stick20")
    with pytest.raises(ValueError, match="--behavior best: Blackjack-v1 has random$"):
        tb.named_policy(make_vec("Blackjack-v1", 1, 0), "best", "behavior")


def test_error_against_the_exact_values_counts_occupied_states():
    envs = make_vec("textbook/RandomWalk5-v0", 2, 0)
    error = tb.value_error(envs, tb.named_policy(envs, "random"), 1.0)
    exact = torch.arange(7) / 6
    off = torch.stack([exact + 0.5, exact])
    off[:, [0, 6]] = 100.0  # the ends have no values
    assert float(error(off)) == pytest.approx(0.25)
    assert tb.value_error(make_vec("Blackjack-v1", 1, 0), np.full((704, 2), 0.5), 1.0) is None
    maze = make_vec("textbook/BlockingMaze-v0", 1, 0)  # whose values change with it
    assert tb.value_error(maze, tb.named_policy(maze, "random"), 0.95) is None


def test_a_small_grid_is_shown():
    envs = make_vec("textbook/CliffWalking-v0", 1, 0)
    values = tb.optimal_values(tb.exact_model(envs), 1.0)
    text = tb.show(envs, values, tb.greedy_policy(tb.action_values(tb.exact_model(envs), values, 1.0)))
    rows = [row.split() for row in text.splitlines()]
    assert len(rows) == 4 and rows[2][0] == "-12.00→" and rows[2][-1] == "-1.00↓"
    assert rows[3] == ["-13.00↑", *["·"] * 11]
    assert "usable ace:" in tb.show(make_vec("textbook/Blackjack-v0", 1, 0), np.zeros(200), np.full((200, 2), 0.5))
    assert tb.show(make_vec("Taxi-v4", 1, 0), np.zeros(500), np.full((500, 6), 1 / 6)).count("\n") == 49


def test_the_model_is_known_whichever_engine_steps():
    """A world whose actions differ between states is the same task on Gymnasium's engine."""
    one, other = (make_vec("textbook/MaximizationBias-v0", 2, 0, vec) for vec in ("tabular", "gymnasium"))
    assert (tb.allowed_actions(one) == tb.allowed_actions(other)).all() and not tb.allowed_actions(other).all()
    assert tb.exact_model(make_vec("FrozenLake-v1", 1, 0, "gymnasium")) is not None
    assert tb.exact_model(make_vec("CartPole-v1", 1, 0)) is None
