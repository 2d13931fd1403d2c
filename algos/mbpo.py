"""Model-Based Policy Optimization: soft actor-critic on short imagined rollouts from real states.

Janner, Fu, Zhang & Levine (2019), "When to Trust Your Model: Model-Based Policy Optimization", arXiv:1906.08253,
algorithm 2. An ensemble of Gaussians p_i(r, s' | s, a) is fitted to all real transitions; every F real steps it is
fitted again, and M rollouts of k steps start in real states s, drawn uniformly:

    a_h ~ π(·|s_h),   i ~ elites,   (r_h, s_{h+1} − s_h) ~ N(μ_i(s_h, a_h), Σ_i(s_h, a_h))        section 4.2
    k(epoch) = min(max(x + (epoch − a)/(b − a)·(y − x), x), y), rounded down                       appendix C
    G updates of soft actor-critic per real step, on batches of which a share is real

The updates are those of algos/sac.py, with its equations:

    y    = r + γ(1 − terminated)( min_i Q_θ̄i(s', a') − α log π(a'|s') )
    J_Q  = E[ Σ_i ½ (Q_θi(s, a) − y)² ],   J_π = E[ α log π(a|s) − min_i Q_θi(s, a) ],   J(α) = E[ −α(log π + H̄) ]

Deviations from the paper, each with its reason:

 1. The paper draws the member of every row and step on its own. Here the rows are shuffled at every step and dealt out
    to the elites in turn: one batched product instead of one pass of every member over every row.
 2. The draws of a member's bootstrap sample and of the holdout are made once per transition and stay. The authors'
    code draws both anew at each fit, so that the holdout of one fit was learned from in the one before.
 3. A fit starts from the errors of the weights that it finds: a member that gets no better keeps them. The scales of
    the inputs, the bounds of the variances and Adam's moments move on all the same.
 4. The losses of the model are in nats, half of the authors': its weight decays and the pull on the bounds of the
    variances are halved as well, so that the minimum is the same.
 5. log σ of the policy is stretched from a tanh as in algos/sac.py.
 6. A fifth of all transitions is held out; the authors' code stops at 5,000.
 7. Terminations come from `envs/model_functions.py`, as in the paper, rewards from the model.
 8. The epochs of k's schedule count all real steps, the random ones at the start too; the authors' begin after those.
 9. Algorithm 2 fits once an epoch and rolls out at every step of it. Here both are done every F real steps, with F
    times the rollouts of one step: batches large enough to be fast.

The model is saved in <run folder>/model with the episodes of the last evaluation, which it never learned from:
`python benchmarks/world_model.py <run folder>` draws what it knows of them.

This file is longer than 300 lines: soft actor-critic stands here whole, beside the model's part of the algorithm.

Run:    python algos/mbpo.py --preset inverted_pendulum
Expect: 1000 in every evaluation from step 4,250 on, three seeds, in seven to nine minutes on one core; for the first
time at 2,000, 3,750 and 2,250 (results/model_based).
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
from cleanrl_zoo.data.model_data import ModelData, RecentBlocks
from cleanrl_zoo.data.replay import Batch, Replay
from cleanrl_zoo.envs import EVAL_STREAM, VecEnv, VecStep, check_spaces, make_vec
from cleanrl_zoo.envs.episodes import on_arrays, played_episodes, run_episodes
from cleanrl_zoo.envs.model_functions import termination
from cleanrl_zoo.nn import (
    Adam,
    EnsembleMLP,
    GaussianEnsemble,
    fit,
    fit_step,
    grad_norm,
    mlp,
    save_model,
    squashed_gaussian,
    uniform_fan_in,
)
from cleanrl_zoo.run import EnvArgs, Run, check, compile_function, parse_args, torch_generator, usage_errors
from cleanrl_zoo.run.arguments import check_learning_starts


@dataclass
class Args(EnvArgs):
    """Model-Based Policy Optimization."""

    env: str = "Hopper-v4"
    """environment with a bounded Box action space whose termination the model knows"""
    num_envs: int = 1
    """environments stepped side by side"""
    total_timesteps: int = 125_000
    """real environment steps of the whole run"""
    learning_rate: float = 3e-4
    """Adam's learning rate for policy, critics and temperature"""
    gamma: float = 0.99
    """discount factor"""
    tau: float = 0.005
    """τ, weight of the critics in each step of their slow copies"""
    target_entropy: float | None = -1.0
    """H̄ in nats; the published ones are nearer to 0 than −dim A, which None stands for"""
    learning_starts: int = 5000
    """real steps with uniformly random actions before the first fit"""
    updates_per_step: float = 20.0
    """G, updates per real step"""
    batch_size: int = 256
    """transitions per update (B)"""
    real_share: float = 0.05
    """share of a batch that comes from the environment"""
    hidden: tuple[int, ...] = (256, 256)
    """widths of the hidden layers of policy and critics"""
    members: int = 7
    """networks in the model (E)"""
    elites: int = 5
    """of them that rollouts use"""
    model_hidden: tuple[int, ...] = (200, 200, 200, 200)
    """widths of the hidden layers of the model; with four it has the published weight decay, else none"""
    model_learning_rate: float = 1e-3
    """Adam's learning rate for the model"""
    model_every: int = 250
    """F, real steps between two fits of the model, each followed by rollouts"""
    model_patience: int = 5
    """epochs without a better holdout error that end a fit"""
    rollouts_per_step: int = 400
    """imagined rollouts per real step: M = F times as many after each fit"""
    rollout_length: tuple[int, int, int, int] = (20, 100, 1, 15)
    """a b x y: k grows from x at epoch a to y at epoch b; an epoch is 1000 real steps"""
    model_retain: int = 1000
    """real steps for which imagined transitions are kept"""
    eval_every: int = 1000
    """real steps between two evaluations of the deterministic policy; 0: only at the end"""
    log_every: int = 1000
    """real steps between two rows of the log; metrics are means over the interval"""
    checkpoint_every: int = 10_000
    """real steps between two checkpoints; 0: only at the end"""

    def check(self) -> None:
        super().check()
        check(self, "batch_size", "hidden", "members", "elites", "model_hidden", "model_every", "model_patience",
              "rollouts_per_step", at_least=1)  # fmt: skip
        check(self, "learning_rate", "model_learning_rate", above=0)
        check(self, "updates_per_step", above=0, at_most=1000)
        check(self, "gamma", "real_share", at_least=0, at_most=1)
        check(self, "tau", above=0, at_most=1)
        check(self, "target_entropy")
        check_learning_starts(self)
        if self.elites > self.members:
            raise ValueError(f"--elites {self.elites}: must be at most --members {self.members}")
        if self.model_retain < self.model_every:
            raise ValueError(f"--model-retain {self.model_retain}: must be at least --model-every {self.model_every}")
        first, last, shortest, longest = self.rollout_length
        if not (0 <= first < last and 1 <= shortest <= longest):
            given = " ".join(map(str, self.rollout_length))
            raise ValueError(f"--rollout-length {given}: a b x y must have 0 <= a < b and 1 <= x <= y")
        if self.learning_starts < 10:
            raise ValueError(f"--learning-starts {self.learning_starts}: must be at least 10, the first fit's data")


