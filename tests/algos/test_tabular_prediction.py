"""Prediction on tables: numbers worked by hand, the textbook's identities, convergence to the exact values.

The episode by hand: states 0, 1, 0, end; rewards 1, 2, 3; γ = ½, α = ½, values 2 and 4 at first.
"""

import numpy as np
import pytest
import torch
from algo_helpers import load_algorithm
from tabular_helpers import LOOP, begin, beside, episode

from cleanrl_zoo.data.episodes import EpisodeBatch, Episodes, side_by_side
from cleanrl_zoo.envs import make_vec
from cleanrl_zoo.envs.tabular import named_policy, policy_values, world

RANDOM_WALK_19 = "textbook/RandomWalk19-v0"
HAND = ([0, 1, 0], [1.0, 2.0, 3.0])
CUT = dict(terminated=False, last=1)  # the same, cut by a time limit in state 1

# How each method learns, and the values after the episode by hand.
GOLDEN = {
    # 0: target 1 + ½·4 = 3, 2 → 2.5;  1: 2 + ½·2.5 = 3.25, 4 → 3.625;  0: 3, 2.5 → 2.75
    "td": (dict(), [2.75, 3.625], None),
    # 0: 1 + 1 + ¼·2 = 2.5, → 2.25;  1: 2 + 1.5 = 3.5, → 3.75;  0: 3, → 2.625
    # cut: 1: 3.5 + ¼·V(1) = 4.5, → 4.25;  0: the window shortens, 3 + ½·4.25 = 5.125, 2.25 → 3.6875
    "td n=2": (dict(n=2), [2.625, 3.75], [3.6875, 4.25]),
    # 0: 1 + 1 + ¾ = 2.75, → 2.375;  1: 3.5, → 3.75;  0: 3, → 2.6875
    "td n=10": (dict(n=10), [2.6875, 3.75], None),
    # λ = ½, V as before: G₂ = 3, G₁ = 2 + ½(½·2 + ½·3) = 3.25, G₀ = 1 + ½(½·4 + ½·3.25) = 2.8125
    # 0: → 2.40625;  1: → 3.625;  0: → 2.703125
    # cut: G₂ = 3 + ½·4 = 5, G₁ = 2 + ½(1 + 2.5) = 3.75, G₀ = 1 + ½(2 + 1.875) = 2.9375; 2.46875, 3.875, 3.734375
    "lambda_return": (dict(method="lambda_return", trace_decay=0.5), [2.703125, 3.625], [3.734375, 3.875]),
    # γλ = ¼.  δ = 1, z = (1, 0): 2.5;  δ = 2 + 1.25 − 4 = −¾, z = (¼, 1): 2.40625, 3.625;
    # δ = 3 − 2.40625 = 0.59375, z = (1 + 1/16, ¼): + 0.296875 z
    "accumulating": (
        dict(method="td_lambda", trace="accumulating", trace_decay=0.5), [2.7216796875, 3.69921875], None
    ),
    # as before, but z = (1, ¼) at the end
    "replacing": (dict(method="td_lambda", trace="replacing", trace_decay=0.5), [2.703125, 3.69921875], None),
    # z(0) = 1/16 + 1 − ½·1/16 = 1.03125;  α(δ + V − V_old) = ½(0.59375 + 2.40625 − 2.5) = ¼: 2.6640625, 3.6875;
    # − α(V − V_old) = 0.046875 at 0
    "dutch": (dict(method="td_lambda", trace="dutch", trace_decay=0.5), [2.7109375, 3.6875], None),
}  # fmt: skip


def learned(batch, first=((2.0, 4.0),), **flags):
    td, args, _, state = begin("td_prediction", "textbook/RandomWalk5-v0", len(first), gamma=0.5, **flags)
    state.values = torch.tensor(first, dtype=torch.float64)
    args.learning_rate = 0.5
    td.update(state, batch, args)
    return state.values


