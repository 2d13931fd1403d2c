"""Proximal Policy Optimization with the clipped surrogate, for continuous actions.

Schulman, Wolski, Dhariwal, Radford & Klimov (2017), "Proximal Policy Optimization Algorithms", arXiv:1707.06347.

    r(θ)   = π_θ(a|s) / π_old(a|s)                                                        section 3
    L_clip = E[ min( r A, clip(r, 1−ε, 1+ε) A ) ]                                         equation 7
    L      = −L_clip + c₁ (V(s) − R)² − c₂ H[π(·|s)]                                      equation 9, to be minimised
    A_t    = δ_t + γλ A_{t+1},   δ_t = r_t + γ V(s_{t+1}) − V(s_t)                         equations 11, 12
    R_t    = A_t + V(s_t)                                 both with V as it was before the update

Deviations from the paper, each with its reason:

 1. Observations are centred and divided by running scales, rewards divided by the running deviation of the discounted
    return, both clipped to ±10: tasks differ in their units. The observation scales are frozen while a rollout is
    collected and trained on, so that the ratio of the first minibatch is 1 (up to rounding).
 2. Advantages are whitened per minibatch, the whole gradient is clipped to a norm of 0.5: less to tune per reward.
 3. Weights begin orthogonal, with gain √2 in hidden layers and 0.01 for the mean action, which so begins near zero.
 4. Adam's ε is 1e-5, and its learning rate falls linearly to zero, so that the policy settles.
 5. An episode cut by the time limit bootstraps from the value of its last observation; the paper does not say.
 6. The squared value error is halved; it is not clipped, which did not help in Andrychowicz et al. (2021).
 7. An action sampled outside the box is learned from as it is; only the copy that the environment gets is clipped.
 8. Eight environments × 256 steps instead of one × 2048: faster, and no worse (results/num_envs).

Run:    python algos/ppo_continuous.py --env Hopper-v4
Expect: 2754 ± 384 (last 100 training episodes, five seeds), in one and a half to four and a half minutes on two cores.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from cleanrl_zoo import zoo
from cleanrl_zoo.core import aggregate, clipped_surrogate, explained_variance, gae, k3, normalize, squared_value_loss
from cleanrl_zoo.core.distributions import DiagGaussian, policy_noise
from cleanrl_zoo.data.rollout import Rollout
from cleanrl_zoo.envs import EVAL_STREAM, ObsNormalizer, RewardScaler, VecEnv, check_spaces, make_vec
from cleanrl_zoo.envs.episodes import on_arrays, run_episodes
from cleanrl_zoo.nn import Adam, clip_grad_norm, mlp, mlp_on_arrays
from cleanrl_zoo.run import EnvArgs, Run, compile_function, parse_args, torch_generator, usage_errors
from cleanrl_zoo.run.arguments import check, check_divides_batch


@dataclass
class Args(EnvArgs):
    """Proximal Policy Optimization (clipped) for continuous actions."""

    env: str = "Hopper-v4"
    """Gymnasium's name of an environment with a Box action space"""
    num_steps: int = 256
    """steps per environment and iteration (T); T × --num-envs transitions are one batch"""
    learning_rate: float = 3e-4
    """Adam's learning rate in the first iteration"""
    anneal_lr: bool = True
    """let the learning rate fall linearly to zero"""
    gamma: float = 0.99
    """discount factor"""
    gae_lambda: float = 0.95
    """λ of the generalised advantage estimate"""
    scale_rewards: bool = True
    """divide rewards by the running standard deviation of the discounted return"""
    num_minibatches: int = 32
    """minibatches per epoch; must divide the batch"""
    update_epochs: int = 10
    """passes over the batch"""
    clip_coef: float = 0.2
    """ε of the clipped surrogate"""
    vf_coef: float = 0.5
    """c₁, weight of the halved squared value error"""
    ent_coef: float = 0.0
    """c₂, weight of the entropy bonus"""
    max_grad_norm: float = 0.5
    """norm to which the gradient is clipped"""
    target_kl: float | None = None
    """end the iteration's update after the epoch whose approx_kl (nats) exceeds this"""
    hidden: tuple[int, ...] = (64, 64)
    """widths of the hidden layers of policy and value network"""

    def check(self) -> None:
        super().check()
        check(self, "num_steps", "num_minibatches", "update_epochs", "hidden", at_least=1)
        check(self, "learning_rate", "clip_coef", "max_grad_norm", "target_kl", above=0)
        check(self, "gamma", "gae_lambda", at_least=0, at_most=1)
        check(self, "vf_coef", "ent_coef", at_least=0)
        check_divides_batch(self, "num_minibatches")

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps


