"""Monte Carlo control on tables: on-policy with ε-greedy actions, off-policy with importance sampling.

Sutton & Barto (2018), "Reinforcement Learning: An Introduction", 2nd edition, sections 5.4 to 5.7.

    G_t     = R_{t+1} + γ R_{t+2} + …                   the return from step t to the episode's end
    Q(s, a) = mean of G_t over the visits to (s, a);  actions are ε-greedy      --method on_policy      section 5.4
    ρ_t     = Π_{k > t} π(A_k|S_k) / b(A_k|S_k)         π greedy, b the ε-greedy policy that acted      equation 5.3
    Q(s, a) = Σ ρ_t G_t / Σ ρ_t                         --method off_policy --importance weighted       section 5.7
    Q(s, a) = Σ ρ_t G_t / number of visits              --method off_policy --importance ordinary       equation 5.5

The means are kept one visit at a time, Q ← Q + (w / Σw)(target − Q), equation 5.8. Off-policy, an episode is learned
from its end backwards, with π as it has become by then. With N environments, N independent runs are made side by side,
each with a table of its own: an array [R, S, A], R = N.

Deviations from the book, each with its reason:

 1. --learning-rate α puts a constant in place of 1 / Σw, so that returns of the first, bad policies are forgotten. Not
    with weighted importance sampling: its steps would be α ρ, and ρ, a product, has no bound; the values diverge.
 2. Off-policy every visit counts, as in the book; on-policy --visits says which.
 3. To a return that a time limit cut, the value of its last state under π is added, as it stands: only a termination
    ends it. It also lets a policy learn that goes in circles.
 4. Among equally good actions one is drawn evenly, and π takes the first; the book leaves it open.

Run:    python algos/mc_control.py --env textbook/Blackjack-v0 --render
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
from cleanrl_zoo.envs.tabular import allowed_actions, make_tabular, present_world, show
from cleanrl_zoo.nn import epsilon_greedy_probs, greedy_probs, mean_error, new_table, sample_action
from cleanrl_zoo.run import Run, check, parse_args, torch_generator, usage_errors
from cleanrl_zoo.run.tables import TableArgs


@dataclass
class Args(TableArgs):
    """Monte Carlo control on tables."""

    env: str = "textbook/Blackjack-v0"
    """Gymnasium's name of an environment with discrete observations and actions"""
    total_timesteps: int = 1_000_000
    """environment steps, all runs together"""
    method: Literal["on_policy", "off_policy"] = "on_policy"
    """values of the ε-greedy policy that acts, or of the greedy policy"""
    importance: Literal["ordinary", "weighted"] = "weighted"
    """kind of importance sampling of off_policy"""
    visits: Literal["first", "every"] = "first"
    """which visits to a state and action count in an episode of on_policy"""
    epsilon: float = 0.1
    """share of random actions"""
    learning_rate: float | None = None
    """constant step size α; by default values are means"""

    def check(self) -> None:
        super().check()
        check(self, "epsilon", at_least=0, at_most=1)
        check(self, "learning_rate", above=0, at_most=1)
        if self.method == "off_policy" and self.epsilon == 0:
            raise ValueError(f"--epsilon {self.epsilon}: must be above 0 with --method off_policy")
        if self.method == "off_policy" and self.importance == "weighted" and self.learning_rate is not None:
            raise ValueError(
                f"--learning-rate {self.learning_rate}: has no bound on its steps with --method off_policy and "
                "--importance weighted; leave it out or give --importance ordinary"
            )


PRESETS = {
    "blackjack": {"num_envs": 100, "total_timesteps": 10_000_000},
    "debug": {"env": "FrozenLake-v1", "total_timesteps": 4096, "num_envs": 4, "eval_episodes": 2,
              "checkpoint_every": 2048, "log_every": 512},
}  # fmt: skip