@pytest.mark.parametrize("flags, values, cut_values", GOLDEN.values(), ids=GOLDEN)
def test_an_episode_by_hand(flags, values, cut_values):
    assert learned(episode(*HAND), **flags).tolist() == [pytest.approx(values, abs=1e-12)]
    if cut_values:
        assert learned(episode(*HAND, **CUT), **flags).tolist() == [pytest.approx(cut_values, abs=1e-12)]


def test_truncation_bootstraps_and_termination_does_not():
    # one step in 0 with reward 3: 2 → 2.5 where it ended, 3 + ½·4 = 5 → 3.5 where it was cut in state 1
    for flags in (
        dict(),
        dict(n=4),
        dict(method="lambda_return"),
        *(dict(method="td_lambda", trace=t) for t in TRACES),
    ):
        assert learned(episode([0], [3.0]), **flags)[0, 0] == 2.5
        assert learned(episode([0], [3.0], **CUT), **flags)[0, 0] == 3.5


TRACES = ("accumulating", "replacing", "dutch")


@pytest.mark.parametrize("flags", [flags for flags, *_ in GOLDEN.values()], ids=GOLDEN)
def test_many_runs_side_by_side_are_many_single_runs(flags):
    rng, firsts, episodes = np.random.default_rng(0), [], []
    for run in range(5):
        length = int(rng.integers(1, 9))
        states, rewards = rng.integers(0, 4, length).tolist(), rng.normal(size=length).tolist()
        episodes.append(episode(states, rewards, terminated=bool(run % 2), last=3, run=run))
        firsts.append(rng.normal(size=4).tolist())
    together = learned(beside(*episodes), firsts, **flags)
    alone = [
        learned(e._replace(runs=torch.tensor([0])), [f], **flags)[0] for e, f in zip(episodes, firsts, strict=True)
    ]
    assert torch.equal(together, torch.stack(alone))


def test_without_a_future_padding_still_changes_nothing():
    for flags in (dict(n=2), dict(method="lambda_return"), dict(method="td_lambda")):
        td, args, _, state = begin("td_prediction", "textbook/RandomWalk5-v0", 2, gamma=0.0, learning_rate=0.5, **flags)
        td.update(state, beside(episode([0], [2.0]), episode([0, 1, 2], [2.0, 4.0, 6.0], run=1)), args)
        assert state.values[:, :3].tolist() == [[1.0, 0.0, 0.0], [1.0, 2.0, 3.0]]


def test_only_the_runs_that_are_named_learn():
    values = learned(episode(*HAND, run=1), [[2.0, 4.0]] * 3)
    assert values[[0, 2]].tolist() == [[2.0, 4.0]] * 2 and values[1].tolist() == [2.75, 3.625]


def random_episode(seed):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 3, 12).tolist(), rng.normal(size=12).tolist()


@pytest.mark.parametrize("terminated", [True, False])
def test_true_online_td_is_the_online_lambda_return(terminated):
    """Section 12.4: at every step h, all updates of the episode are made anew with returns that look as far as h."""
    states, rewards = random_episode(1)
    after, lam, gamma, alpha, first = [*states[1:], 2], 0.7, 0.5, 0.5, [0.3, -1.0, 2.0]
    v_before = [np.array(first)]  # the values after horizon h
    for h in range(1, len(states) + 1):
        ends = terminated and h == len(states)
        v = np.array(first)
        for t in range(h):
            total, reward = 0.0, 0.0
            for n in range(1, h - t + 1):  # G_{t:t+n} with the values that horizon t + n − 1 left
                reward += gamma ** (n - 1) * rewards[t + n - 1]
                last = ends and t + n == h
                tail = 0.0 if last else gamma**n * v_before[t + n - 1][after[t + n - 1]]
                weight = lam ** (n - 1) * (1.0 if t + n == h else 1.0 - lam)
                total += weight * (reward + tail)
            v[states[t]] += alpha * (total - v[states[t]])
        v_before.append(v)
    batch = episode(states, rewards, terminated, last=2)
    found = learned(batch, [first], method="td_lambda", trace="dutch", trace_decay=lam)
    assert found[0].tolist() == pytest.approx(v_before[-1].tolist(), abs=1e-12)