PRESETS = {
    "cleanrl": {"num_envs": 1, "num_steps": 2048},  # the sizes that CleanRL's results were made with
    # RL Baselines3 Zoo's, without its state-dependent noise; here observations and rewards are scaled, as by default in
    # this file, and there neither is. Its vf_coef of 0.5 belongs to an error that is not halved.
    "pendulum": {"env": "Pendulum-v1", "total_timesteps": 100_000, "num_envs": 4, "num_steps": 1024,
                 "num_minibatches": 64, "learning_rate": 1e-3, "anneal_lr": False, "gamma": 0.9, "vf_coef": 1.0,
                 "eval_every": 20_000},
    "debug": {"total_timesteps": 1024, "num_envs": 2, "num_steps": 128, "num_minibatches": 4, "update_epochs": 2,
              "compile": False, "eval_episodes": 2, "checkpoint_every": 512, "env_threads": 1, "log_every": 256},
}  # fmt: skip


class Agent(nn.Module):
    """Two separate networks, as in the paper's section 6.1; the standard deviation does not depend on the state."""

    def __init__(
        self, obs_dim: int, low: Tensor, high: Tensor, hidden: Sequence[int], generator: torch.Generator
    ) -> None:
        super().__init__()
        gains = [2**0.5] * len(hidden)
        self.obs_norm = ObsNormalizer((obs_dim,))
        self.actor = mlp([obs_dim, *hidden, len(low)], "tanh", [*gains, 0.01], generator)
        self.critic = mlp([obs_dim, *hidden, 1], "tanh", [*gains, 1.0], generator)
        self.log_std = nn.Parameter(torch.zeros(len(low)))
        self.register_buffer("low", low)  # the box of allowed actions, [A]
        self.register_buffer("high", high)

    def policy(self, normalized_obs: Tensor) -> DiagGaussian:
        return DiagGaussian(self.actor(normalized_obs), self.log_std)

    def value(self, normalized_obs: Tensor) -> Tensor:
        return self.critic(normalized_obs).squeeze(-1)


@dataclass
class TrainState:
    """All that changes during training; a checkpoint is this, the environments and the log's position."""

    agent: Agent
    optimizer: Adam
    reward_scaler: RewardScaler
    obs: np.ndarray  # [N, D] what the next action is chosen on
    noise_generator: torch.Generator
    minibatch_generator: torch.Generator
    global_step: int = 0
    iteration: int = 0

    @classmethod
    def create(cls, args: Args, envs: VecEnv) -> "TrainState":
        obs_dim, space = envs.single_observation_space.shape[0], envs.single_action_space
        low, high = (torch.as_tensor(bound, dtype=torch.float32) for bound in (space.low, space.high))
        agent = Agent(obs_dim, low, high, args.hidden, torch_generator(args.seed, "init")).to(args.device)
        return cls(
            agent=agent,
            optimizer=Adam(agent.parameters(), eps=1e-5),
            reward_scaler=RewardScaler(args.num_envs, args.gamma),
            obs=envs.reset(),
            noise_generator=torch_generator(args.seed, "noise", args.device),
            minibatch_generator=torch_generator(args.seed, "minibatch", args.device),
        )

    def cut(self, obs: np.ndarray) -> None:
        """Goes on in `obs` [N, D] after all episodes were dropped, as an engine does that cannot save its state."""
        self.obs = obs
        self.reward_scaler.running_return.zero_()


def collect(state: TrainState, envs: VecEnv, rollout: Rollout, args: Args) -> None:
    """Fills `rollout` [T, N] with the current policy: the loop over actors of algorithm 1."""
    agent, space = state.agent, envs.single_action_space
    mean_action = mlp_on_arrays(agent.actor, agent.obs_norm.on_arrays())
    noise = policy_noise(rollout.actions.shape, agent.log_std, state.noise_generator, args.device)  # [T, N, A]
    for t, step_noise in enumerate(noise.cpu().numpy()):
        obs = rollout.put_obs(t, state.obs)  # [N, D]
        action = mean_action(obs) + step_noise  # [N, A]: μ + σε
        step = envs.step(action.clip(space.low, space.high))
        rollout.put_step(t, action, step)
        state.obs = step.obs
    state.global_step += args.batch_size


STATS = ("losses/policy_loss", "losses/value_loss", "losses/entropy", "losses/approx_kl", "losses/clipfrac",
         "losses/clipfrac_low", "losses/clipfrac_high", "losses/grad_norm")  # fmt: skip


