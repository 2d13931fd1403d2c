"""Temporal-difference prediction on tables: TD(0), n-step TD, TD(λ) with three kinds of trace, the offline λ-return.

Sutton (1988), "Learning to Predict by the Methods of Temporal Differences"; van Seijen & Sutton (2014), "True Online
TD(λ)", for the Dutch trace. As in Sutton & Barto (2018), "Reinforcement Learning: An Introduction", 2nd edition:

    V(S) ← V(S) + α [ G − V(S) ]
    G = R + γ V(S')                                            --method td                        equation 6.2
    G = R_1 + γ R_2 + … + γⁿ⁻¹ R_n + γⁿ V(S_n)                 --method td --n 4                  equations 7.1, 7.2
    G = (1−λ) Σ_n λⁿ⁻¹ (the n-step return)                     --method lambda_return (offline)  equations 12.2, 12.3
    V ← V + α δ z,   δ = R + γ V(S') − V(S)                    --method td_lambda                 equations 12.6, 12.7
    z ← γλ z,  then z(S) ← z(S) + 1 (accumulating), 1 (replacing), z(S) + 1 − α z(S) (Dutch)
    Dutch:  V ← V + α (δ + V(S) − V_old) z − α (V(S) − V_old) at S,   V_old ← V(S')               section 12.5

With N environments, N independent runs are made side by side, each with a table of its own: an array [R, S], R = N.

Deviations from the book, each with its reason:

 1. An episode is learned from when it has ended, its steps in their order, which gives the values that learning on the
    way would have given, since the policy does not depend on them.
 2. An episode cut by a time limit bootstraps from its last state, and windows shorten to it: only a termination ends
    the sum of rewards.

Run:    python algos/td_prediction.py --env textbook/RandomWalk19-v0 --n 4 --learning-rate 0.4 --render
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from cleanrl_zoo import zoo
from cleanrl_zoo.core import lambda_returns, n_step_returns
from cleanrl_zoo.data.episodes import EpisodeBatch, Episodes, Transition
from cleanrl_zoo.envs import VecEnv
from cleanrl_zoo.envs.tabular import make_tabular, named_policy, present_world, show, value_error
from cleanrl_zoo.nn import mean_error, sample_action
from cleanrl_zoo.run import Run, check, parse_args, torch_generator, usage_errors
from cleanrl_zoo.run.tables import TableArgs


@dataclass
class Args(TableArgs):
    """Temporal-difference prediction on tables."""

    env: str = "textbook/RandomWalk19-v0"
    """Gymnasium's name of an environment with discrete observations and actions"""
    policy: str = "random"
    """the policy whose values are sought: random, optimal (where the model is known), stick20 (blackjack)"""
    method: Literal["td", "td_lambda", "lambda_return"] = "td"
    """n-step returns, traces, or the offline λ-return"""
    n: int = 1
    """rewards in the target of td"""
    trace_decay: float = 0.8
    """λ of td_lambda and lambda_return"""
    trace: Literal["accumulating", "replacing", "dutch"] = "dutch"
    """what a visit does to the trace of td_lambda"""
    learning_rate: float = 0.1
    """step size α"""
    initial_value: float = 0.0
    """value of every state at the beginning"""

    def check(self) -> None:
        super().check()
        check(self, "n", at_least=1)
        check(self, "trace_decay", at_least=0, at_most=1)
        check(self, "learning_rate", above=0, at_most=1)
        check(self, "initial_value")
        if self.method != "td" and self.n != 1:
            raise ValueError(f"--n {self.n}: must be 1 with --method {self.method}")


PRESETS = {
    "random_walk5": {"env": "textbook/RandomWalk5-v0", "initial_value": 0.5, "learning_rate": 0.05},
    "debug": {"env": "FrozenLake-v1", "total_timesteps": 4096, "num_envs": 4, "eval_episodes": 2,
              "checkpoint_every": 2048, "log_every": 512},
}  # fmt: skip


@dataclass
class TrainState:
    """All that changes during training; a checkpoint is this, the environments and the log's position."""

    values: Tensor  # [R, S]
    episodes: Episodes  # under way
    obs: np.ndarray  # int64 [R]
    generator: torch.Generator
    global_step: int = 0

    @classmethod
    def create(cls, args: Args, envs: VecEnv) -> "TrainState":
        shape = args.num_envs, int(envs.single_observation_space.n)
        values = torch.full(shape, args.initial_value, dtype=torch.float64)
        return cls(values, Episodes(args.num_envs), envs.reset(), torch_generator(args.seed, "noise"))

    def cut(self, obs: np.ndarray) -> None:
        """Goes on in `obs` [R] after all episodes were dropped, as an engine does that cannot save its state."""
        self.obs = obs
        self.episodes.clear()


def collect(state: TrainState, envs: VecEnv, policy: Tensor) -> EpisodeBatch | None:
    """One step of every run by `policy` [S, A]; returns the episodes that it ended, if any."""
    probs = policy[torch.from_numpy(state.obs)]  # [R, A]
    action = sample_action(probs, torch.rand(len(probs), generator=state.generator, dtype=probs.dtype))
    arrays = envs.step(action.numpy())
    step, state.obs = Transition.of(state.obs, action, arrays), arrays.obs
    state.global_step += envs.num_envs
    return state.episodes.add(step)


