"""SARSA on tables: one-step, n-step, expected, and with eligibility traces.

Rummery & Niranjan (1994), "On-Line Q-Learning Using Connectionist Systems"; as in Sutton & Barto (2018), "Reinforcement
Learning: An Introduction", 2nd edition. A' is the action that the ε-greedy policy π takes in S':

    Q(S, A) ← Q(S, A) + α [ G − Q(S, A) ]
    G = R + γ Q(S', A')                                     --method sarsa             equation 6.7
    G = R + γ Σ_a π(a|S') Q(S', a)                          --method expected_sarsa    equation 6.9
    G = R_1 + γ R_2 + … + γⁿ⁻¹ R_n + γⁿ Q(S_n, A_n)         --n 4, either method       equations 7.4, 7.7
    Q ← Q + α [ R + γ Q(S', A') − Q(S, A) ] z               --method sarsa_lambda      section 12.7
    z ← γλ z,  then z(S, A) ← 1 (replacing) or z(S, A) + 1 (accumulating)

With N environments, N independent runs are made side by side, each with a table of its own: an array [R, S, A], R = N.

Deviations from the book, each with its reason:

 1. An episode cut by a time limit bootstraps from its last state, and all its windows shorten to it: only a termination
    ends the sum of rewards.
 2. Among equally good actions one is drawn evenly; the book leaves it open.

Run:    python algos/sarsa.py --env textbook/WindyGridworld-v0 --render
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from cleanrl_zoo import zoo
from cleanrl_zoo.core import discounted_returns, expected_sarsa_target, sarsa_target
from cleanrl_zoo.data.episodes import Transition
from cleanrl_zoo.envs import VecEnv
from cleanrl_zoo.envs.tabular import allowed_actions, make_tabular, present_world, show
from cleanrl_zoo.nn import epsilon_greedy_probs, greedy_probs, mean_error, new_table, sample_action
from cleanrl_zoo.run import Run, check, parse_args, torch_generator, usage_errors
from cleanrl_zoo.run.tables import TableArgs


@dataclass
class Args(TableArgs):
    """SARSA on tables."""

    method: Literal["sarsa", "expected_sarsa", "sarsa_lambda"] = "sarsa"
    """what the target bootstraps from; sarsa_lambda has traces"""
    n: int = 1
    """rewards in the target of sarsa and expected_sarsa"""
    learning_rate: float = 0.5
    """step size α"""
    epsilon: float = 0.1
    """share of random actions"""
    trace_decay: float = 0.9
    """λ of sarsa_lambda"""
    trace: Literal["replacing", "accumulating"] = "replacing"
    """what a visit does to the trace"""

    def check(self) -> None:
        super().check()
        check(self, "n", at_least=1)
        check(self, "learning_rate", above=0, at_most=1)
        check(self, "epsilon", "trace_decay", at_least=0, at_most=1)
        if self.method == "sarsa_lambda" and self.n != 1:
            raise ValueError(f"--n {self.n}: must be 1 with --method sarsa_lambda")


PRESETS = {
    "cliff": {"env": "textbook/CliffWalking-v0", "total_timesteps": 200_000},
    "expected_cliff": {"env": "textbook/CliffWalking-v0", "method": "expected_sarsa", "learning_rate": 1.0,
                       "total_timesteps": 200_000},
    "debug": {"env": "FrozenLake-v1", "total_timesteps": 4096, "num_envs": 4, "eval_episodes": 2,
              "checkpoint_every": 2048, "log_every": 512},
}  # fmt: skip


@dataclass
class TrainState:
    """All that changes during training; a checkpoint is this, the environments and the log's position."""

    q: Tensor  # [R, S, A]
    trace: Tensor  # [R, S, A] z
    window: Tensor  # [3, n, R] state, action and reward of the last n steps, newest last
    age: Tensor  # int64 [R] steps of this episode in the window
    obs: np.ndarray  # int64 [R]
    action: Tensor  # int64 [R] chosen already, unless `fresh`
    fresh: Tensor  # bool [R] an episode begins
    generator: torch.Generator
    global_step: int = 0

    @classmethod
    def create(cls, args: Args, envs: VecEnv) -> "TrainState":
        q = new_table(args.num_envs, torch.from_numpy(allowed_actions(envs)))
        return cls(
            q=q,
            trace=torch.zeros_like(q),
            window=torch.zeros(3, args.n, args.num_envs, dtype=q.dtype),
            age=torch.zeros(args.num_envs, dtype=torch.int64),
            obs=envs.reset(),
            action=torch.zeros(args.num_envs, dtype=torch.int64),
            fresh=torch.ones(args.num_envs, dtype=torch.bool),
            generator=torch_generator(args.seed, "noise"),
        )

    def cut(self, obs: np.ndarray) -> None:
        """Goes on in `obs` [R] after all episodes were dropped, as an engine does that cannot save its state."""
        self.obs = obs
        self.fresh.fill_(True)
        self.age.zero_()
        self.trace.zero_()