@pytest.mark.parametrize("trace", TRACES)
def test_lambda_0_is_td_0_and_lambda_1_offline_is_monte_carlo(trace):
    batch, first = episode(*random_episode(2)), [[0.0, 1.0, -1.0]]
    td_0 = learned(batch, first)
    assert torch.allclose(learned(batch, first, method="td_lambda", trace=trace, trace_decay=0.0), td_0, atol=1e-12)
    whole = learned(batch, first, method="lambda_return", trace_decay=1.0)
    assert torch.allclose(learned(batch, first, n=100), whole, atol=1e-12)


# Monte Carlo


def averaged(*batches, env="textbook/RandomWalk5-v0", policy=None, **flags):
    mc, args, _, state = begin("mc_prediction", env, 1, gamma=0.5, **flags)
    policy = torch.ones(2, 2, dtype=torch.float64) if policy is None else policy
    state.values, state.weights = state.values[:, :2].clone(), state.weights[:, :2].clone()
    for batch in batches:
        mc.update(state, batch, policy, args)
    return state.values[0].tolist()


def test_first_and_every_visit_by_hand():
    # returns 1 + ½·3.5 = 2.75, 2 + ½·3 = 3.5 and 3; state 0 is visited twice
    assert averaged(episode(*HAND)) == pytest.approx([2.75, 3.5])
    assert averaged(episode(*HAND), visits="every") == pytest.approx([2.875, 3.5])
    # a second episode of return 5 in state 0
    again = episode([0], [5.0])
    assert averaged(episode(*HAND), again) == pytest.approx([(2.75 + 5) / 2, 3.5])
    assert averaged(episode(*HAND), again, visits="every") == pytest.approx([(2.75 + 3 + 5) / 3, 3.5])
    assert averaged(episode(*HAND), again, learning_rate=0.5) == pytest.approx([(1.375 + 5) / 2, 1.75])


def test_importance_weights_by_hand():
    # b evenly; π(·|0) = (¾, ¼), π(·|1) = (½, ½); actions 0, 1, 0: ρ = 1.5·1·1.5 = 2.25, 1·1.5, 1.5
    policy = torch.tensor([[0.75, 0.25], [0.5, 0.5]], dtype=torch.float64)
    batch = episode(*HAND, actions=[0, 1, 0], probs=[0.5] * 3)
    every = dict(policy=policy, visits="every")
    ordinary = averaged(batch, importance="ordinary", **every)
    assert ordinary == pytest.approx([(2.25 * 2.75 + 1.5 * 3) / 2, 1.5 * 3.5])
    weighted = averaged(batch, importance="weighted", **every)
    assert weighted == pytest.approx([(2.25 * 2.75 + 1.5 * 3) / 3.75, 3.5])
    assert averaged(batch, policy=policy, importance="ordinary") == pytest.approx([2.25 * 2.75, 5.25])
    # an action that π never takes: weight 0; ordinary counts the visit, weighted does not
    never = torch.tensor([[0.0, 1.0], [0.5, 0.5]], dtype=torch.float64)
    two = episode([0], [4.0], actions=[1], probs=[0.5]), batch  # ρ = 2, then 0
    assert averaged(*two, policy=never, importance="ordinary")[0] == pytest.approx(2 * 4 / 2)
    assert averaged(*two, policy=never, importance="weighted")[0] == pytest.approx(4.0)
    assert averaged(batch, policy=never, importance="weighted") == [0.0, 0.0]


