"""Monte Carlo prediction on tables: the values of a policy are means of the returns that follow each state.

Sutton & Barto (2018), "Reinforcement Learning: An Introduction", 2nd edition, sections 5.1, 5.5 and 5.6.

    G_t  = R_{t+1} + γ R_{t+2} + …                      the return from step t to the episode's end
    V(s) = mean of G_t over the first visit to s of each episode, or over every visit           --visits first, every
    ρ_t  = Π_{k ≥ t} π(A_k|S_k) / b(A_k|S_k)            where another policy b acts             equation 5.3
    V(s) = Σ ρ_t G_t / number of visits                 --importance ordinary                   equation 5.5
    V(s) = Σ ρ_t G_t / Σ ρ_t                            --importance weighted                   equation 5.6

The means are kept one visit at a time, V ← V + (w / Σw)(target − V), equation 5.8. With N environments, N independent
runs are made side by side, each with a table of its own: an array [R, S], R = N.

Deviations from the book, each with its reason:

 1. --learning-rate α puts a constant in place of 1 / Σw, as in equation 6.1, which goes on forgetting. Not with
    weighted importance sampling: its steps would be α ρ, and ρ, a product, has no bound; the values diverge.
 2. To a return that a time limit cut, the value of its last state is added, as it stands: only a termination ends it.

Run:    python algos/mc_prediction.py --env textbook/Blackjack-v0 --policy stick20 --render
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from cleanrl_zoo import zoo
from cleanrl_zoo.core import discounted_returns
from cleanrl_zoo.data.episodes import EpisodeBatch, Episodes, Transition
from cleanrl_zoo.envs import VecEnv
from cleanrl_zoo.envs.tabular import make_tabular, named_policy, present_world, show, value_error
from cleanrl_zoo.nn import mean_error, sample_action
from cleanrl_zoo.run import Run, check, parse_args, torch_generator, usage_errors
from cleanrl_zoo.run.tables import TableArgs


@dataclass
class Args(TableArgs):
    """Monte Carlo prediction on tables."""

    env: str = "textbook/Blackjack-v0"
    """Gymnasium's name of an environment with discrete observations and actions"""
    total_timesteps: int = 500_000
    """environment steps, all runs together"""
    policy: str = "random"
    """the policy whose values are sought: random, optimal (where the model is known), stick20 (blackjack)"""
    behavior: str | None = None
    """the policy that acts, by the same names; by default --policy itself"""
    visits: Literal["first", "every"] = "first"
    """which visits to a state count in an episode"""
    importance: Literal["ordinary", "weighted"] = "weighted"
    """kind of importance sampling; without --behavior both are the plain mean"""
    learning_rate: float | None = None
    """constant step size α; by default values are means"""

    def check(self) -> None:
        super().check()
        check(self, "learning_rate", above=0, at_most=1)
        off_policy = self.behavior not in (None, self.policy)
        if off_policy and self.importance == "weighted" and self.learning_rate is not None:
            raise ValueError(
                f"--learning-rate {self.learning_rate}: has no bound on its steps with --behavior {self.behavior} and "
                "--importance weighted; leave it out or give --importance ordinary"
            )


PRESETS = {
    "blackjack": {"policy": "stick20", "num_envs": 100, "total_timesteps": 5_000_000},
    "off_policy": {"env": "textbook/BlackjackDeuce-v0", "policy": "stick20", "behavior": "random", "num_envs": 100,
                   "total_timesteps": 2_000_000},
    "debug": {"env": "FrozenLake-v1", "total_timesteps": 4096, "num_envs": 4, "eval_episodes": 2,
              "checkpoint_every": 2048, "log_every": 512},
}  # fmt: skip


