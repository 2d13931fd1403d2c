"""Tabular worlds: states 0 … S−1, actions 0 … A−1, and an exact model that true values are computed from.

Sutton & Barto (2018), "Reinforcement Learning: An Introduction", 2nd edition. Names are `textbook/<Name>-v0`.

| name                    | the world                                                             | source       |
|-------------------------|-----------------------------------------------------------------------|--------------|
| RandomWalk5             | states 1 … 5 in a row, ends 0 and 6; 1 for the right end              | example 6.2  |
| RandomWalk19            | states 1 … 19; −1 for the left end, 1 for the right                    | example 7.1  |
| CliffWalking            | 4 × 12; −1 a step, −100 and back to the start at the cliff             | example 6.6  |
| WindyGridworld          | 7 × 10; −1 a step; columns lift by 0, 1 or 2 cells                      | example 6.5  |
| WindyGridworldKings     | the same with eight moves                                              | exercise 6.9 |
| WindyGridworldStochastic | eight moves, and the wind differs by −1, 0 or 1, a third each          | exercise 6.10 |
| DynaMaze                | 6 × 9 with walls; 1 at the goal                                        | example 8.1  |
| BlockingMaze            | the gap at the right closes after 1,000 steps, one at the left opens   | example 8.2  |
| ShortcutMaze            | a gap at the right opens as well after 3,000 steps                     | example 8.3  |
| Blackjack               | sum 12 … 21, dealer's card, usable ace; infinite deck                  | example 5.1  |
| BlackjackDeuce          | the same, always from sum 13, usable ace, dealer's deuce               | example 5.4  |
| MaximizationBias        | A: left to B for 0 or end; B: ten actions that pay normal(−0.1, 1)     | example 6.7  |

A walk's actions are left and right, and its textbook values those of choosing evenly. Grids are numbered row by row
from the top left; moves are up, right, down, left, then the diagonals. At blackjack an ace with a ten is a 21 like any
other: no bonus for naturals. Episodes are truncated after 10,000 steps, which the textbook's are not, so that a greedy
policy that goes in circles can be evaluated.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Discrete
from gymnasium.wrappers import OrderEnforcing, TimeLimit
from torch import Tensor

from cleanrl_zoo.envs.episodes import run_episodes
from cleanrl_zoo.envs.vec import (
    EVAL_STREAM,
    VecEnv,
    VecStep,
    check_state,
    env_seeds,
    generators,
    make_vec,
    restored_generators,
    seed_action_space,
)

LIMIT = 10_000  # steps after which an episode is truncated
MOVES = ((-1, 0), (0, 1), (1, 0), (0, -1))  # up, right, down, left
KINGS_MOVES = (*MOVES, (-1, 1), (1, 1), (1, -1), (-1, -1))
ARROWS = "↑→↓←↗↘↙↖"


class Model(NamedTuple):
    """Exact dynamics: each state and action has K outcomes (those of probability 0 fill up)."""

    probs: np.ndarray  # float64 [S, A, K], sums to 1 over K
    next_state: np.ndarray  # int64 [S, A, K]
    reward: np.ndarray  # float64 [S, A, K], the mean
    terminated: np.ndarray  # bool [S, A, K]
    start: np.ndarray  # float64 [S], distribution of the first state
    reward_std: np.ndarray | None = None  # float64 [S, A, K] of normal noise on the reward
    allowed: np.ndarray | None = None  # bool [S, A]; None: every action in every state


class Layout(NamedTuple):
    """How a table is shown: `shape` of the grids (the last two dimensions), a sign per action, a title per grid."""

    shape: tuple[int, ...]
    signs: str | tuple[str, ...]
    titles: tuple[str, ...] = ("",)


class World(NamedTuple):
    """Models in the order of time: from step `changes[i]` of an environment's life on, models[i + 1] holds."""

    models: tuple[Model, ...]
    changes: tuple[int, ...] = ()
    layout: Layout | None = None


# Dynamic programming


def transition_tensor(model: Model) -> np.ndarray:
    """P[s, a, s']: probability [S, A, S] of going on in s'. Rows sum to 1 − the probability of ending."""
    states, actions, _ = model.probs.shape
    tensor = np.zeros((states, actions, states))
    s, a = np.arange(states)[:, None, None], np.arange(actions)[:, None]
    np.add.at(tensor, (s, a, model.next_state), np.where(model.terminated, 0.0, model.probs))
    return tensor