def test_a_constant_step_with_ordinary_importance_sampling_by_hand():
    # as above, first visits: α ρ G = ½·2.25·2.75 and ½·1.5·3.5
    policy = torch.tensor([[0.75, 0.25], [0.5, 0.5]], dtype=torch.float64)
    batch = episode(*HAND, actions=[0, 1, 0], probs=[0.5] * 3)
    found = averaged(batch, policy=policy, importance="ordinary", behavior="right", learning_rate=0.5)
    assert found == pytest.approx([0.5 * 2.25 * 2.75, 0.5 * 1.5 * 3.5])


@pytest.mark.parametrize(
    "name, flags, error",
    [
        ("mc_prediction", dict(), (2.75 + 3.5) / 2),  # the second visit to state 0 is no update
        ("mc_prediction", dict(visits="every"), (2.75 + 3.5 + 0.25) / 3),  # which finds 2.75 there
        ("td_prediction", dict(), (1 + 2.25 + 2.5) / 3),  # 0: 1 − 0;  1: 2 + ½·½ − 0;  0: 3 − ½
        ("td_prediction", dict(n=10), (2.75 + 3.5 + 1.625) / 3),  # 0: 3 − ½·2.75 at the second visit
    ],
    ids=str,
)
def test_the_errors_of_the_updates_are_reported(name, flags, error):
    module, args, _, state = begin(name, "textbook/RandomWalk5-v0", 2, gamma=0.5, **flags)
    if name == "td_prediction":
        args.learning_rate = 0.5
    policy = [torch.ones(7, 2, dtype=torch.float64)] if name == "mc_prediction" else []
    report = module.update(state, episode(*HAND, run=1), *policy, args)
    assert report == {"losses/td_error": pytest.approx(error)}
    # with a shorter episode beside it, whose padding counts as little: 5 − 0
    module, args, _, state = begin(name, "textbook/RandomWalk5-v0", 2, gamma=0.5, **flags)
    if name == "td_prediction":
        args.learning_rate = 0.5
    batch = beside(episode([0], [5.0]), episode(*HAND, run=1))
    updates = 2 if flags == {} and name == "mc_prediction" else 3
    mean = (error * updates + 5) / (updates + 1)
    assert module.update(state, batch, *policy, args) == {"losses/td_error": pytest.approx(mean)}


def test_a_return_of_weight_0_is_no_update_to_report():
    # π never takes action 0: with weighted sampling nothing is learned from the episode, ordinary learns 0 from both
    never = torch.tensor([[0.0, 1.0]] * 7, dtype=torch.float64)
    batch = episode(*HAND, actions=[0, 0, 0], probs=[0.5] * 3)
    for importance, report in (("weighted", {}), ("ordinary", {"losses/td_error": 0.0})):
        module, args, _, state = begin("mc_prediction", "textbook/RandomWalk5-v0", 1, importance=importance)
        assert module.update(state, batch, never, args) == report
    # the last action is one of π's, ρ = 2: one update, 3 − 0
    batch = episode(*HAND, actions=[0, 0, 1], probs=[0.5] * 3)
    module, args, _, state = begin("mc_prediction", "textbook/RandomWalk5-v0", 1, visits="every")
    assert module.update(state, batch, never, args) == {"losses/td_error": 3.0}


def test_monte_carlo_learns_runs_side_by_side_as_alone():
    mc, args, _, state = begin("mc_prediction", "textbook/RandomWalk5-v0", 3, gamma=0.5, importance="weighted")
    policy = torch.tensor([[0.75, 0.25], [0.5, 0.5]] * 4, dtype=torch.float64)[:7]
    parts = [
        episode([0, 1, 0], [1.0, 2.0, 3.0], actions=[0, 1, 0], probs=[0.5] * 3, run=0),
        episode([2, 2], [1.0, 4.0], actions=[1, 0], probs=[0.25, 0.5], run=2, terminated=False, last=1),
    ]
    state.values[:] = torch.arange(7)
    alone = state.values.clone()
    mc.update(state, beside(*parts), policy, args)
    for part in parts:
        _, _, _, single = begin("mc_prediction", "textbook/RandomWalk5-v0", 3, gamma=0.5)
        single.values[:] = torch.arange(7)
        mc.update(single, part, policy, args)
        alone[part.runs] = single.values[part.runs]
    assert torch.equal(state.values, alone) and not torch.equal(alone[0], alone[1])


