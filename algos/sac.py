"""Soft Actor-Critic for continuous actions: off-policy, two critics, maximum entropy.

Haarnoja, Zhou, Hartikainen, Tucker, Ha, Tan, Kumar, Zhu, Gupta, Abbeel & Levine (2018), "Soft Actor-Critic Algorithms
and Applications", arXiv:1812.05905, algorithm 1. With B a batch from the replay, θ̄ the slow copies, a' ~ π_φ(·|s'):

    y      = r + γ(1 − terminated)( min_i Q_θ̄i(s', a') − α log π_φ(a'|s') )                equations 3 and 5
    J_Q(θ) = E_B[ Σ_i ½ (Q_θi(s, a) − y)² ]                                               equation 5
    J_π(φ) = E_B[ α log π_φ(f_φ(ε; s)|s) − min_i Q_θi(s, f_φ(ε; s)) ]                      equation 9
    J(α)   = E_B[ −α (log π_φ(a|s) + H̄) ],   H̄ = −dim A                                   equation 18
    θ̄      ← τθ + (1 − τ)θ̄
    f_φ    = tanh(μ + σ ε), stretched to the box of actions                               appendix C

Deviations from the paper, each with its reason:

 1. Actions are uniform in the box for the first --learning-starts steps, and nothing is learned: the first batches
    then cover the box. (So does the authors' code.)
 2. log σ is stretched from a tanh into [−5, 2] instead of being cut off at [−20, 2] as in the authors' code: a cut off
    output has no gradient. The critics' and the temperature's learning rate is 1e-3, the policy's 3e-4. Both as in
    CleanRL, whose results are the published ones that ours are compared with; the paper has 3e-4 for all.
 3. J(α) takes the log-prob that J_π took, before the policy's step, instead of sampling once more: no extra pass.
    Its gradient is taken for log α, which keeps α positive.
 4. An episode cut by the time limit bootstraps from its last observation: only a termination ends the sum of rewards.
 5. With N environments, N steps are taken and then N × --updates-per-step updates made, so that runs with 1 and with N
    make equally many. One environment, the default, is the paper's loop. CleanRL updates the policy twice every
    second step instead of once every step: the same number.

Run:    python algos/sac.py --env Hopper-v4
"""

import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from cleanrl_zoo import zoo
from cleanrl_zoo.core import aggregate, polyak_update, soft_q_target, squared_value_loss
from cleanrl_zoo.core.distributions import SquashedGaussian
from cleanrl_zoo.data.replay import Batch, Replay
from cleanrl_zoo.envs import EVAL_STREAM, VecEnv, VecStep, check_spaces, make_vec
from cleanrl_zoo.envs.episodes import on_arrays, run_episodes
from cleanrl_zoo.nn import Adam, EnsembleMLP, grad_norm, mlp, squashed_gaussian, uniform_fan_in
from cleanrl_zoo.run import EnvArgs, Run, check, compile_function, parse_args, torch_generator, usage_errors
from cleanrl_zoo.run.arguments import check_learning_starts
from cleanrl_zoo.run.precision import fast_matmul


@dataclass
class Args(EnvArgs):
    """Soft Actor-Critic for continuous actions."""

    env: str = "Hopper-v4"
    """Gymnasium's name of an environment with a bounded Box action space"""
    num_envs: int = 1
    """environments stepped side by side"""
    learning_rate: float = 3e-4
    """Adam's learning rate for the policy"""
    q_learning_rate: float = 1e-3
    """Adam's learning rate for the critics and the temperature"""
    gamma: float = 0.99
    """discount factor"""
    tau: float = 0.005
    """τ, weight of the critics in each step of their slow copies"""
    alpha: float | None = None
    """fixed temperature α; by default it is learned, beginning at 1"""
    buffer_size: int = 1_000_000
    """transitions that the replay holds"""
    learning_starts: int = 5000
    """steps with uniformly random actions before the first update"""
    updates_per_step: float = 1.0
    """updates per environment step, each of critics, policy and temperature"""
    batch_size: int = 256
    """transitions per update (B)"""
    hidden: tuple[int, ...] = (256, 256)
    """widths of the hidden layers of policy and critics"""

    def check(self) -> None:
        super().check()
        check(self, "batch_size", "hidden", at_least=1)
        check(self, "learning_rate", "q_learning_rate", "updates_per_step", "alpha", above=0)
        check(self, "gamma", at_least=0, at_most=1)
        check(self, "tau", above=0, at_most=1)
        check(self, "buffer_size", at_least=self.num_envs)
        check_learning_starts(self)

    @property
    def capacity(self) -> int:
        """Transitions that the replay has room for: no more than will ever be stored."""
        return min(self.buffer_size, self.total_timesteps + self.num_envs)


PRESETS = {
    "pendulum": {"env": "Pendulum-v1", "total_timesteps": 10_000, "learning_starts": 1000, "learning_rate": 1e-3},
    "debug": {"total_timesteps": 1024, "num_envs": 4, "learning_starts": 128, "updates_per_step": 0.0625,
              "batch_size": 32, "hidden": (32, 32), "compile": False, "eval_episodes": 2, "checkpoint_every": 512,
              "env_threads": 1, "log_every": 256},
}  # fmt: skip
LOG_STD_BOUNDS = (-5.0, 2.0)