# A half, on HalfCheetah a quarter, of the published updates, half the fits, and shorter: hours on one core, not a day.
LIGHT = {"updates_per_step": 10.0, "model_every": 500, "model_patience": 3}
PRESETS = {
    "hopper": {"env": "Hopper-v4", "total_timesteps": 125_000},
    "hopper_light": {"env": "Hopper-v4", "total_timesteps": 60_000, **LIGHT},
    "half_cheetah": {"env": "HalfCheetah-v4", "total_timesteps": 400_000, "updates_per_step": 40.0,
                     "target_entropy": -3.0, "rollout_length": (20, 150, 1, 1)},
    "half_cheetah_light": {"env": "HalfCheetah-v4", "total_timesteps": 20_000, "target_entropy": -3.0,
                           "rollout_length": (20, 150, 1, 1), **LIGHT},
    "walker2d": {"env": "Walker2d-v4", "total_timesteps": 300_000, "target_entropy": -3.0,
                 "rollout_length": (20, 150, 1, 1)},
    "inverted_pendulum": {"env": "InvertedPendulum-v4", "total_timesteps": 5000, "learning_starts": 500,
                          "updates_per_step": 10.0, "target_entropy": -0.05, "rollout_length": (1, 15, 1, 1),
                          "rollouts_per_step": 100, "eval_every": 250, "log_every": 250, "checkpoint_every": 1000},
    "debug": {"total_timesteps": 320, "learning_starts": 64, "model_every": 64, "model_patience": 1, "members": 3,
              "elites": 2, "model_hidden": (16, 16), "hidden": (16, 16), "updates_per_step": 1.0, "batch_size": 32,
              "rollouts_per_step": 4, "rollout_length": (0, 1, 1, 5), "compile": False, "eval_episodes": 2,
              "checkpoint_every": 96, "log_every": 96, "eval_every": 0, "env_threads": 1},
}  # fmt: skip
LOG_STD_BOUNDS = (-5.0, 2.0)
WEIGHT_DECAY = (1.25e-5, 2.5e-5, 3.75e-5, 3.75e-5, 5e-5)  # of the model's layers, for a loss in nats
ROWS = 2048  # rows per elite that one compiled call imagines