# Episodes under way


def test_episodes_are_handed_out_whole_and_go_on_after_a_checkpoint():
    from tabular_helpers import step

    episodes, batches = Episodes(2), []
    for t in range(70):  # run 0 ends every third step, run 1 at the seventieth, beyond the first allocation
        one = step([t % 3, t], [1, 0], [float(t), 1.0], [t % 3 + 1, t + 1], [t % 3 == 2, False], [t % 3 == 2, t == 69])
        if t == 40:
            state, episodes = episodes.state_dict(), Episodes(2)
            episodes.load_state_dict(state)
        batch = episodes.add(one, torch.tensor([0.5, 0.25]))
        assert (batch is None) == (t % 3 != 2 and t != 69)
        if batch is not None:
            batches.append(batch)
    first, last = batches[0], batches[-1]
    assert first.runs.tolist() == [0] and first.obs.tolist() == [[0], [1], [2]] and first.next_obs[-1] == 3
    assert first.terminated[:, 0].tolist() == first.done[:, 0].tolist() == [False, False, True]
    assert last.runs.tolist() == [1] and last.obs[:, 0].tolist() == list(range(70)) and (last.prob == 0.25).all()
    assert not last.terminated.any() and last.done.sum() == 1 and last.done[-1, 0]


# Convergence


def walks(runs, episodes, env="textbook/RandomWalk5-v0"):
    """`episodes` walks of each run, as batches; the same for every method."""
    td, args, envs, state = begin("td_prediction", env, runs)
    policy = torch.from_numpy(named_policy(envs, "random"))
    return side_by_side(lambda: td.collect(state, envs, policy), runs, episodes)


@pytest.fixture(scope="module")
def data():
    return walks(150, 80)


every_method = pytest.mark.parametrize(
    "flags",
    [
        dict(),
        dict(n=3),
        dict(method="lambda_return"),
        *(dict(method="td_lambda", trace=trace) for trace in TRACES),
        *(dict(visits=visits) for visits in ("first", "every")),
        *(dict(importance=importance, behavior="right") for importance in ("ordinary", "weighted")),
    ],
    ids=lambda flags: " ".join(map(str, flags.values())) or "td(0)",
)


@every_method
def test_values_converge_to_the_exact_ones(data, flags):
    """Mean over 150 runs within 4.5 of its standard errors of k/6, which are below 0.02."""
    monte_carlo = "visits" in flags or "importance" in flags
    module, args, envs, state = begin(
        "mc_prediction" if monte_carlo else "td_prediction", "textbook/RandomWalk5-v0", 150
    )
    for flag, value in flags.items():
        setattr(args, flag, value)
    policy = torch.from_numpy(named_policy(envs, "random"))
    if "behavior" in flags:  # the walks as they are, seen as those of b; π goes right with 0.55
        policy = torch.tensor([0.45, 0.55], dtype=torch.float64).expand(7, 2)
    exact = torch.from_numpy(policy_values(world("RandomWalk5").models[0], policy.numpy(), 1.0))[1:6]
    if not monte_carlo:
        state.values[:] = 0.5
    for k, batch in enumerate(data):
        if not monte_carlo:
            args.learning_rate = 0.3 / (1 + k / 8)  # 0.028 at the end
        batch = batch._replace(prob=torch.full_like(batch.prob, 0.5))  # which td_prediction does not note
        module.update(state, batch, *([policy] if monte_carlo else []), args)
    values = state.values[:, 1:6]
    error, spread = values.mean(0) - exact, values.std(0) / 150**0.5
    if flags.get("importance") == "weighted":  # biased by the order of 1 / episodes
        error = error.abs().clamp(min=0.02) - 0.02
    # an episode's last step is always one from an end: right after it, TD's values lean outwards by about α/3
    lean = 0.0 if monte_carlo else 0.4 * args.learning_rate
    assert (error.abs() <= 4.5 * spread + lean).all() and spread.max() < 0.02