class Agent(nn.Module):
    """A policy, two critics evaluated as one batched network, their slow copies, and the temperature."""

    def __init__(
        self, obs_dim: int, low: Tensor, high: Tensor, hidden: Sequence[int], alpha: float, generator: torch.Generator
    ) -> None:
        super().__init__()
        action_dim = len(low)
        self.actor = uniform_fan_in(mlp([obs_dim, *hidden, 2 * action_dim], "relu"), generator)
        self.critics = EnsembleMLP(2, [obs_dim + action_dim, *hidden, 1], "relu", generator)
        self.target_critics = deepcopy(self.critics).requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.full((1,), alpha).log())
        self.register_buffer("low", low)  # the box of actions, [A]
        self.register_buffer("high", high)

    def policy(self, obs: Tensor) -> SquashedGaussian:
        return squashed_gaussian(self.actor(obs), self.low, self.high, *LOG_STD_BOUNDS)


@dataclass
class TrainState:
    """All that changes during training; a checkpoint is this, the environments and the log's position."""

    agent: Agent
    actor_optimizer: Adam
    critic_optimizer: Adam
    alpha_optimizer: Adam
    replay: Replay
    obs: np.ndarray  # [N, D] what the next action is chosen on
    noise_generator: torch.Generator
    minibatch_generator: torch.Generator
    global_step: int = 0
    updates: int = 0

    @classmethod
    def create(cls, args: Args, envs: VecEnv) -> "TrainState":
        obs_shape, space = envs.single_observation_space.shape, envs.single_action_space
        low, high = (torch.as_tensor(bound, dtype=torch.float32) for bound in (space.low, space.high))
        alpha, generator = 1.0 if args.alpha is None else args.alpha, torch_generator(args.seed, "init")
        agent = Agent(obs_shape[0], low, high, args.hidden, alpha, generator).to(args.device)
        replay, obs = Replay(args.capacity, args.num_envs, obs_shape, space.shape, args.gamma), envs.reset()
        replay.begin(obs)
        return cls(
            agent=agent,
            actor_optimizer=Adam(agent.actor.parameters()),
            critic_optimizer=Adam(agent.critics.parameters()),
            alpha_optimizer=Adam([agent.log_alpha]),
            replay=replay,
            obs=obs,
            noise_generator=torch_generator(args.seed, "noise", args.device),
            minibatch_generator=torch_generator(args.seed, "minibatch"),
        )

    def cut(self, obs: np.ndarray) -> None:
        """Goes on in `obs` [N, D] after all episodes were dropped, as an engine does that cannot save its state."""
        self.obs = obs
        self.replay.begin(obs)


@torch.no_grad()
def act(agent: Agent, obs: Tensor, noise: Tensor) -> Tensor:
    """The action [N, A] sampled in `obs` [N, D] with standard normal `noise` [N, A]; inside the box."""
    return agent.policy(obs).sample(noise)[0]


def collect(state: TrainState, envs: VecEnv, act: Callable, args: Args) -> VecStep:
    """One step of every environment, stored in the replay: the first half of algorithm 1's loop."""
    agent, shape = state.agent, (args.num_envs, *state.agent.low.shape)
    if state.global_step < args.learning_starts:
        share = torch.rand(shape, generator=state.noise_generator, device=args.device)
        action = torch.lerp(agent.low, agent.high, share)  # [N, A]
    else:
        noise = torch.randn(shape, generator=state.noise_generator, device=args.device)
        action = act(agent, torch.as_tensor(state.obs, dtype=torch.float32, device=args.device), noise)
    action = action.cpu().numpy()
    step = envs.step(action)
    state.replay.add(action, step)
    state.obs = step.obs
    state.global_step += args.num_envs
    return step


STATS = ("losses/qf_loss", "losses/qf_values", "losses/policy_loss", "losses/entropy", "losses/alpha",
         "losses/grad_norm")  # fmt: skip


def update(state: TrainState, update_step: Callable, args: Args) -> dict[str, Tensor]:
    """The updates that have fallen due by this step: the second half of algorithm 1's loop."""
    agent, device = state.agent, args.device
    due = int((state.global_step - args.learning_starts) * args.updates_per_step) - state.updates
    if due <= 0:
        return {}
    shape = (due, 2, args.batch_size, *agent.low.shape)
    noise = torch.randn(shape, generator=state.noise_generator, device=device)
    rates = [torch.tensor(rate, device=device) for rate in (args.learning_rate, args.q_learning_rate)]
    optimizers = (state.actor_optimizer, state.critic_optimizer, state.alpha_optimizer)
    target_entropy = -float(len(agent.low)) if args.alpha is None else None
    constants, stats = (args.gamma, args.tau, target_entropy), []
    for step_noise in noise:
        batch = state.replay.sample(args.batch_size, state.minibatch_generator)
        batch = Batch(*(x.to(device) for x in batch))  # [B, ...]
        # cloned, since a replayed CUDA graph writes into the same memory again
        stats.append(update_step(agent, *optimizers, batch, step_noise, *rates, *constants).clone())
        state.updates += 1
    return dict(zip(STATS, torch.stack(stats).mean(0), strict=True))