def expected_reward(model: Model) -> np.ndarray:
    """R[s, a]: mean reward [S, A]."""
    return (model.probs * model.reward).sum(-1)


def occupied(model: Model) -> np.ndarray:
    """bool [S]: states in which an action can be taken: reached from the start, and not the end of an episode."""
    goes_on = (transition_tensor(model) > 0).any(1)  # [S, S]
    reached = model.start > 0
    while True:
        wider = reached | goes_on[reached].any(0)
        if np.array_equal(wider, reached):
            return reached
        reached = wider


def action_values(model: Model, values: np.ndarray, gamma: float) -> np.ndarray:
    """Q[s, a] = R(s, a) + γ Σ P(s'|s, a) V(s') from values [S] (eq. 4.6); −∞ for actions that are not allowed."""
    q = expected_reward(model) + gamma * transition_tensor(model) @ values
    return q if model.allowed is None else np.where(model.allowed, q, -np.inf)


def policy_values(model: Model, policy: np.ndarray, gamma: float, horizon: int | None = None) -> np.ndarray:
    """Values [S] of `policy` [S, A] (probabilities): V = R_π + γ P_π V, solved (eq. 4.4); 0 in states never occupied.

    horizon: only the rewards of as many steps count, as under a time limit.

    Raises:
        ValueError: for γ = 1 where an episode under this policy may never end.
    """
    inside = occupied(model)
    transition = np.einsum("sa,sat->st", policy, transition_tensor(model))[np.ix_(inside, inside)]
    reward = (policy * expected_reward(model)).sum(-1)[inside]
    values = np.zeros(len(inside))
    if horizon is not None:
        found = np.zeros(len(reward))
        for _ in range(horizon):
            found = reward + gamma * transition @ found
        values[inside] = found
        return values
    if gamma == 1.0:
        ends = transition.sum(1) < 1 - 1e-9
        for _ in range(len(ends)):
            ends = ends | (transition[:, ends] > 0).any(1)
        if not ends.all():
            raise ValueError("gamma is 1, and under this policy an episode may never end; give gamma below 1")
    values[inside] = np.linalg.solve(np.eye(len(reward)) - gamma * transition, reward)
    return values


def optimal_values(model: Model, gamma: float, tolerance: float = 1e-12) -> np.ndarray:
    """V* [S] by value iteration from 0 until no value moves by `tolerance` (eq. 4.10); 0 in states never occupied.

    Raises:
        ValueError: for γ = 1 where no policy keeps the values finite.
    """
    inside, reward, transition = occupied(model), expected_reward(model), transition_tensor(model)
    if model.allowed is not None:
        reward = np.where(model.allowed, reward, -np.inf)
    values = np.zeros(len(inside))
    for _ in range(100_000):
        new = np.where(inside, (reward + gamma * transition @ values).max(1), 0.0)
        if np.abs(new - values).max() < tolerance:
            return new
        values = new
    raise ValueError(f"gamma is {gamma}, and the values do not converge; give gamma below 1")


def greedy_policy(q: np.ndarray, tolerance: float = 1e-9) -> np.ndarray:
    """Probabilities [S, A], even over the actions whose q [S, A] is the largest within `tolerance`."""
    best = q >= q.max(1, keepdims=True) - tolerance
    return best / best.sum(1, keepdims=True)


def named_policy(envs: VecEnv, name: str, flag: str = "policy") -> np.ndarray:
    """Probabilities [S, A] of a policy by name.

    "random" chooses evenly; "optimal" is greedy for V* with γ = 0.9999 (the exact model must be known); "stick20", of
    our blackjack only, hits below a sum of 20.

    Raises:
        ValueError: one line, for another name or an environment that has no such policy.
    """
    states, actions = int(envs.single_observation_space.n), int(envs.single_action_space.n)
    if name == "random":
        allowed = allowed_actions(envs)
        return allowed / allowed.sum(1, keepdims=True)
    if name == "stick20" and envs.env_id.startswith("textbook/Blackjack"):
        hits = np.arange(states) // 10 % 10 + 12 < 20
        return np.stack([~hits, hits], 1).astype(float)
    if name == "optimal" and exact_model(envs) is not None:
        model, near_one = exact_model(envs), 0.9999
        best = action_values(model, optimal_values(model, near_one, 1e-10), near_one).argmax(1)
        return np.eye(actions)[best]
    raise ValueError(
        f"--{flag} {name}: {envs.env_id} has random{', optimal' if exact_model(envs) is not None else ''}"
        f"{', stick20' if envs.env_id.startswith('textbook/Blackjack') else ''}"
    )


