"""Q-learning on tables: plain, double, and Watkins' with eligibility traces.

Watkins (1989), "Learning from Delayed Rewards", for plain and traces; van Hasselt (2010), "Double Q-learning". As in
Sutton & Barto (2018), "Reinforcement Learning: An Introduction", 2nd edition:

    Q(S, A)  ← Q(S, A) + α [ R + γ max_a Q(S', a) − Q(S, A) ]                        --method plain      equation 6.8
    Q₁(S, A) ← Q₁(S, A) + α [ R + γ Q₂(S', argmax_a Q₁(S', a)) − Q₁(S, A) ]          --method double     equation 6.10
               or the same with Q₁ and Q₂ exchanged, by the toss of a coin; actions are chosen on Q₁ + Q₂
    Q        ← Q + α [ R + γ max_a Q(S', a) − Q(S, A) ] z                            --method watkins    section 12.10
    z        ← γλ z if A is a greedy action, 0 if it is not;  then z(S, A) ← 1 (replacing) or z(S, A) + 1 (accumulating)

The behaviour is ε-greedy, the target policy greedy. With N environments, N independent runs are made side by side, each
with tables of its own: arrays [R, S, A], R = N.

Deviations from the books, each with its reason:

 1. An episode cut by a time limit bootstraps from its last state: only a termination ends the sum of rewards.
 2. Among equally good actions one is drawn evenly (double: the target takes the first); the books leave it open.

Run:    python algos/q_learning.py --env textbook/CliffWalking-v0 --render
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from cleanrl_zoo import zoo
from cleanrl_zoo.core import double_q_target, q_target
from cleanrl_zoo.data.episodes import Transition
from cleanrl_zoo.envs import VecEnv
from cleanrl_zoo.envs.tabular import allowed_actions, make_tabular, present_world, show
from cleanrl_zoo.nn import epsilon_greedy_probs, greedy_probs, mean_error, new_table, sample_action
from cleanrl_zoo.run import Run, check, parse_args, torch_generator, usage_errors
from cleanrl_zoo.run.tables import TableArgs


@dataclass
class Args(TableArgs):
    """Q-learning on tables."""

    env: str = "textbook/CliffWalking-v0"
    """Gymnasium's name of an environment with discrete observations and actions"""
    method: Literal["plain", "double", "watkins"] = "plain"
    """one table, two tables, or one table with traces that end at an exploring action"""
    learning_rate: float = 0.5
    """step size α"""
    epsilon: float = 0.1
    """share of random actions"""
    trace_decay: float = 0.9
    """λ of watkins"""
    trace: Literal["replacing", "accumulating"] = "replacing"
    """what a visit does to the trace"""

    def check(self) -> None:
        super().check()
        check(self, "learning_rate", above=0, at_most=1)
        check(self, "epsilon", "trace_decay", at_least=0, at_most=1)


PRESETS = {
    "frozen_lake": {"env": "FrozenLake-v1", "learning_rate": 0.1, "gamma": 0.99, "epsilon": 0.5,
                    "total_timesteps": 400_000},
    "taxi": {"env": "Taxi-v4", "gamma": 0.99, "total_timesteps": 2_000_000},
    "maximization_bias": {"env": "textbook/MaximizationBias-v0", "method": "double", "learning_rate": 0.1,
                          "num_envs": 100, "total_timesteps": 40_000},
    "debug": {"env": "FrozenLake-v1", "total_timesteps": 4096, "num_envs": 4, "eval_episodes": 2,
              "checkpoint_every": 2048, "log_every": 512},
}  # fmt: skip


@dataclass
class TrainState:
    """All that changes during training; a checkpoint is this, the environments and the log's position."""

    q: Tensor  # [R, S, A], Q₁ of double
    q2: Tensor  # [R, S, A] Q₂ of double
    trace: Tensor  # [R, S, A] z
    obs: np.ndarray  # int64 [R]
    generator: torch.Generator
    global_step: int = 0

    @classmethod
    def create(cls, args: Args, envs: VecEnv) -> "TrainState":
        q = new_table(args.num_envs, torch.from_numpy(allowed_actions(envs)))
        generator = torch_generator(args.seed, "noise")
        return cls(q, q.clone(), torch.zeros_like(q), envs.reset(), generator)

    def cut(self, obs: np.ndarray) -> None:
        """Goes on in `obs` [R] after all episodes were dropped, as an engine does that cannot save its state."""
        self.obs = obs
        self.trace.zero_()


