"""Dyna on tables: learning from experience and from a model of it. Dyna-Q, Dyna-Q+ and prioritised sweeping.

Sutton (1990), "Integrated Architectures for Learning, Planning, and Reacting Based on Approximating Dynamic
Programming"; Moore & Atkeson (1993), "Prioritized Sweeping". As in Sutton & Barto (2018), "Reinforcement Learning: An
Introduction", 2nd edition, chapter 8. After each real step, from which Dyna-Q learns as Q-learning does, the model
remembers what followed:

    Model(S, A) ← R, S'
    n times:  draw a state s that was visited and an action a that was taken in it;  r, s' ← Model(s, a)
              Q(s, a) ← Q(s, a) + α [ r + γ max_a' Q(s', a') − Q(s, a) ]            --method dyna_q       section 8.2
    the same with r + κ√τ in place of r, τ the real steps since a was taken in s;
              an action that never was leads back to s with reward 0                --method dyna_q_plus  section 8.3
    P(S, A) ← | R + γ max_a Q(S', a) − Q(S, A) | if above θ; at most n times: the pair with the largest P is updated,
              its P becomes 0, and each pair that leads to it gets its own P         --method prioritized  section 8.4

With N environments, N independent runs are made side by side, each with tables of its own: arrays [R, S, A], R = N.

Deviations from the book, each with its reason:

 1. An episode cut by a time limit bootstraps from its last state: only a termination ends the sum of rewards. The model
    remembers terminations, so that the state after the end, which has no actions, needs no row.
 2. Among equally good actions one is drawn evenly, among equal priorities the first, and a pair that waits can gain
    priority, not lose it; the book leaves these open.

Run:    python algos/dyna_q.py --env textbook/DynaMaze-v0 --render
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from cleanrl_zoo import zoo
from cleanrl_zoo.core import q_target
from cleanrl_zoo.data.episodes import Transition
from cleanrl_zoo.data.table_model import TableModel
from cleanrl_zoo.envs import VecEnv
from cleanrl_zoo.envs.tabular import allowed_actions, make_tabular, present_world, show
from cleanrl_zoo.nn import epsilon_greedy_probs, greedy_probs, mean_error, new_table, sample_action
from cleanrl_zoo.nn.table import RULED_OUT
from cleanrl_zoo.run import Run, check, parse_args, torch_generator, usage_errors
from cleanrl_zoo.run.tables import TableArgs


@dataclass
class Args(TableArgs):
    """Dyna on tables."""

    env: str = "textbook/DynaMaze-v0"
    """Gymnasium's name of an environment with discrete observations and actions; the model takes it as deterministic"""
    method: Literal["dyna_q", "dyna_q_plus", "prioritized"] = "dyna_q"
    """planning from drawn pairs, the same with a bonus for pairs long untried, or by priority"""
    planning_steps: int = 5
    """updates from the model per real step (n)"""
    learning_rate: float = 0.1
    """step size α"""
    gamma: float = 0.95
    """discount factor"""
    epsilon: float = 0.1
    """share of random actions"""
    kappa: float = 1e-4
    """κ of dyna_q_plus, reward for each square root of a step that a pair was not tried"""
    theta: float = 1e-4
    """θ of prioritized, the least error that is worth an update"""

    def check(self) -> None:
        super().check()
        check(self, "kappa", "theta", at_least=0)
        check(self, "planning_steps", at_least=int(self.method == "prioritized"))  # which learns by planning alone
        check(self, "learning_rate", above=0, at_most=1)
        check(self, "epsilon", at_least=0, at_most=1)


CHANGING = {"method": "dyna_q_plus", "planning_steps": 10, "learning_rate": 1.0, "kappa": 1e-3}
PRESETS = {
    "blocking": {"env": "textbook/BlockingMaze-v0", **CHANGING, "total_timesteps": 30_000},
    "shortcut": {"env": "textbook/ShortcutMaze-v0", **CHANGING, "total_timesteps": 60_000},
    "debug": {"env": "FrozenLake-v1", "total_timesteps": 2048, "num_envs": 4, "eval_episodes": 2,
              "checkpoint_every": 1024, "log_every": 512},
}  # fmt: skip


@dataclass
class TrainState:
    """All that changes during training; a checkpoint is this, the environments and the log's position."""

    q: Tensor  # [R, S, A]
    model: TableModel
    priority: Tensor  # [R, S, A] P, 0 for pairs that do not wait
    obs: np.ndarray  # int64 [R]
    generator: torch.Generator
    global_step: int = 0

    @classmethod
    def create(cls, args: Args, envs: VecEnv) -> "TrainState":
        q = new_table(args.num_envs, torch.from_numpy(allowed_actions(envs)))
        model, noise = TableModel.empty(*q.shape), torch_generator(args.seed, "noise")
        return cls(q, model, torch.zeros_like(q), obs=envs.reset(), generator=noise)

    def cut(self, obs: np.ndarray) -> None:
        """Goes on in `obs` [R] after all episodes were dropped, as an engine does that cannot save its state."""
        self.obs = obs