def update_step(
    agent: Agent, actor_optimizer: Adam, critic_optimizer: Adam, alpha_optimizer: Adam, batch: Batch, noise: Tensor,
    learning_rate: Tensor, q_learning_rate: Tensor, gamma: float, tau: float, target_entropy: float | None,
) -> Tensor:  # fmt: skip
    """One gradient step of critics, policy and temperature; returns the numbers named by `STATS`.

    noise: standard normal [2, B, A], for the actions in next_obs and in obs. target_entropy None: α stays.
    """
    alpha = agent.log_alpha.detach().exp()  # [1]
    with torch.no_grad():
        next_action, next_logprob = agent.policy(batch.next_obs).sample(noise[0])  # [B, A], [B]
        next_q = agent.target_critics(torch.cat([batch.next_obs, next_action], -1)).squeeze(-1)  # [2, B]
        target = soft_q_target(batch.reward, next_q.amin(0), next_logprob, alpha, batch.terminated, gamma)  # [B]
    q_value = agent.critics(torch.cat([batch.obs, batch.action], -1)).squeeze(-1)  # [2, B]
    # equation 5
    q_loss = aggregate(squared_value_loss(q_value, target.expand_as(q_value)), mode="sum", denominator=len(target))
    critic_grads = torch.autograd.grad(q_loss, critic_optimizer.parameters)
    critic_optimizer.step(critic_grads, q_learning_rate)

    action, logprob = agent.policy(batch.obs).sample(noise[1])
    min_q = agent.critics(torch.cat([batch.obs, action], -1)).squeeze(-1).amin(0)  # [B]
    policy_loss = aggregate(alpha * logprob - min_q)  # equation 9
    actor_grads = torch.autograd.grad(policy_loss, actor_optimizer.parameters)
    actor_optimizer.step(actor_grads, learning_rate)

    entropy = -logprob.detach().mean()
    if target_entropy is not None:
        alpha_loss = (agent.log_alpha.exp() * (entropy - target_entropy)).sum()  # equation 18; of one number
        alpha_optimizer.step(torch.autograd.grad(alpha_loss, alpha_optimizer.parameters), q_learning_rate)
    polyak_update(agent.target_critics, agent.critics, tau)
    norm = grad_norm([*critic_grads, *actor_grads])
    return torch.stack([q_loss, q_value.mean(), policy_loss, entropy, alpha.squeeze(), norm]).detach()


def main(args: Args) -> None:
    with usage_errors():
        envs = make_vec(args.env, args.num_envs, args.seed, args.vec, threads=args.env_threads)
        check_spaces(envs, "box")
        space = envs.single_action_space
        if not np.isfinite([space.low, space.high]).all():
            raise ValueError(f"--env {args.env}: actions {space}: the bounds must be finite")
        eval_envs = make_vec(args.env, args.eval_episodes, args.seed, args.vec, EVAL_STREAM, args.env_threads)
        memory = Replay.plan(args.capacity, args.num_envs, envs.single_observation_space.shape, space.shape)

    def evaluate(state: TrainState) -> tuple[np.ndarray, np.ndarray]:
        """Returns and lengths of the deterministic policy's episodes: its squashed means."""
        agent = state.agent

        def mean_action(obs: Tensor) -> Tensor:
            return agent.policy(obs).mode()

        return run_episodes(eval_envs, on_arrays(mean_action, args.device))

    with Run(args, envs, evaluate) as run:
        print(memory, file=sys.stderr)
        fast_matmul(args.device)
        fast_act = compile_function(act, run.compile, args.device)
        fast_update_step = compile_function(update_step, run.compile, args.device)
        state = run.resume_or(lambda: TrainState.create(args, envs))
        while state.global_step < args.total_timesteps:
            with run.phase("collect"):
                step = collect(state, envs, fast_act, args)
            run.check_finite(rewards=step.reward, observations=step.final_obs)
            with run.phase("update"):
                run.metrics(update(state, fast_update_step, args))
            run.end_iteration(state)
        results = run.results(state)
        save_policy(run.run_dir / "policy", state.agent, args, envs, {**run.recorded, **results})
        run.finish(results)


def save_policy(folder: Path, agent: Agent, args: Args, envs: VecEnv, card: dict) -> None:
    """The policy as a file of its own, without the critics: `python -m cleanrl_zoo.zoo evaluate <folder>`."""
    sizes = [*envs.single_observation_space.shape, *args.hidden, 2 * len(agent.low)]
    card["policy"] = zoo.policy_spec(sizes, "relu", envs.single_action_space, LOG_STD_BOUNDS)
    zoo.save(folder, policy=zoo.Policy(card["policy"], agent.actor), card=card)


if __name__ == "__main__":
    main(parse_args(Args, PRESETS))