def value_error(envs: VecEnv, policy: np.ndarray, gamma: float) -> Callable[[Tensor], Tensor] | None:
    """A function that gives, for values [R, S], the root of their mean squared error over the states that can be
    occupied, mean over the runs; None where the exact values of `policy` [S, A] are not known, not finite, or change
    with the world."""
    model = exact_model(envs)
    if model is None or known_world(envs).changes:
        return None
    try:
        exact, inside = torch.from_numpy(policy_values(model, policy, gamma)), torch.from_numpy(occupied(model))
    except ValueError:
        return None
    return lambda values: (values - exact)[:, inside].square().mean(1).sqrt().mean()


def exact_model(envs: VecEnv) -> Model | None:
    """The environment's model (in a world that changes: the first), None where it is not known."""
    world = known_world(envs)
    return None if world is None else world.models[0]


@cache
def _world_of(env_id: str) -> World | None:
    return tabular_world(env_id, {})


def known_world(envs: VecEnv) -> World | None:
    """The world behind the environments, whichever engine steps them; None where its model is not known."""
    return getattr(envs, "world", None) or _world_of(envs.env_id)


def allowed_actions(envs: VecEnv) -> np.ndarray:
    """bool [S, A]: which action can be taken where; all of them where the model is not known or says nothing."""
    model = exact_model(envs)
    if model is not None and model.allowed is not None:
        return model.allowed
    return np.ones((int(envs.single_observation_space.n), int(envs.single_action_space.n)), bool)


def check_tabular(envs: VecEnv) -> None:
    """Raises ValueError, one line, unless observations and actions are Discrete and counted from 0."""
    spaces = envs.single_observation_space, envs.single_action_space
    if not all(isinstance(space, Discrete) and space.start == 0 for space in spaces):
        raise ValueError(
            f"--env {envs.env_id}: observations {spaces[0]}, actions {spaces[1]}: a table needs both to be Discrete, "
            "counted from 0; for flat vectors: algos/ppo.py or algos/ppo_continuous.py"
        )