def collect(state: TrainState, envs: VecEnv, args: Args) -> Transition:
    """One ε-greedy step of every run."""
    q = state.q[torch.arange(args.num_envs), torch.from_numpy(state.obs)]  # [R, A]
    uniform = torch.rand(args.num_envs, generator=state.generator, dtype=q.dtype)
    action = sample_action(epsilon_greedy_probs(q, args.epsilon), uniform)
    step = envs.step(action.numpy())
    transition, state.obs = Transition.of(state.obs, action, step), step.obs
    state.global_step += args.num_envs
    return transition


def learn(q: Tensor, step: Transition, alpha: float | Tensor, gamma: float) -> Tensor:
    """Q-learning (eq. 6.8) from one step of every run, real or imagined; returns the errors [R]."""
    runs = torch.arange(len(q))
    error = q_target(step.reward, q[runs, step.next_obs], step.terminated, gamma) - q[runs, step.obs, step.action]
    q[runs, step.obs, step.action] += alpha * error
    return error


def imagine(state: TrainState, args: Args) -> list[Transition]:
    """What the model says of a pair drawn for every run, once for each planning step."""
    runs, plus = torch.arange(len(state.q)), args.method == "dyna_q_plus"
    uniform = torch.rand(args.planning_steps, 2, len(runs), generator=state.generator, dtype=state.q.dtype)
    obs = sample_action(state.model.tried.any(-1).double(), uniform[:, 0])  # [n, R] evenly among those visited
    choices = state.q > RULED_OUT / 2 if plus else state.model.tried
    imagined = state.model.recall(obs, sample_action(choices[runs, obs].double(), uniform[:, 1]))
    if plus:
        idle = state.global_step - state.model.when[runs, imagined.obs, imagined.action]  # [n, R] steps of all runs
        imagined = imagined._replace(reward=imagined.reward + args.kappa * (idle.double() / len(runs)).sqrt())
    return [Transition(*one) for one in zip(*imagined, strict=True)]


def update(state: TrainState, step: Transition, args: Args) -> dict[str, Tensor]:
    """Remembers a real step of every run, learns from it, and plans."""
    state.model.remember(step, state.global_step)
    if args.method == "prioritized":
        errors = sweep(state, step, args)
    else:  # drawn all at once: planning changes values, not the model
        steps = step, *imagine(state, args)
        errors = [learn(state.q, each, args.learning_rate, args.gamma) for each in steps]
    return {"losses/td_error": mean_error(torch.cat(errors))} if errors else {}


def sweep(state: TrainState, step: Transition, args: Args) -> list[Tensor]:
    """Prioritised sweeping: updates the pairs whose error is largest; returns their errors."""
    runs, actions, errors = torch.arange(len(state.q)), state.q.shape[2], []
    wait(state, (runs, step.obs, step.action), args)
    for _ in range(args.planning_steps):
        highest, place = state.priority.flatten(1).max(1)  # [R]
        busy, obs, action = highest > 0.0, place // actions, place % actions
        if not busy.any():
            break
        state.priority[runs, obs, action] = 0.0
        alpha = args.learning_rate * busy.double()  # [R]
        errors.append(learn(state.q, state.model.recall(obs, action), alpha, args.gamma)[busy])
        changed = state.model.leading_to(obs) & busy.view(-1, 1, 1)  # [R, S, A] the value after these pairs
        wait(state, changed.nonzero(as_tuple=True), args)
    return errors


def wait(state: TrainState, pairs: tuple[Tensor, ...], args: Args) -> None:
    """Lets remembered pairs (runs, states, actions) wait for their update, by their error if it is above θ."""
    model, next_q = state.model, state.q[pairs[0], state.model.next_obs[pairs]]
    target = q_target(model.reward[pairs], next_q, model.terminated[pairs], args.gamma)
    size = (target - state.q[pairs]).abs()
    state.priority[pairs] = torch.maximum(state.priority[pairs], torch.where(size > args.theta, size, 0.0))


def main(args: Args) -> None:
    with usage_errors():
        envs, play = make_tabular(args.env, args.num_envs, args.eval_episodes, args.seed, args.vec)

    def evaluate(state: TrainState) -> tuple[np.ndarray, np.ndarray]:
        """Returns and lengths of the first run's greedy policy, in the world as it is by now."""
        return play(zoo.table_policy(state.q[0]).act, state.global_step)

    with Run(args, envs, evaluate) as run:
        state = run.resume_or(lambda: TrainState.create(args, envs))
        while state.global_step < args.total_timesteps:
            with run.phase("collect"):
                step = collect(state, envs, args)
            with run.phase("update"):
                run.metrics(update(state, step, args))
            run.end_iteration(state)
        results, policy = run.results(state), zoo.table_policy(state.q[0])
        card = {**run.recorded, **results, "policy": policy.spec, "env_kwargs": present_world(envs, state.global_step)}
        zoo.save(run.run_dir / "policy", policy=policy, card=card)
        run.finish(results)
        if args.render:
            print(show(envs, state.q[0].amax(-1).numpy(), greedy_probs(state.q[0]).numpy()))


if __name__ == "__main__":
    main(parse_args(Args, PRESETS))