def mean_table(state: TrainState, args: Args) -> Tensor:
    """The action values [R, S, A] that actions are chosen on."""
    return 0.5 * (state.q + state.q2) if args.method == "double" else state.q


def collect(state: TrainState, envs: VecEnv, args: Args) -> Transition:
    """One ε-greedy step of every run."""
    obs, runs = torch.from_numpy(state.obs), torch.arange(args.num_envs)
    q = state.q[runs, obs]  # [R, A]
    if args.method == "double":
        q = q + state.q2[runs, obs]
    uniform = torch.rand(args.num_envs, generator=state.generator, dtype=q.dtype)
    action = sample_action(epsilon_greedy_probs(q, args.epsilon), uniform)
    step = envs.step(action.numpy())
    transition, state.obs = Transition.of(state.obs, action, step), step.obs
    state.global_step += args.num_envs
    return transition


def update(state: TrainState, step: Transition, args: Args) -> dict[str, Tensor]:
    """Learns from one step of every run. args.learning_rate: a number, or one per run [R]."""
    q, runs = state.q, torch.arange(len(state.q))
    alpha = torch.as_tensor(args.learning_rate, dtype=q.dtype)
    if args.method == "double":
        coin = torch.rand(len(q), generator=state.generator) < 0.5  # true: Q₁ learns
        error = double_update(state.q, state.q2, step, coin, alpha, args.gamma)
        return {"losses/td_error": mean_error(error)}
    row = q[runs, step.obs]  # [R, A]
    value = row[runs, step.action]
    error = q_target(step.reward, q[runs, step.next_obs], step.terminated, args.gamma) - value  # [R]
    if args.method == "plain":
        q[runs, step.obs, step.action] += alpha * error
    else:
        z, greedy = state.trace, value == row.amax(-1)
        z *= (args.trace_decay * args.gamma * greedy.double()).view(-1, 1, 1)
        z[runs, step.obs, step.action] = 1.0 + (z[runs, step.obs, step.action] if args.trace == "accumulating" else 0)
        q += (alpha * error).view(-1, 1, 1) * z
        z[step.done] = 0.0
    return {"losses/td_error": mean_error(error)}


def double_update(
    q1: Tensor, q2: Tensor, step: Transition, coin: Tensor, alpha: Tensor, gamma: float
) -> Tensor:  # fmt: skip
    """Moves Q₁ [R, S, A] where `coin` [R], Q₂ elsewhere; returns the errors [R]."""
    runs, first = torch.arange(len(q1)), coin.unsqueeze(-1)
    next_1, next_2 = q1[runs, step.next_obs], q2[runs, step.next_obs]  # [R, A]
    learner, other = torch.where(first, next_1, next_2), torch.where(first, next_2, next_1)
    target = double_q_target(step.reward, learner, other, step.terminated, gamma)  # [R]
    error = target - torch.where(coin, q1[runs, step.obs, step.action], q2[runs, step.obs, step.action])
    q1[runs, step.obs, step.action] += alpha * error * coin
    q2[runs, step.obs, step.action] += alpha * error * ~coin
    return error


def main(args: Args) -> None:
    with usage_errors():
        envs, play = make_tabular(args.env, args.num_envs, args.eval_episodes, args.seed, args.vec)

    def evaluate(state: TrainState) -> tuple[np.ndarray, np.ndarray]:
        """Returns and lengths of the first run's greedy policy."""
        return play(zoo.table_policy(mean_table(state, args)[0]).act, state.global_step)

    with Run(args, envs, evaluate) as run:
        state = run.resume_or(lambda: TrainState.create(args, envs))
        while state.global_step < args.total_timesteps:
            with run.phase("collect"):
                step = collect(state, envs, args)
            with run.phase("update"):
                run.metrics(update(state, step, args))
            run.end_iteration(state)
        q = mean_table(state, args)[0]
        results, policy = run.results(state), zoo.table_policy(q)
        card = {**run.recorded, **results, "policy": policy.spec, "env_kwargs": present_world(envs, state.global_step)}
        zoo.save(run.run_dir / "policy", policy=policy, card=card)
        run.finish(results)
        if args.render:
            print(show(envs, q.amax(-1).numpy(), greedy_probs(q).numpy()))


if __name__ == "__main__":
    main(parse_args(Args, PRESETS))