@pytest.fixture(scope="module")
def long_data():
    return walks(20, 400, RANDOM_WALK_19)


@pytest.mark.learn
@every_method
def test_values_converge_to_the_exact_ones_on_the_long_walk(long_data, flags):
    """Nineteen states: the mean over 20 runs within 4.5 of its standard errors of (k − 10)/10, which are below 0.06.

    TD's values lean outwards in proportion to α, since an episode's last step is always one from an end. The same walks
    with α = 0.1 and 0.05 tell it apart: V(0.05) + (V(0.05) − V(0.1)) has no such part.
    """
    monte_carlo = "visits" in flags or "importance" in flags
    name, alphas = ("mc_prediction", 1) if monte_carlo else ("td_prediction", 2)
    module, args, envs, state = begin(name, RANDOM_WALK_19, 20 * alphas)
    for flag, value in flags.items():
        setattr(args, flag, value)
    policy = torch.from_numpy(named_policy(envs, "random"))
    if "behavior" in flags:  # as above; over a hundred steps and more, π must be nearer to b
        policy = torch.tensor([0.49, 0.51], dtype=torch.float64).expand(21, 2)
    exact = torch.from_numpy(policy_values(world("RandomWalk19").models[0], policy.numpy(), 1.0))[1:20]
    if not monte_carlo:
        args.learning_rate = torch.tensor([0.1, 0.05], dtype=torch.float64).repeat_interleave(20)
    # with one reward in the target, what is learned at one end takes long to the other: the same walks three times
    for batch in long_data[:200] if monte_carlo else long_data * (3 if flags == {} else 1):
        batch = batch._replace(prob=torch.full_like(batch.prob, 0.5))
        tiled = EpisodeBatch(torch.arange(20 * alphas), *(field.repeat(1, alphas) for field in batch[1:]))
        module.update(state, tiled, *([policy] if monte_carlo else []), args)
    values = state.values[:, 1:20]
    if not monte_carlo:
        values = 2 * values[20:] - values[:20]
    error, spread = values.mean(0) - exact, values.std(0) / 20**0.5
    assert (error.abs() <= 4.5 * spread).all() and spread.max() < 0.06, (error / spread, spread)


def test_a_loop_cut_by_a_time_limit_is_worth_its_infinite_sum():
    # reward 1 for ever, γ = 0.9: 1 / (1 − 0.9) = 10; taken for a termination it would be at most 6.5
    for name, flags in (
        ("td_prediction", dict(learning_rate=0.5)),
        ("td_prediction", dict(learning_rate=0.5, n=3)),
        ("td_prediction", dict(learning_rate=0.5, method="lambda_return")),
        ("td_prediction", dict(learning_rate=0.1, method="td_lambda", trace="accumulating")),
        ("td_prediction", dict(learning_rate=0.5, method="td_lambda")),
        ("mc_prediction", dict(learning_rate=0.5, visits="every")),
    ):
        module, args, envs, state = begin(name, LOOP, 2, gamma=0.9, **flags)
        policy = torch.full((1, 2), 0.5, dtype=torch.float64)
        for _ in range(400):
            batch = module.collect(state, envs, policy)
            if batch is not None:
                module.update(state, batch, *([policy] if name == "mc_prediction" else []), args)
        assert state.values[:, 0].tolist() == pytest.approx([10.0, 10.0], abs=0.02), (name, flags)