def update(state: TrainState, batch: EpisodeBatch, args: Args) -> dict[str, Tensor]:
    """Learns from whole episodes [L, E]. args.learning_rate: a number, or one per run [R]."""
    v = state.values[batch.runs]  # [E, S]
    alpha = torch.as_tensor(args.learning_rate, dtype=v.dtype).expand(len(state.values))[batch.runs]  # [E]
    learn = {"td": n_step, "td_lambda": traces, "lambda_return": offline}[args.method]
    errors = torch.stack(list(learn(v, batch, alpha * batch.active, args)))  # [L, E]
    state.values[batch.runs] = v
    return {"losses/td_error": mean_error(errors[batch.active])}


def n_step(v: Tensor, batch: EpisodeBatch, alpha: Tensor, args: Args) -> Iterator[Tensor]:
    """n-step TD. v [E, S] is moved in place; alpha [L, E] is 0 in the padding; yields each step's errors [E]."""
    each, steps = torch.arange(len(v)), torch.arange(len(batch.obs)).unsqueeze(1)
    rewards = n_step_returns(batch.reward, torch.zeros_like(alpha), batch.done, batch.done, args.gamma, args.n)
    last = (torch.minimum(steps + args.n, batch.active.sum(0)) - 1).maximum(steps)  # [L, E] the step ending each window
    end = batch.next_obs.gather(0, last)
    discount = args.gamma ** (last - steps + 1).double() * ~batch.terminated.gather(0, last)
    for t, obs in enumerate(batch.obs):
        # only now is V(S_n) what learning on the way would have found: the steps before this one have been learned from
        error = rewards[t] + discount[t] * v[each, end[t]] - v[each, obs]
        v[each, obs] += alpha[t] * error
        yield error


def offline(v: Tensor, batch: EpisodeBatch, alpha: Tensor, args: Args) -> Iterator[Tensor]:
    """The offline λ-return; as `n_step`."""
    each = torch.arange(len(v))
    next_values = v[each, batch.next_obs]  # [L, E]
    returns = lambda_returns(batch.reward, next_values, batch.terminated, batch.done, args.gamma, args.trace_decay)
    for t, obs in enumerate(batch.obs):
        error = returns[t] - v[each, obs]
        v[each, obs] += alpha[t] * error
        yield error


def traces(v: Tensor, batch: EpisodeBatch, alpha: Tensor, args: Args) -> Iterator[Tensor]:
    """TD(λ) with the chosen trace; as `n_step`."""
    each, z, decay = torch.arange(len(v)), torch.zeros_like(v), args.trace_decay * args.gamma
    old = v[each, batch.obs[0]]  # V_old
    for t, obs in enumerate(batch.obs):
        value, next_value = v[each, obs], v[each, batch.next_obs[t]] * ~batch.terminated[t]
        error = batch.reward[t] + args.gamma * next_value - value
        z *= decay
        if args.trace == "replacing":
            z[each, obs] = 1.0
        else:
            z[each, obs] += 1.0 - (alpha[t] * z[each, obs] if args.trace == "dutch" else 0.0)
        if args.trace == "dutch":
            v += (alpha[t] * (error + value - old)).unsqueeze(1) * z
            v[each, obs] -= alpha[t] * (value - old)
            old = next_value
        else:
            v += (alpha[t] * error).unsqueeze(1) * z
        yield error


def main(args: Args) -> None:
    with usage_errors():
        envs, play = make_tabular(args.env, args.num_envs, args.eval_episodes, args.seed, args.vec)
        policy = torch.from_numpy(named_policy(envs, args.policy))  # [S, A]
        error = value_error(envs, policy.numpy(), args.gamma)
    saved = zoo.table_policy(policy.clamp(min=1e-30).log())

    def evaluate(state: TrainState) -> tuple[np.ndarray, np.ndarray]:
        """Returns and lengths of the policy's likeliest actions, which learning does not change."""
        return play(saved.act, state.global_step)

    with Run(args, envs, evaluate) as run:
        state = run.resume_or(lambda: TrainState.create(args, envs))
        while state.global_step < args.total_timesteps:
            with run.phase("collect"):
                batch = collect(state, envs, policy)
            if batch is not None:
                with run.phase("update"):
                    run.metrics(update(state, batch, args))
                    run.metrics({"losses/value_error": error(state.values)} if error else {})
            run.end_iteration(state)
        results = run.results(state)
        card = {**run.recorded, **results, "policy": saved.spec, "env_kwargs": present_world(envs, state.global_step)}
        zoo.save(run.run_dir / "policy", policy=saved, card=card)
        run.finish(results)
        if args.render:
            print(show(envs, state.values[0].numpy(), policy.numpy()))


if __name__ == "__main__":
    main(parse_args(Args, PRESETS))