class Agent(nn.Module):
    """A policy, two critics evaluated as one batched network, their slow copies, and the temperature."""

    def __init__(
        self, obs_dim: int, low: Tensor, high: Tensor, hidden: Sequence[int], generator: torch.Generator
    ) -> None:
        super().__init__()
        action_dim = len(low)
        self.actor = uniform_fan_in(mlp([obs_dim, *hidden, 2 * action_dim], "relu"), generator)
        self.critics = EnsembleMLP(2, [obs_dim + action_dim, *hidden, 1], "relu", generator)
        self.target_critics = deepcopy(self.critics).requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.zeros(1))
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
    model: GaussianEnsemble
    model_optimizer: Adam
    replay: Replay  # real transitions
    model_data: ModelData  # the same as inputs and targets of the model
    imagined: RecentBlocks  # rows of obs, action, reward, next_obs, terminated
    obs: np.ndarray  # [N, D] what the next action is chosen on
    noise_generator: torch.Generator
    minibatch_generator: torch.Generator
    model_generator: torch.Generator
    global_step: int = 0
    updates: int = 0
    fits: int = 0

    @classmethod
    def create(cls, args: Args, envs: VecEnv) -> "TrainState":
        obs_dim, space = envs.single_observation_space.shape[0], envs.single_action_space
        low, high = (torch.as_tensor(bound, dtype=torch.float32) for bound in (space.low, space.high))
        action_dim, generator = len(low), torch_generator(args.seed, "init")
        agent = Agent(obs_dim, low, high, args.hidden, generator).to(args.device)
        model = GaussianEnsemble(
            args.members, obs_dim + action_dim, 1 + obs_dim, args.model_hidden, args.elites, generator=generator
        ).to(args.device)
        capacity = args.total_timesteps + args.num_envs
        replay = Replay(capacity, args.num_envs, (obs_dim,), (action_dim,), args.gamma)
        obs = envs.reset()
        replay.begin(obs)
        return cls(
            agent=agent,
            actor_optimizer=Adam(agent.actor.parameters()),
            critic_optimizer=Adam(agent.critics.parameters()),
            alpha_optimizer=Adam([agent.log_alpha]),
            model=model,
            model_optimizer=Adam(model.parameters()),
            replay=replay,
            model_data=ModelData(capacity, obs_dim + action_dim, 1 + obs_dim, args.members),
            imagined=RecentBlocks(args.model_retain // args.model_every, 2 * obs_dim + action_dim + 2),
            obs=obs,
            noise_generator=torch_generator(args.seed, "noise", args.device),
            minibatch_generator=torch_generator(args.seed, "minibatch"),
            model_generator=torch_generator(args.seed, "model"),
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
    """One step of every environment, stored for the critics and for the model."""
    agent, shape = state.agent, (args.num_envs, *state.agent.low.shape)
    obs = torch.as_tensor(state.obs, dtype=torch.float32)  # [N, D]
    if state.global_step < args.learning_starts:
        share = torch.rand(shape, generator=state.noise_generator, device=args.device)
        action = torch.lerp(agent.low, agent.high, share)  # [N, A]
    else:
        noise = torch.randn(shape, generator=state.noise_generator, device=args.device)
        action = act(agent, obs.to(args.device), noise)
    action = action.cpu()
    step = envs.step(action.numpy())
    state.replay.add(action.numpy(), step)
    change = torch.as_tensor(step.final_obs, dtype=torch.float32) - obs
    reward = torch.as_tensor(step.reward, dtype=torch.float32).unsqueeze(-1)
    state.model_data.add(torch.cat([obs, action], -1), torch.cat([reward, change], -1))
    state.obs = step.obs
    state.global_step += args.num_envs
    return step


def horizon(global_step: int, schedule: tuple[int, int, int, int]) -> int:
    """k, the length of the rollouts that start now; `schedule` is (a, b, x, y), appendix C."""
    first, last, shortest, longest = schedule
    share = (global_step / 1000 - first) / (last - first)
    return int(min(max(shortest + share * (longest - shortest), shortest), longest))


def fit_model(state: TrainState, fit_step: Callable, args: Args) -> dict[str, Tensor | float]:
    """Fits the model to all real transitions (algorithm 2, line 3)."""
    data, device = state.model_data, args.device
    data.commit(state.model_generator)
    decay = WEIGHT_DECAY if len(args.model_hidden) + 1 == len(WEIGHT_DECAY) else ()
    fitted = fit(
        state.model, state.model_optimizer, data.inputs.to(device), data.targets.to(device),
        data.bootstrap.to(device), data.holdout.to(device), state.model_generator, args.model_learning_rate, decay,
        patience=args.model_patience, step=fit_step,
    )  # fmt: skip
    state.fits += 1
    return {
        "losses/model_nll": fitted.train_nll.mean(),
        "losses/model_error": fitted.holdout_error[state.model.elites].mean(),
        "charts/model_epochs": fitted.epochs,
        **{f"model/error_{i}": error for i, error in enumerate(fitted.holdout_error)},
    }


@torch.no_grad()
def imagine_step(
    agent: Agent, model: GaussianEnsemble, obs: Tensor, action_noise: Tensor, target_noise: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of the model: obs [K, C, D], C rows for each elite -> action, reward [K, C], next_obs."""
    action = agent.policy(obs).sample(action_noise)[0]  # [K, C, A]
    target = model.predict(torch.cat([obs, action], -1), model.elites).sample(target_noise)  # [K, C, 1 + D]
    return action, target[..., 0], obs + target[..., 1:]


def imagine(state: TrainState, imagine_step: Callable, ended: Callable, args: Args) -> dict[str, Tensor | float]:
    """Rollouts of k steps from real states (algorithm 2, lines 6 to 8); a row that ended is not continued."""
    generator, device, elites = state.noise_generator, args.device, len(state.model.elites)
    rollouts, length = args.rollouts_per_step * args.model_every, horizon(state.global_step, args.rollout_length)
    obs = state.replay.sample(rollouts, state.minibatch_generator).obs.to(device, copy=True)  # [M, D]
    chunk = min(ROWS, -(-rollouts // elites)) * elites
    blocks = []
    for _ in range(length):
        rows = len(obs)
        order = torch.randperm(rows, generator=state.model_generator)  # who is dealt to which elite
        fill = torch.arange(-(-rows // chunk) * chunk) % rows  # whole chunks: shapes stay as they were compiled
        padded = obs[order][fill].view(-1, chunk // elites, elites, obs.shape[-1]).transpose(1, 2).contiguous()
        steps = []
        for part in padded:
            action_noise = torch.randn((*part.shape[:2], len(state.agent.low)), generator=generator, device=device)
            target_noise = torch.randn((*part.shape[:2], 1 + part.shape[-1]), generator=generator, device=device)
            outputs = imagine_step(state.agent, state.model, part, action_noise, target_noise)
            steps.append([x.transpose(0, 1).flatten(0, 1) for x in (part, *outputs)])
        start, action, reward, next_obs = (torch.cat(parts)[:rows] for parts in zip(*steps, strict=True))
        terminated = ended(next_obs)  # [rows]
        flags = torch.stack([reward, terminated.float()], -1)
        blocks.append(torch.cat([start, action, flags[:, :1], next_obs, flags[:, 1:]], -1))
        obs = next_obs[~terminated]
        if len(obs) == 0:
            break
    state.imagined.push(torch.cat(blocks).cpu())
    return {"charts/rollout_length": length, "charts/rollout_survival": len(obs) / rollouts}


STATS = ("losses/qf_loss", "losses/qf_values", "losses/qf_real", "losses/qf_model", "losses/policy_loss",
         "losses/entropy", "losses/alpha", "losses/grad_norm")  # fmt: skip


def mixed_batches(state: TrainState, count: int, args: Args) -> list[Batch]:
    """`count` batches [B, ...], the first `real_share` of each from the environment, the rest imagined."""
    obs_dim, action_dim = state.obs.shape[-1], len(state.agent.low)
    real = int(args.real_share * args.batch_size)
    parts = []
    if real:
        batch = state.replay.sample(count * real, state.minibatch_generator)
        flags = (batch.reward.unsqueeze(-1), batch.next_obs, batch.terminated.unsqueeze(-1))
        parts.append(torch.cat([batch.obs, batch.action, *flags], -1).view(count, real, -1))
    if real < args.batch_size:
        parts.append(state.imagined.sample((count, args.batch_size - real), state.minibatch_generator))
    rows = torch.cat(parts, 1).to(args.device)  # [count, B, W]
    obs, action, reward, next_obs, terminated = rows.split([obs_dim, action_dim, 1, obs_dim, 1], -1)
    nothing = torch.zeros_like(reward)
    fields = (obs, action, reward.squeeze(-1), next_obs, terminated.squeeze(-1), nothing.squeeze(-1),
              (nothing + args.gamma).squeeze(-1))  # fmt: skip
    return [Batch(*(field.contiguous() for field in batch)) for batch in zip(*fields, strict=True)]


def update(state: TrainState, update_step: Callable, args: Args) -> dict[str, Tensor | float]:
    """The updates that have fallen due by this step (algorithm 2, lines 9 and 10)."""
    agent, device = state.agent, args.device
    due = int((state.global_step - args.learning_starts) * args.updates_per_step) - state.updates
    if due <= 0 or state.fits == 0:
        return {}
    shape = (due, 2, args.batch_size, *agent.low.shape)
    noise = torch.randn(shape, generator=state.noise_generator, device=device)
    rate = torch.tensor(args.learning_rate, device=device)
    optimizers = (state.actor_optimizer, state.critic_optimizer, state.alpha_optimizer)
    target_entropy = -float(len(agent.low)) if args.target_entropy is None else args.target_entropy
    real = int(args.real_share * args.batch_size)
    stats = []
    for batch, step_noise in zip(mixed_batches(state, due, args), noise, strict=True):
        # cloned, since a replayed CUDA graph writes into the same memory again
        stats.append(
            update_step(agent, *optimizers, batch, step_noise, rate, args.gamma, args.tau, target_entropy, real).clone()
        )
        state.updates += 1
    named = dict(zip(STATS, torch.stack(stats).mean(0), strict=True))
    if real in (0, args.batch_size):
        del named["losses/qf_real" if real == 0 else "losses/qf_model"]  # of no transition
    return named | {"charts/model_share": 1.0 - real / args.batch_size}


def update_step(
    agent: Agent, actor_optimizer: Adam, critic_optimizer: Adam, alpha_optimizer: Adam, batch: Batch, noise: Tensor,
    learning_rate: Tensor, gamma: float, tau: float, target_entropy: float, real: int,
) -> Tensor:  # fmt: skip
    """One gradient step of critics, policy and temperature; returns the numbers named by `STATS`.

    noise: standard normal [2, B, A], for the actions in next_obs and in obs. The batch's first `real` rows are real.
    """
    alpha = agent.log_alpha.detach().exp()  # [1]
    with torch.no_grad():
        next_action, next_logprob = agent.policy(batch.next_obs).sample(noise[0])  # [B, A], [B]
        next_q = agent.target_critics(torch.cat([batch.next_obs, next_action], -1)).squeeze(-1)  # [2, B]
        target = soft_q_target(batch.reward, next_q.amin(0), next_logprob, alpha, batch.terminated, gamma)  # [B]
    q_value = agent.critics(torch.cat([batch.obs, batch.action], -1)).squeeze(-1)  # [2, B]
    q_loss = aggregate(squared_value_loss(q_value, target.expand_as(q_value)), mode="sum", denominator=len(target))
    critic_grads = torch.autograd.grad(q_loss, critic_optimizer.parameters)
    critic_optimizer.step(critic_grads, learning_rate)

    action, logprob = agent.policy(batch.obs).sample(noise[1])
    min_q = agent.critics(torch.cat([batch.obs, action], -1)).squeeze(-1).amin(0)  # [B]
    policy_loss = aggregate(alpha * logprob - min_q)
    actor_grads = torch.autograd.grad(policy_loss, actor_optimizer.parameters)
    actor_optimizer.step(actor_grads, learning_rate)

    entropy = -logprob.detach().mean()
    alpha_loss = (agent.log_alpha.exp() * (entropy - target_entropy)).sum()  # of one number
    alpha_optimizer.step(torch.autograd.grad(alpha_loss, alpha_optimizer.parameters), learning_rate)
    polyak_update(agent.target_critics, agent.critics, tau)
    of_real, of_model = q_value[:, :real].sum() / max(2 * real, 1), q_value[:, real:].sum()
    of_model = of_model / max(2 * (len(target) - real), 1)
    numbers = (q_loss, q_value.mean(), of_real, of_model, policy_loss, entropy, alpha.squeeze())
    return torch.stack([*numbers, grad_norm([*critic_grads, *actor_grads])]).detach()


def main(args: Args) -> None:
    with usage_errors():
        envs = make_vec(args.env, args.num_envs, args.seed, args.vec, threads=args.env_threads)
        check_spaces(envs, "box")
        ended = termination(args.env)
        space = envs.single_action_space
        if not np.isfinite([space.low, space.high]).all():
            raise ValueError(f"--env {args.env}: actions {space}: the bounds must be finite")
        eval_envs = make_vec(args.env, args.eval_episodes, args.seed, args.vec, EVAL_STREAM, args.env_threads)
        capacity = args.total_timesteps + args.num_envs
        memory = Replay.plan(capacity, args.num_envs, envs.single_observation_space.shape, space.shape)
        rows = (
            args.model_retain // args.model_every * args.model_every * args.rollouts_per_step * args.rollout_length[3]
        )
        row_bytes = 4 * (2 * envs.single_observation_space.shape[0] + space.shape[0] + 2)
        memory += f"; imagined: up to {rows:,} transitions, {rows * row_bytes / 1e9:.3g} GB"

    played: list[tuple[np.ndarray, np.ndarray]] = []  # obs and actions of the last evaluation's episodes

    def evaluate(state: TrainState) -> tuple[np.ndarray, np.ndarray]:
        """Returns and lengths of the deterministic policy's episodes: its squashed means."""
        agent, steps = state.agent, []

        def mean_action(obs: Tensor) -> Tensor:
            return agent.policy(obs).mode()

        outcome = run_episodes(eval_envs, on_arrays(mean_action, args.device), steps=steps)
        played[:] = played_episodes(steps, outcome[1])
        return outcome

    with Run(args, envs, evaluate) as run:
        print(memory, file=sys.stderr)
        functions = (act, update_step, fit_step, imagine_step)
        fast_act, fast_update, fast_fit, fast_imagine = (
            compile_function(function, run.compile, args.device) for function in functions
        )
        state = run.resume_or(lambda: TrainState.create(args, envs))
        while state.global_step < args.total_timesteps:
            with run.phase("collect"):
                step = collect(state, envs, fast_act, args)
            run.check_finite(rewards=step.reward, observations=step.final_obs)
            if state.global_step >= args.learning_starts + state.fits * args.model_every:
                with run.phase("model"):
                    run.metrics(fit_model(state, fast_fit, args))
                    run.metrics(imagine(state, fast_imagine, ended, args))
                run.check_finite(**{"a prediction of the model": state.imagined.rows[-state.imagined.sizes[-1] :]})
            with run.phase("update"):
                run.metrics(update(state, fast_update, args))
            run.end_iteration(state)
        results = run.results(state)
        save_policy(run.run_dir / "policy", state.agent, args, envs, {**run.recorded, **results})
        if not played:  # resumed after the last evaluation
            evaluate(state)
        save_model(run.run_dir / "model", state.model, played, {**run.recorded, **results})
        run.finish(results)


def save_policy(folder: Path, agent: Agent, args: Args, envs: VecEnv, card: dict) -> None:
    """The policy as a file of its own, without critics and model: `python -m cleanrl_zoo.zoo evaluate <folder>`."""
    sizes = [*envs.single_observation_space.shape, *args.hidden, 2 * len(agent.low)]
    card["policy"] = zoo.policy_spec(sizes, "relu", envs.single_action_space, LOG_STD_BOUNDS)
    zoo.save(folder, policy=zoo.Policy(card["policy"], agent.actor), card=card)


if __name__ == "__main__":
    main(parse_args(Args, PRESETS))