@dataclass
class TrainState:
    """All that changes during training; a checkpoint is this, the environments and the log's position."""

    values: Tensor  # [R, S]
    weights: Tensor  # [R, S] Σw, what the visits so far weigh
    episodes: Episodes  # under way
    obs: np.ndarray  # int64 [R]
    generator: torch.Generator
    global_step: int = 0

    @classmethod
    def create(cls, args: Args, envs: VecEnv) -> "TrainState":
        values = torch.zeros(args.num_envs, int(envs.single_observation_space.n), dtype=torch.float64)
        generator = torch_generator(args.seed, "noise")
        return cls(values, values.clone(), Episodes(args.num_envs), envs.reset(), generator)

    def cut(self, obs: np.ndarray) -> None:
        """Goes on in `obs` [R] after all episodes were dropped, as an engine does that cannot save its state."""
        self.obs = obs
        self.episodes.clear()


def collect(state: TrainState, envs: VecEnv, behavior: Tensor) -> EpisodeBatch | None:
    """One step of every run by `behavior` [S, A]; returns the episodes that it ended, if any."""
    probs = behavior[torch.from_numpy(state.obs)]  # [R, A]
    action = sample_action(probs, torch.rand(len(probs), generator=state.generator, dtype=probs.dtype))
    arrays = envs.step(action.numpy())
    step, state.obs = Transition.of(state.obs, action, arrays), arrays.obs
    state.global_step += envs.num_envs
    return state.episodes.add(step, probs.gather(1, action.unsqueeze(1)).squeeze(1))


def update(state: TrainState, batch: EpisodeBatch, policy: Tensor, args: Args) -> dict[str, Tensor]:
    """Learns from whole episodes [L, E], one of each run that they name."""
    v, weights, runs = state.values, state.weights, batch.runs
    last = v[runs, batch.next_obs]  # [L, E] counts at a truncation only
    returns = discounted_returns(batch.reward, last, batch.terminated, batch.done, args.gamma)
    ratio = torch.where(batch.active, policy[batch.obs, batch.action] / batch.prob, 1.0)
    ratio = ratio.flip(0).cumprod(0).flip(0)  # [L, E] ρ
    seen, errors = torch.zeros(v.shape, dtype=torch.bool), torch.zeros_like(returns)
    learned = torch.zeros_like(batch.active)  # [L, E] steps whose return moves a value
    for t, obs in enumerate(batch.obs):
        counts = batch.active[t]
        if args.visits == "first":
            counts = counts & ~seen[runs, obs]
            seen[runs, obs] |= counts
        weight, target = counts.double(), returns[t]
        if args.importance == "weighted":
            weight = weight * ratio[t]
        else:
            target = target * ratio[t]
        weights[runs, obs] += weight
        step = (
            weight / weights[runs, obs].clamp(min=1e-300) if args.learning_rate is None else args.learning_rate * weight
        )
        learned[t] = weight > 0
        errors[t] = learned[t] * (target - v[runs, obs])
        v[runs, obs] += step * errors[t]
    return {"losses/td_error": mean_error(errors, learned.sum())} if learned.any() else {}


def main(args: Args) -> None:
    with usage_errors():
        envs, play = make_tabular(args.env, args.num_envs, args.eval_episodes, args.seed, args.vec)
        policy = torch.from_numpy(named_policy(envs, args.policy))  # [S, A]
        behavior = policy if args.behavior is None else torch.from_numpy(named_policy(envs, args.behavior, "behavior"))
        if ((policy > 0) & (behavior == 0)).any():
            raise ValueError(
                f"--behavior {args.behavior}: must take every action that --policy {args.policy} takes (section 5.5), "
                "as random does"
            )
        error = value_error(envs, policy.numpy(), args.gamma)
    saved = zoo.table_policy(policy.clamp(min=1e-30).log())

    def evaluate(state: TrainState) -> tuple[np.ndarray, np.ndarray]:
        """Returns and lengths of the policy's likeliest actions, which learning does not change."""
        return play(saved.act, state.global_step)

    with Run(args, envs, evaluate) as run:
        state = run.resume_or(lambda: TrainState.create(args, envs))
        while state.global_step < args.total_timesteps:
            with run.phase("collect"):
                batch = collect(state, envs, behavior)
            if batch is not None:
                with run.phase("update"):
                    run.metrics(update(state, batch, policy, args))
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