@dataclass
class TrainState:
    """All that changes during training; a checkpoint is this, the environments and the log's position."""

    q: Tensor  # [R, S, A]
    weights: Tensor  # [R, S, A] Σw, what the visits so far weigh
    episodes: Episodes  # under way
    obs: np.ndarray  # int64 [R]
    generator: torch.Generator
    global_step: int = 0

    @classmethod
    def create(cls, args: Args, envs: VecEnv) -> "TrainState":
        q = new_table(args.num_envs, torch.from_numpy(allowed_actions(envs)))
        generator = torch_generator(args.seed, "noise")
        return cls(q, torch.zeros_like(q), Episodes(args.num_envs), envs.reset(), generator)

    def cut(self, obs: np.ndarray) -> None:
        """Goes on in `obs` [R] after all episodes were dropped, as an engine does that cannot save its state."""
        self.obs = obs
        self.episodes.clear()


def collect(state: TrainState, envs: VecEnv, args: Args) -> EpisodeBatch | None:
    """One ε-greedy step of every run; returns the episodes that it ended, if any."""
    runs = torch.arange(args.num_envs)
    probs = epsilon_greedy_probs(state.q[runs, torch.from_numpy(state.obs)], args.epsilon)  # [R, A]
    action = sample_action(probs, torch.rand(args.num_envs, generator=state.generator, dtype=probs.dtype))
    arrays = envs.step(action.numpy())
    step, state.obs = Transition.of(state.obs, action, arrays), arrays.obs
    state.global_step += args.num_envs
    return state.episodes.add(step, probs[runs, action])


def update(state: TrainState, batch: EpisodeBatch, args: Args) -> dict[str, Tensor]:
    """Learns from whole episodes [L, E], one of each run that they name: on-policy forwards, off-policy backwards."""
    q, weights, runs, on_policy = state.q, state.weights, batch.runs, args.method == "on_policy"
    rows = q[runs, batch.next_obs]  # [L, E, A]
    probs = epsilon_greedy_probs(rows, args.epsilon if on_policy else 0.0)
    last = (probs * rows).sum(-1)  # [L, E] counts at a truncation only
    returns = discounted_returns(batch.reward, last, batch.terminated, batch.done, args.gamma)
    seen, errors = torch.zeros(q.shape, dtype=torch.bool), torch.zeros_like(returns)
    learned = torch.zeros_like(batch.active)  # [L, E] steps whose return moves a value
    ratio = torch.ones(len(runs), dtype=q.dtype)  # [E] ρ
    for t in range(len(returns)) if on_policy else reversed(range(len(returns))):
        counts, target, pair = batch.active[t], returns[t], (runs, batch.obs[t], batch.action[t])
        if on_policy and args.visits == "first":
            counts = counts & ~seen[pair]
            seen[pair] |= counts
        weight = counts.double()
        if args.importance == "weighted":
            weight = weight * ratio
        else:
            target = target * ratio
        weights[pair] += weight
        step = weight / weights[pair].clamp(min=1e-300) if args.learning_rate is None else args.learning_rate * weight
        learned[t] = weight > 0
        errors[t] = learned[t] * (target - q[pair])
        q[pair] += step * errors[t]
        if not on_policy:  # π takes the first of the best actions, as it stands now
            greedy = q[runs, batch.obs[t]].argmax(-1) == batch.action[t]
            ratio = torch.where(batch.active[t], ratio * greedy / batch.prob[t], ratio)
    return {"losses/td_error": mean_error(errors, learned.sum())} if learned.any() else {}


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
                batch = collect(state, envs, args)
            if batch is not None:
                with run.phase("update"):
                    run.metrics(update(state, batch, args))
            run.end_iteration(state)
        results, policy = run.results(state), zoo.table_policy(state.q[0])
        card = {**run.recorded, **results, "policy": policy.spec, "env_kwargs": present_world(envs, state.global_step)}
        zoo.save(run.run_dir / "policy", policy=policy, card=card)
        run.finish(results)
        if args.render:
            print(show(envs, state.q[0].amax(-1).numpy(), greedy_probs(state.q[0]).numpy()))


if __name__ == "__main__":
    main(parse_args(Args, PRESETS))