def test_the_policy_that_acts_is_the_one_that_was_asked_for():
    td, args, envs, state = begin("td_prediction", "textbook/RandomWalk19-v0", 500)
    policy = torch.tensor([0.2, 0.8], dtype=torch.float64).expand(21, 2)
    for _ in range(8):
        td.collect(state, envs, policy)
    right = state.episodes._rows[1, :8].mean()
    assert right == pytest.approx(0.8, abs=5 * (0.16 / 4000) ** 0.5)
    same = load_algorithm("mc_prediction")
    args = same.Args(env="textbook/RandomWalk19-v0", num_envs=500, seed=101)
    envs = make_vec(args.env, 500, 101)
    other = same.TrainState.create(args, envs)
    same.collect(other, envs, policy)
    # what is stored as its probability is that of the action taken
    taken = torch.from_numpy(other.episodes._rows[1, 0])
    assert torch.equal(torch.from_numpy(other.episodes._rows[4, 0]), policy[0, taken.long()])


@pytest.mark.parametrize(
    "name, flags",
    [
        ("mc_prediction", dict(importance="ordinary", behavior="random", policy="optimal")),
        ("mc_prediction", dict(behavior="optimal", policy="optimal")),  # ρ = 1
        ("mc_control", dict()),
        ("mc_control", dict(method="off_policy", importance="ordinary")),
    ],
    ids=str,
)
def test_a_constant_step_is_allowed_where_it_is_bounded(name, flags):
    load_algorithm(name).Args(learning_rate=0.1, **flags).check()


@pytest.mark.parametrize(
    "name, words, message",
    [
        ("td_prediction", ["--n", "0"], "--n 0: must be at least 1"),
        ("td_prediction", ["--trace-decay", "1.5"], "--trace-decay 1.5: must be at least 0 and at most 1"),
        ("td_prediction", ["--policy", "best"], "--policy best: FrozenLake-v1 has random, optimal"),
        ("mc_prediction", ["--behavior", "stick20"], "--behavior stick20: FrozenLake-v1 has random, optimal"),
        ("td_prediction", ["--method", "lambda_return", "--n", "4"], "--n 4: must be 1 with --method lambda_return"),
        ("mc_prediction", ["--behavior", "optimal"], "--behavior optimal: must take every action that --policy random"),
        (
            "mc_prediction",
            ["--behavior", "random", "--policy", "optimal", "--learning-rate", "0.1"],
            "--learning-rate 0.1: has no bound on its steps with --behavior random and --importance weighted; "
            "leave it out or give --importance ordinary",
        ),
        (
            "mc_control",
            ["--method", "off_policy", "--learning-rate", "0.1"],
            "--learning-rate 0.1: has no bound on its steps with --method off_policy and --importance weighted; "
            "leave it out or give --importance ordinary",
        ),
        ("td_prediction", ["--env", "CartPole-v1"], "a table needs both to be Discrete"),
        ("mc_control", ["--method", "off_policy", "--epsilon", "0"], "--epsilon 0.0: must be above 0"),
        ("mc_control", ["--epsilon", "2"], "--epsilon 2.0: must be at least 0 and at most 1"),
        ("sarsa", ["--method", "sarsa_lambda", "--n", "2"], "--n 2: must be 1 with --method sarsa_lambda"),
        ("q_learning", ["--method", "triple"], "--method"),
        ("dyna_q", ["--planning-steps", "-1"], "--planning-steps -1: must be at least 0"),
        ("dyna_q", ["--method", "prioritized", "--planning-steps", "0"], "--planning-steps 0: must be at least 1"),
    ],
)
def test_bad_flags_are_one_line(tmp_path, monkeypatch, capsys, name, words, message):
    monkeypatch.chdir(tmp_path)
    module = load_algorithm(name)
    with pytest.raises(SystemExit) as stop:
        module.main(module.parse_args(module.Args, module.PRESETS, ["--preset", "debug", *words]))
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1 and message in err
    assert list(tmp_path.iterdir()) == []