def choose(q: Tensor, obs: Tensor, epsilon: float, generator: torch.Generator) -> Tensor:
    """ε-greedy actions [R] in `obs` [R]."""
    uniform = torch.rand(len(q), generator=generator, dtype=torch.float64)
    return sample_action(epsilon_greedy_probs(q[torch.arange(len(q)), obs], epsilon), uniform)


def collect(state: TrainState, envs: VecEnv, args: Args) -> Transition:
    """Takes the chosen action of every run, then chooses A' in S'; `update` finds it in state.action."""
    if state.fresh.any():
        first = choose(state.q, torch.from_numpy(state.obs), args.epsilon, state.generator)
        state.action = torch.where(state.fresh, first, state.action)
    arrays = envs.step(state.action.numpy())
    step = Transition.of(state.obs, state.action, arrays)
    state.action = choose(state.q, step.next_obs, args.epsilon, state.generator)
    state.obs, state.fresh = arrays.obs, step.done
    state.global_step += args.num_envs
    return step


def update(state: TrainState, step: Transition, args: Args) -> dict[str, Tensor]:
    """Moves the values of what this step completes. args.learning_rate: a number, or one per run [R]."""
    q, runs = state.q, torch.arange(len(state.q))
    alpha = torch.as_tensor(args.learning_rate, dtype=torch.float64)
    next_q = q[runs, step.next_obs]  # [R, A]
    if args.method == "expected_sarsa":
        probs = epsilon_greedy_probs(next_q, args.epsilon)
        target = expected_sarsa_target(step.reward, next_q, probs, step.terminated, args.gamma)  # [R]
    else:
        target = sarsa_target(step.reward, next_q, state.action, step.terminated, args.gamma)
    error = target - q[runs, step.obs, step.action]
    if args.method == "sarsa_lambda":
        z = state.trace
        z *= args.trace_decay * args.gamma
        z[runs, step.obs, step.action] = 1.0 + (z[runs, step.obs, step.action] if args.trace == "accumulating" else 0)
        q += (alpha * error).view(-1, 1, 1) * z
        z[step.done] = 0.0
    elif args.n == 1:
        q[runs, step.obs, step.action] += alpha * error
    else:
        return n_step_update(state, step, target, alpha, args)
    return {"losses/td_error": mean_error(error)}


def n_step_update(state: TrainState, step: Transition, target: Tensor, alpha: Tensor, args: Args) -> dict[str, Tensor]:
    """The state and action of n steps ago, and at an episode's end all those since, oldest first (section 7.2).

    target [R]: the one-step target of the newest step, which ends every window.
    """
    runs, n, rows = torch.arange(len(state.q)), args.n, torch.arange(args.n).unsqueeze(1)
    newest = torch.stack([step.obs.double(), step.action.double(), step.reward])  # [3, R]
    state.window = torch.cat([state.window[:, 1:], newest.unsqueeze(1)], 1)
    obs, action, rewards = state.window[0].long(), state.window[1].long(), state.window[2].clone()  # [n, R]
    age, rewards[-1], zero = (state.age + 1).clamp(max=n), target, torch.zeros_like(rewards)
    returns = discounted_returns(rewards, zero, zero, zero, args.gamma)  # [n, R]
    errors, complete = torch.zeros_like(returns), (age >= n - rows) & (step.done | (rows == 0))  # [n, R] learned now
    for row in range(n if step.done.any() else 1):
        pair = runs, obs[row], action[row]
        errors[row] = complete[row] * (returns[row] - state.q[pair])
        state.q[pair] += alpha * errors[row]
    state.age = torch.where(step.done, 0, age)
    return {"losses/td_error": mean_error(errors, complete.sum())} if complete.any() else {}


def main(args: Args) -> None:
    with usage_errors():
        envs, play = make_tabular(args.env, args.num_envs, args.eval_episodes, args.seed, args.vec)

    def evaluate(state: TrainState) -> tuple[np.ndarray, np.ndarray]:
        """Returns and lengths of the first run's greedy policy."""
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