def update(state: TrainState, rollout: Rollout, minibatch_step: Callable, args: Args) -> dict[str, Tensor | float]:
    """Advantages, then K epochs of shuffled minibatches: the rest of algorithm 1."""
    agent, device = state.agent, args.device
    rewards = state.reward_scaler(rollout.rewards, rollout.done) if args.scale_rewards else rollout.rewards  # [T, N]
    rollout = rollout.to(device)
    terminated, done = rollout.terminated, rollout.done
    with torch.no_grad():
        obs = agent.obs_norm(rollout.obs)  # [T, N, D]
        values, next_values = agent.value(obs), agent.value(agent.obs_norm(rollout.final_obs))  # [T, N]
        rewards = rewards.to(device, values.dtype)
        advantages = gae(rewards, values, next_values, terminated, done, args.gamma, args.gae_lambda)  # [T, N]
        returns = advantages + values
        old_logprob = agent.policy(obs).log_prob(rollout.actions)

    batch = [x.flatten(0, 1) for x in (obs, rollout.actions, old_logprob, advantages, returns)]  # [T·N, ...]
    remaining = 1.0 - state.iteration * args.batch_size / args.total_timesteps if args.anneal_lr else 1.0
    learning_rate = torch.tensor(args.learning_rate * remaining, device=device)
    coefs, epochs = (args.clip_coef, args.vf_coef, args.ent_coef, args.max_grad_norm), []
    for _ in range(args.update_epochs):
        order = torch.randperm(args.batch_size, generator=state.minibatch_generator, device=device)
        rows = order.view(args.num_minibatches, -1)  # [minibatches, M]
        # cloned, since a replayed CUDA graph writes into the same memory again
        stats = [minibatch_step(agent, state.optimizer, batch, index, learning_rate, *coefs).clone() for index in rows]
        epochs.append(torch.stack(stats).mean(0))
        if args.target_kl is not None and epochs[-1][STATS.index("losses/approx_kl")] > args.target_kl:
            break
    agent.obs_norm.update(rollout.obs)  # only now: the old log-probs belong to the scales of the rollout
    state.iteration += 1
    return {
        **dict(zip(STATS, torch.stack(epochs).mean(0), strict=True)),
        "losses/approx_kl": epochs[-1][STATS.index("losses/approx_kl")],
        "losses/epochs": float(len(epochs)),
        "losses/explained_variance": explained_variance(values, returns),
        "charts/learning_rate": learning_rate,
        "charts/action_std": agent.log_std.detach().exp().mean(),
    }


def minibatch_step(
    agent: Agent, optimizer: Adam, batch: list[Tensor], index: Tensor, learning_rate: Tensor,
    clip_coef: float, vf_coef: float, ent_coef: float, max_grad_norm: float,
) -> Tensor:  # fmt: skip
    """Loss, gradient and one optimizer step on the rows `index` [M]; returns the numbers named by `STATS`."""
    obs, actions, old_logprob, advantages, returns = (x[index] for x in batch)  # [M, ...]
    policy = agent.policy(obs)
    logprob = policy.log_prob(actions)  # [M]
    policy_loss = aggregate(clipped_surrogate(logprob, old_logprob, normalize(advantages), clip_coef, clip_coef))
    value_loss = aggregate(squared_value_loss(agent.value(obs), returns))
    entropy = policy.entropy().mean()
    loss = policy_loss + vf_coef * value_loss - ent_coef * entropy  # equation 9, to be minimised

    grads = torch.autograd.grad(loss, optimizer.parameters)
    grads, grad_norm = clip_grad_norm(grads, max_grad_norm)
    optimizer.step(grads, learning_rate)

    with torch.no_grad():
        ratio = (logprob - old_logprob).exp()
        low, high = (ratio < 1 - clip_coef).float().mean(), (ratio > 1 + clip_coef).float().mean()
        kl = k3(old_logprob, logprob).mean()
        return torch.stack([policy_loss, value_loss, entropy, kl, low + high, low, high, grad_norm]).detach()


def main(args: Args) -> None:
    with usage_errors():
        envs = make_vec(args.env, args.num_envs, args.seed, args.vec, threads=args.env_threads)
        check_spaces(envs, "box", "algos/ppo.py")
        eval_envs = make_vec(args.env, args.eval_episodes, args.seed, args.vec, EVAL_STREAM, args.env_threads)

    def evaluate(state: TrainState) -> tuple[np.ndarray, np.ndarray]:
        """Returns and lengths of the deterministic policy's episodes: its mean actions."""
        agent = state.agent

        def mean_action(obs: Tensor) -> Tensor:
            return agent.policy(agent.obs_norm(obs)).mode().clamp(agent.low, agent.high)

        return run_episodes(eval_envs, on_arrays(mean_action, args.device))

    with Run(args, envs, evaluate) as run:
        fast_minibatch_step = compile_function(minibatch_step, run.compile, args.device)
        state = run.resume_or(lambda: TrainState.create(args, envs))
        rollout = Rollout.allocate(args.num_steps, args.num_envs, state.obs.shape[1:], state.agent.low.shape)
        while state.global_step < args.total_timesteps:
            with run.phase("collect"):
                collect(state, envs, rollout, args)  # [T, N]
            run.check_finite(actions=rollout.actions, rewards=rollout.rewards, observations=rollout.final_obs)
            with run.phase("update"):
                run.metrics(update(state, rollout, fast_minibatch_step, args))
            run.end_iteration(state)
        results = run.results(state)
        save_policy(run.run_dir / "policy", state.agent, args, envs, {**run.recorded, **results})
        run.finish(results)


def save_policy(folder: Path, agent: Agent, args: Args, envs: VecEnv, card: dict) -> None:
    """The policy as a file of its own, without critic and optimizer: `python -m cleanrl_zoo.zoo evaluate <folder>`."""
    sizes = [*envs.single_observation_space.shape, *args.hidden, len(agent.low)]
    card["policy"] = zoo.policy_spec(sizes, "tanh", envs.single_action_space)
    zoo.save(folder, policy=zoo.Policy(card["policy"], agent.actor, agent.log_std, agent.obs_norm), card=card)


if __name__ == "__main__":
    main(parse_args(Args, PRESETS))