def present_world(envs: VecEnv, global_step: int) -> dict[str, Any]:
    """`env_kwargs` of the world as it is after `global_step` steps, all of `envs` together; {} if it never changes."""
    world = known_world(envs)
    if world is None or not world.changes:
        return {}
    return {"changes": int(np.searchsorted(world.changes, global_step // envs.num_envs, side="right"))}


Act = Callable[[np.ndarray], np.ndarray]  # obs [N] -> actions [N]
Play = Callable[[Act, int], tuple[np.ndarray, np.ndarray]]  # act, global_step -> returns and lengths [eval_episodes]


def make_tabular(env_id: str, num_envs: int, eval_episodes: int, seed: int, vec: str = "auto") -> tuple[VecEnv, Play]:
    """Environments to learn from, and how to evaluate: `play(act, global_step)` is `run_episodes` on others.

    Those have the world as it is when training has come to `global_step`: a way that was learned after a change would
    be closed in the world before it. ValueError as `make_vec` and `check_tabular`.
    """
    envs = make_vec(env_id, num_envs, seed, vec)
    check_tabular(envs)

    @cache
    def eval_envs(**env_kwargs: int) -> VecEnv:
        return make_vec(env_id, eval_episodes, seed, vec, EVAL_STREAM, env_kwargs=env_kwargs)

    def play(act: Act, global_step: int) -> tuple[np.ndarray, np.ndarray]:
        return run_episodes(eval_envs(**present_world(envs, global_step)), act)

    eval_envs(**present_world(envs, 0))  # what is wrong with them is told before the training
    return envs, play


def show(envs: VecEnv, values: np.ndarray, policy: np.ndarray) -> str:
    """Values [S] and the likeliest actions of `policy` [S, A] as text, a small grid where the world is one.

    A state that is never left by an action (walls, ends) is shown as ·; actions equally likely stand side by side.
    """
    world = known_world(envs)
    layout = world.layout if world is not None else None
    states, actions = policy.shape
    shape, signs, titles = layout or Layout((1, -(-states // 10), 10), tuple(f" {a}" for a in range(actions)))
    inside = np.ones(states, bool) if world is None else np.any([occupied(model) for model in world.models], 0)
    best = policy >= policy.max(1, keepdims=True) - 1e-9
    cells = [
        f"{values[s]:8.2f}{''.join(sign for sign, is_best in zip(signs, best[s], strict=True) if is_best)}"
        if inside[s]
        else "       ·"
        for s in range(states)
    ]
    width = max(map(len, cells)) + 1
    rows, columns = shape[-2:]
    lines = []
    for grid, title in enumerate(titles):
        lines += [title] if title else []
        for row in range(grid * rows, (grid + 1) * rows):
            lines.append("".join(cell.ljust(width) for cell in cells[row * columns : (row + 1) * columns]).rstrip())
    return "\n".join(lines)


# The worlds


def _model(outcomes: Callable[[int, int], Sequence[tuple]], states: int, actions: int, start: np.ndarray) -> Model:
    """Packs outcomes(s, a), lists of (probability, next state, reward, terminated), into arrays."""
    table = [[outcomes(s, a) for a in range(actions)] for s in range(states)]
    most = max(len(cell) for row in table for cell in row)
    filled = [[[*cell, *[(0.0, s, 0.0, True)] * (most - len(cell))] for cell in row] for s, row in enumerate(table)]
    arrays = [np.array([[[o[i] for o in cell] for cell in row] for row in filled]) for i in range(4)]
    probs, next_state, reward, terminated = arrays
    return Model(probs.astype(float), next_state.astype(np.int64), reward.astype(float), terminated.astype(bool), start)


def _random_walk(length: int, left: float) -> World:
    def outcomes(s: int, a: int) -> list[tuple]:
        if s in (0, length + 1):
            return [(1.0, s, 0.0, True)]
        to = s + (1 if a else -1)
        return [(1.0, to, {0: left, length + 1: 1.0}.get(to, 0.0), to in (0, length + 1))]

    start = np.eye(length + 2)[(length + 1) // 2]
    return World((_model(outcomes, length + 2, 2, start),), layout=Layout((1, length + 2), "←→"))


def _grid(
    shape: tuple[int, int],
    start: tuple[int, int],
    goal: tuple[int, int],
    step_reward: float,
    goal_reward: float,
    walls: Sequence[tuple[int, int]] = (),
    cliff: Sequence[tuple[int, int]] = (),
    wind: Sequence[int] | None = None,
    random_wind: bool = False,
    moves: Sequence[tuple[int, int]] = MOVES,
) -> Model:
    """A grid; moves off it or into a wall stay. The wind is that of the column that is left."""
    rows, columns = shape
    home, end = start[0] * columns + start[1], goal[0] * columns + goal[1]

    def outcomes(s: int, a: int) -> list[tuple]:
        if s == end:
            return [(1.0, s, 0.0, True)]
        row, column = divmod(s, columns)
        lift = wind[column] if wind else 0
        lifts = [lift - 1, lift, lift + 1] if random_wind and lift else [lift]
        found = []
        for blow in lifts:
            to = (
                min(max(row + moves[a][0] - blow, 0), rows - 1),
                min(max(column + moves[a][1], 0), columns - 1),
            )
            to = (row, column) if to in walls else to
            if to in cliff:
                found.append((1 / len(lifts), home, -100.0, False))
            else:
                place = to[0] * columns + to[1]
                found.append((1 / len(lifts), place, goal_reward if place == end else step_reward, place == end))
        return found

    return _model(outcomes, rows * columns, len(moves), np.eye(rows * columns)[home])


def _cliff() -> World:
    cliff = [(3, column) for column in range(1, 11)]
    return World((_grid((4, 12), (3, 0), (3, 11), -1.0, -1.0, cliff=cliff),), layout=Layout((4, 12), ARROWS[:4]))


def _windy(moves: Sequence[tuple[int, int]], random_wind: bool = False) -> World:
    wind = (0, 0, 0, 1, 1, 1, 2, 2, 1, 0)
    model = _grid((7, 10), (3, 0), (3, 7), -1.0, -1.0, wind=wind, random_wind=random_wind, moves=moves)
    return World((model,), layout=Layout((7, 10), ARROWS[: len(moves)]))


def _maze(start: tuple[int, int], *walls: Sequence[tuple[int, int]], change: int | None = None) -> World:
    models = tuple(_grid((6, 9), start, (0, 8), 0.0, 1.0, walls=w) for w in walls)
    return World(models, () if change is None else (change,), Layout((6, 9), ARROWS[:4]))


def _barrier(*columns: int) -> list[tuple[int, int]]:
    return [(3, column) for column in columns]


CARDS = [(card, 1 / 13 if card < 10 else 4 / 13) for card in range(1, 11)]  # ace … ten, an infinite deck


def _draw(total: int, usable: bool, card: int) -> tuple[int, bool]:
    """Sum and usable ace after one more card; a sum above 21 is bust."""
    if card == 1 and total + 11 <= 21:
        return total + 11, True
    total += card
    return (total - 10, False) if total > 21 and usable else (total, usable)


@cache
def _dealer(total: int, usable: bool) -> dict[int, float]:
    """Distribution of the dealer's last sum, 0 for bust; the dealer sticks from 17 on."""
    if total > 21:
        return {0: 1.0}
    if total >= 17:
        return {total: 1.0}
    found: dict[int, float] = {}
    for card, chance in CARDS:
        for last, share in _dealer(*_draw(total, usable, card)).items():
            found[last] = found.get(last, 0.0) + chance * share
    return found


def _blackjack(deuce: bool = False) -> World:
    """Action 0 sticks, 1 hits; state (usable · 10 + sum − 12) · 10 + dealer's card − 1."""

    def place(total: int, usable: bool, dealer: int) -> int:
        return (usable * 10 + total - 12) * 10 + dealer - 1

    def outcomes(s: int, a: int) -> list[tuple]:
        usable, total, dealer = bool(s // 100), s // 10 % 10 + 12, s % 10 + 1
        if a:
            drawn = [(chance, *_draw(total, usable, card)) for card, chance in CARDS]
            return [(p, s, -1.0, True) if t > 21 else (p, place(t, u, dealer), 0.0, False) for p, t, u in drawn]
        last = _dealer(*_draw(0, False, dealer))
        win, draw = sum(p for t, p in last.items() if t < total), last.get(total, 0.0)
        return [(win, s, 1.0, True), (draw, s, 0.0, True), (max(1.0 - win - draw, 0.0), s, -1.0, True)]

    start = np.zeros(200)
    hands = {(0, False): 1.0}  # two cards, then more up to a sum of 12, below which nobody sticks
    for dealt in range(12):
        hands, before = {}, hands
        for (total, usable), chance in before.items():
            if dealt >= 2 and total >= 12:
                for dealer, share in CARDS:
                    start[place(total, usable, dealer)] += chance * share
                continue
            for card, share in CARDS:
                hand = _draw(total, usable, card)
                hands[hand] = hands.get(hand, 0.0) + chance * share
    if deuce:
        start = np.eye(200)[place(13, True, 2)]
    # rows of the shown grids are sums, columns the dealer's cards
    layout = Layout((2, 10, 10), "sh", ("no usable ace: s sticks, h hits; rows 12 … 21, dealer A … 10", "usable ace:"))
    return World((_model(outcomes, 200, 2, start),), layout=layout)


def _maximization_bias() -> World:
    """States: A, B, end. In A, action 0 is left and action 1 right; B has ten actions."""
    model = _model(
        lambda s, a: [(1.0, 1, 0.0, False)] if (s, a) == (0, 0) else [(1.0, 2, -0.1 * (s == 1), True)],
        3,
        10,
        np.eye(3)[0],
    )
    noise, allowed = np.zeros((3, 10, 1)), np.ones((3, 10), bool)
    noise[1], allowed[0, 2:] = 1.0, False
    return World((model._replace(reward_std=noise, allowed=allowed),))


DYNA_WALLS = [(1, 2), (2, 2), (3, 2), (4, 5), (0, 7), (1, 7), (2, 7)]
WORLDS: dict[str, Callable[[], World]] = {
    "RandomWalk5": lambda: _random_walk(5, 0.0),
    "RandomWalk19": lambda: _random_walk(19, -1.0),
    "CliffWalking": _cliff,
    "WindyGridworld": lambda: _windy(MOVES),
    "WindyGridworldKings": lambda: _windy(KINGS_MOVES),
    "WindyGridworldStochastic": lambda: _windy(KINGS_MOVES, random_wind=True),
    "DynaMaze": lambda: _maze((2, 0), DYNA_WALLS),
    "BlockingMaze": lambda: _maze((5, 3), _barrier(*range(8)), _barrier(*range(1, 9)), change=1000),
    "ShortcutMaze": lambda: _maze((5, 3), _barrier(*range(1, 9)), _barrier(*range(1, 8)), change=3000),
    "Blackjack": _blackjack,
    "BlackjackDeuce": lambda: _blackjack(deuce=True),
    "MaximizationBias": _maximization_bias,
}


@cache
def world(name: str) -> World:
    """The world of that name in `WORLDS`, made once."""
    return WORLDS[name]()


class _Tables:
    """A world's models as flat arrays, and one transition of many environments at once."""

    def __init__(self, world: World) -> None:
        models = world.models
        _, self.actions, self.outcomes = models[0].probs.shape
        self.rows = models[0].probs.shape[0] * self.actions  # state-action pairs of one model
        # beyond the last outcome that can happen nothing is reached, whatever the rounding of the sum
        probs = np.stack([model.probs for model in models])
        cumulative, possible = probs.cumsum(-1), probs[..., ::-1].cumsum(-1)[..., ::-1] > 0
        cumulative[np.concatenate([~possible[..., 1:], np.ones_like(possible[..., :1])], -1)] = 2.0
        self.cumulative = cumulative.reshape(-1, self.outcomes)
        self.next_state, self.reward, self.terminated = (
            np.stack([getattr(model, name) for model in models]).ravel()
            for name in ("next_state", "reward", "terminated")
        )
        noise = [model.reward_std for model in models]
        self.reward_std = None if noise[0] is None else np.stack(noise).ravel()
        self.changes = np.array(world.changes)
        start = models[0].start.cumsum()
        start[np.flatnonzero(models[0].start)[-1] :] = 2.0
        self.start = start
        self.draws = 2 if self.reward_std is None else 4  # uniform numbers of one step

    def first(self, uniform: np.ndarray) -> np.ndarray:
        """First states [N] from draws [N, D]."""
        return np.searchsorted(self.start, uniform[:, 1], side="right")

    def step(
        self, state: np.ndarray, action: np.ndarray, life: np.ndarray, uniform: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Next states, rewards and flags [N] of `action` [N] in `state` [N], `life` [N] steps into each environment's
        life, with draws [N, D]."""
        pair = state * self.actions + action
        if len(self.changes):
            pair = pair + self.rows * np.searchsorted(self.changes, life, side="right")
        index = pair
        if self.outcomes > 1:
            index = pair * self.outcomes + (uniform[:, :1] >= self.cumulative[pair]).sum(1)
        reward = self.reward[index]
        if self.reward_std is not None:  # Box & Muller
            normal = np.sqrt(-2.0 * np.log1p(-uniform[:, 2])) * np.cos(2.0 * np.pi * uniform[:, 3])
            reward = reward + self.reward_std[index] * normal
        return self.next_state[index], reward, self.terminated[index]


class TabularEnv(gymnasium.Env):
    """One environment of a world of `WORLDS`; with equal seeds it gives the very numbers of `TabularVec`.

    changes: the world as it is after that many of its changes, and stays; by default it changes as its steps go on.
    """

    state_names = ("state", "life", "last_draw")  # what an exact checkpoint has to hold

    def __init__(self, name: str, changes: int | None = None) -> None:
        self.world = world(name)
        if changes is not None:
            self.world = World((self.world.models[changes],), layout=self.world.layout)
        self._tables = _Tables(self.world)
        states, actions, _ = self.world.models[0].probs.shape
        self.observation_space, self.action_space = Discrete(states), Discrete(actions)
        self.state, self.life = 0, 0
        self.last_draw: np.ndarray | None = None  # [1, D]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        if seed is not None or self.last_draw is None:
            self.last_draw, self.life = self.np_random.random((1, self._tables.draws)), 0
        self.state = int(self._tables.first(self.last_draw)[0])
        return self.state, {}

    def step(self, action):
        self.last_draw = self.np_random.random((1, self._tables.draws))
        arrays = self._tables.step(np.array([self.state]), np.array([action]), np.array([self.life]), self.last_draw)
        self.life += 1
        self.state = int(arrays[0][0])
        return self.state, float(arrays[1][0]), bool(arrays[2][0]), False, {}


for _name in WORLDS:
    gymnasium.register(
        f"textbook/{_name}-v0", f"{__name__}:TabularEnv", max_episode_steps=LIMIT, kwargs={"name": _name}
    )


def gymnasium_world(env: gymnasium.Env) -> World | None:
    """The world of a made environment: ours, or one of Gymnasium's toy texts with a table `P`; None for all others."""
    limits = env
    while limits is not limits.unwrapped:
        if type(limits) not in (TimeLimit, OrderEnforcing):
            return None
        limits = limits.env
    env = env.unwrapped
    if isinstance(env, TabularEnv):
        return env.world
    known = type(env).__module__.startswith("gymnasium.envs.toy_text.") and hasattr(env, "P")
    if not known or getattr(env, "fickle_passenger", False):  # a fickle passenger is not in Taxi's table
        return None
    model = _model(lambda s, a: env.P[s][a], len(env.P), len(env.P[0]), np.asarray(env.initial_state_distrib, float))
    kind, layout = type(env).__name__, None
    if kind == "FrozenLakeEnv":
        layout = Layout((env.nrow, env.ncol), "←↓→↑")
    elif kind == "CliffWalkingEnv":
        layout = Layout(tuple(env.shape), ARROWS[:4])
    return World((model,), layout=layout)


def tabular_world(env_id: str, env_kwargs: dict[str, Any]) -> World | None:
    """The world behind a Gymnasium name, None where its model is not known."""
    spec = gymnasium.registry.get(env_id)
    entry = str(spec.entry_point) if spec is not None else ""
    if not entry.startswith((f"{__name__}:", "gymnasium.envs.toy_text")):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "is out of date": the user asked for this version
        env = gymnasium.make(env_id, disable_env_checker=True, **env_kwargs)
    try:
        return gymnasium_world(env)
    finally:
        env.close()


class TabularVec:
    """N environments of a world with a known model, stepped as arrays. See `vec.VecEnv` for the interface.

    Environment k draws its numbers from its own generator, in blocks, so that it is the same whatever N is.
    """

    engine = "tabular"
    exact_state = True
    BLOCK = 256  # steps

    def __init__(
        self, env_id: str, num_envs: int, seed: int, stream: int, world: World, max_episode_steps: int | None
    ) -> None:
        self.env_id, self.num_envs, self.world = env_id, num_envs, world
        self.max_episode_steps = max_episode_steps
        self.cut_episodes = 0
        self._seed, self._stream = seed, stream
        self._tables = _Tables(world)
        states, actions, _ = world.models[0].probs.shape
        self.single_observation_space, self.single_action_space = Discrete(states), Discrete(actions)
        self._state = np.zeros(num_envs, np.int64)  # [N]
        self._life = np.zeros(num_envs, np.int64)  # [N] steps since the reset, all episodes together
        self._elapsed = np.zeros(num_envs, np.int64)  # [N] of this episode
        self._return = np.zeros(num_envs)  # [N]
        self._episodes: list[tuple[float, int]] = []  # ended and not yet popped
        self._rngs: list[np.random.Generator] = []
        self._block = np.zeros((0, num_envs, self._tables.draws))  # [BLOCK, N, D], used up to `_used`
        self._used = 0

    def reset(self) -> np.ndarray:
        """Starts a new life everywhere, from the seeds of (seed, stream, env). Returns obs [N]."""
        seed_action_space(self.single_action_space, self._seed, self._stream)
        self._episodes = []
        return self._restart(env_seeds(self._seed, self._stream, self.num_envs))

    def cut(self, global_step: int) -> np.ndarray:
        """Drops the episodes under way and starts new lives from (seed, stream, env, global_step). Returns obs."""
        self.cut_episodes += int((self._elapsed > 0).sum())
        return self._restart(env_seeds(self._seed, self._stream, self.num_envs, global_step))

    def _restart(self, seeds: list[int]) -> np.ndarray:
        self._rngs = generators(seeds)
        self._block, self._used = self._block[:0], 0
        for counter in (self._life, self._elapsed, self._return):
            counter[:] = 0
        self._state = self._tables.first(self._draw())
        return self._state

    def _draw(self) -> np.ndarray:
        """The next uniform numbers [N, D]."""
        if self._used == len(self._block):
            size = (self.BLOCK, self._tables.draws)
            self._block, self._used = np.stack([rng.random(size) for rng in self._rngs], 1), 0
        self._used += 1
        return self._block[self._used - 1]

    def step(self, actions: np.ndarray) -> VecStep:
        """Steps every environment with its action [N]."""
        if actions.shape != self._state.shape:
            raise ValueError(f"actions have shape {actions.shape}, {self.env_id} takes {self._state.shape}")
        uniform = self._draw()
        final_obs, reward, terminated = self._tables.step(self._state, actions, self._life, uniform)
        self._life += 1
        self._elapsed += 1
        self._return += reward
        limit = self.max_episode_steps
        truncated = np.zeros(self.num_envs, bool) if limit is None else self._elapsed >= limit
        episode_return, episode_length = self._return.copy(), self._elapsed.copy()
        obs, done = final_obs, terminated | truncated
        if done.any():
            ended = done.nonzero()[0]
            self._episodes += zip(episode_return[ended].tolist(), episode_length[ended].tolist(), strict=True)
            obs = final_obs.copy()
            obs[ended] = self._tables.first(uniform[ended])
            self._elapsed[ended] = 0
            self._return[ended] = 0.0
        self._state = obs
        return VecStep(obs, final_obs, reward, terminated, truncated, episode_return, episode_length)

    def pop_episodes(self) -> list[tuple[float, int]]:
        """(raw return, length) of the episodes that ended since the last call, in order."""
        episodes, self._episodes = self._episodes, []
        return episodes

    def state_dict(self) -> dict[str, Any]:
        """Everything that later steps depend on; restoring it continues bit for bit."""
        return {
            "state": self._state.copy(),
            "life": self._life.copy(),
            "block": self._block.copy(),
            "used": self._used,
            "rngs": [rng.bit_generator.state for rng in self._rngs],
            "elapsed": self._elapsed.copy(),
            "return": self._return.copy(),
            "episodes": [list(episode) for episode in self._episodes],
            "cut_episodes": self.cut_episodes,
            "action_space_rng": self.single_action_space.np_random.bit_generator.state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state_dict()` of the same world and number of environments."""
        check_state(state, self.num_envs)
        self._rngs = restored_generators(state["rngs"])
        self._state, self._block, self._used = state["state"].copy(), state["block"].copy(), int(state["used"])
        self._life[:], self._elapsed[:], self._return[:] = state["life"], state["elapsed"], state["return"]
        self._episodes = [tuple(episode) for episode in state["episodes"]]
        self.cut_episodes = int(state["cut_episodes"])
        self.single_action_space.np_random.bit_generator.state = state["action_space_rng"]

    def versions(self) -> dict[str, str]:
        """The packages that the numbers depend on."""
        return {"gymnasium": gymnasium.__version__, "numpy": np.__version__}

    def close(self) -> None:
        """Nothing is held open."""


class OneNumber(gymnasium.ObservationWrapper):
    """A tuple of discrete observations, as blackjack's, as one number: the last entry counts by ones."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self._spaces = env.observation_space.spaces
        self._sizes = tuple(int(space.n) for space in self._spaces)
        self.observation_space = Discrete(int(np.prod(self._sizes)))

    def observation(self, observation):
        numbers = [int(value) - int(space.start) for value, space in zip(observation, self._spaces, strict=True)]
        return np.int64(np.ravel_multi_index(numbers, self._sizes))


def one_number(env: gymnasium.Env) -> gymnasium.Env:
    """`env`, wrapped in `OneNumber` where it observes a tuple of Discrete spaces."""
    space = env.observation_space
    is_tuple = isinstance(space, gymnasium.spaces.Tuple) and all(isinstance(part, Discrete) for part in space.spaces)
    return OneNumber(env) if is_tuple else env
