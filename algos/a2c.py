"""Advantage actor-critic, the synchronous form of A3C, for discrete and continuous actions.

Mnih, Badia, Mirza, Graves, Lillicrap, Harley, Silver & Kavukcuoglu (2016), "Asynchronous Methods for Deep Reinforcement
Learning", arXiv:1602.01783.

    R_t = r_t + γ r_{t+1} + … + γᵏ V(s_{t+k})          k steps to the rollout's end or the episode's     algorithm S3
    dθ  = ∇ log π(a|s) A + β ∇ H[π(·|s)],   A = R_t − V(s_t)                                             section 4
    dθ_v = ∇ (R_t − V(s_t))²                                                                             algorithm S3
    g ← αg + (1 − α)Δθ²,   θ ← θ − ηΔθ / √(g + ε)      RMSprop, the ε inside the root                    section 4

What reinforce.py learns after whole episodes is learned here after a few steps: V stands in for the rest of the return.

Deviations from the paper, each with its reason:

 1. The environments are stepped side by side and wait for one common update, instead of threads that update shared
    parameters whenever they are done: the same gradient, reproducible, and one product of matrices for all of them.
 2. The advantage is Schulman et al.'s (2016) λ-weighted mean of the k-step ones, λ = 0.95; `--gae-lambda 1` is the
    paper's. A rollout has 16 steps instead of 5: fewer and less noisy updates.
 3. Observations are centred and divided by running scales, rewards divided by the running deviation of the discounted
    return, both clipped to ±10: tasks differ in their units.
 4. Policy and value network share nothing: a flat observation does not need common layers, as pixels do. The deviation
    of continuous actions is the same in all states and begins at e^−½. Weights begin orthogonal, with gain √2 in hidden
    layers and 0.01 for the mean action or the logits, so that the first policy does not depend on the state.
 5. ε is 1e-10: gradients of scaled rewards are small, and a larger one inside the root would damp most of them. It does
    what 1e-5 outside the root does, where torch has it. The learning rate falls linearly to zero, as in the paper.
 6. The whole gradient is clipped to a norm of 0.5. The squared value error is halved and has a weight of its own.
 7. An episode cut by the time limit bootstraps from the value of its last observation; the paper does not say.
 8. A continuous action sampled outside the box is learned from as it is; only the environment's copy is clipped.

The defaults serve all environments, CartPole-v1 and Acrobot-v1 too. With RL Baselines3 Zoo's settings for these two
(rollouts of 5, λ = 1, no entropy bonus, a constant 7e-4; on CartPole-v1 8 environments, rewards as they are) the last
100 training episodes of 500,000 steps gave 500 and −83, with these 500 and −86 (seeds 101 and 102).

Run:    python algos/a2c.py --env Hopper-v4
Expect: 889 ± 292 (last 100 training episodes, five seeds), in three to four minutes on one core.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from cleanrl_zoo import zoo
from cleanrl_zoo.core import aggregate, explained_variance, gae, policy_gradient, squared_value_loss
from cleanrl_zoo.core.distributions import Categorical, DiagGaussian, policy_noise
from cleanrl_zoo.data.rollout import Rollout
from cleanrl_zoo.envs import EVAL_STREAM, ObsNormalizer, RewardScaler, VecEnv, check_spaces, make_vec, sampled_action
from cleanrl_zoo.envs.episodes import on_arrays, run_episodes
from cleanrl_zoo.nn import RMSprop, clip_grad_norm, mlp, mlp_on_arrays
from cleanrl_zoo.run import EnvArgs, Run, check, compile_function, parse_args, torch_generator, usage_errors


@dataclass
class Args(EnvArgs):
    """Advantage actor-critic for discrete and continuous actions."""

    env: str = "Hopper-v4"
    """Gymnasium's name of an environment with flat observations and a Box or Discrete action space"""
    num_envs: int = 16
    """environments stepped side by side"""
    num_steps: int = 16
    """steps per environment and iteration (T); T × --num-envs transitions are one batch and one gradient step"""
    learning_rate: float = 1e-3
    """RMSprop's learning rate η in the first iteration"""
    anneal_lr: bool = True
    """let the learning rate fall linearly to zero"""
    rmsprop_alpha: float = 0.99
    """α of RMSprop, the decay of its running squares"""
    rmsprop_eps: float = 1e-10
    """ε of RMSprop, inside the root"""
    gamma: float = 0.99
    """discount factor"""
    gae_lambda: float = 0.95
    """λ of the generalised advantage estimate; 1: the k-step return less the value"""
    scale_rewards: bool = True
    """divide rewards by the running standard deviation of the discounted return"""
    vf_coef: float = 1.0
    """weight of the halved squared value error"""
    ent_coef: float = 1e-4
    """β, weight of the entropy bonus"""
    max_grad_norm: float = 0.5
    """norm to which the gradient is clipped"""
    hidden: tuple[int, ...] = (64, 64)
    """widths of the hidden layers of policy and value network"""

    def check(self) -> None:
        super().check()
        check(self, "num_steps", "hidden", at_least=1)
        check(self, "learning_rate", "rmsprop_eps", "max_grad_norm", above=0)
        check(self, "gamma", "gae_lambda", "rmsprop_alpha", at_least=0, at_most=1)
        check(self, "rmsprop_alpha", below=1)  # at 1 the running squares would never move
        check(self, "vf_coef", "ent_coef", at_least=0)

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps


PRESETS = {
    "debug": {"total_timesteps": 1024, "num_envs": 2, "num_steps": 16, "compile": False, "eval_episodes": 2,
              "checkpoint_every": 512, "env_threads": 1, "log_every": 256},
}  # fmt: skip


class Agent(nn.Module):
    """Two separate networks; the standard deviation of continuous actions does not depend on the state."""

    def __init__(
        self, obs_dim: int, action_space: gymnasium.Space, hidden: Sequence[int], generator: torch.Generator
    ) -> None:
        super().__init__()
        gains, discrete = [2**0.5] * len(hidden), isinstance(action_space, gymnasium.spaces.Discrete)
        outputs = int(action_space.n) if discrete else action_space.shape[0]
        low, high = (None, None) if discrete else map(torch.as_tensor, (action_space.low, action_space.high))
        self.obs_norm = ObsNormalizer((obs_dim,))
        self.actor = mlp([obs_dim, *hidden, outputs], "tanh", [*gains, 0.01], generator)
        self.critic = mlp([obs_dim, *hidden, 1], "tanh", [*gains, 1.0], generator)
        self.log_std = None if discrete else nn.Parameter(torch.full((outputs,), -0.5))
        self.register_buffer("low", low)  # the box of allowed actions, [A]
        self.register_buffer("high", high)

    def policy(self, normalized_obs: Tensor) -> Categorical | DiagGaussian:
        output = self.actor(normalized_obs)
        return Categorical(output) if self.log_std is None else DiagGaussian(output, self.log_std)

    def value(self, normalized_obs: Tensor) -> Tensor:
        return self.critic(normalized_obs).squeeze(-1)

    def clip(self, action: Tensor) -> Tensor:
        """What the environment gets of an action."""
        return action if self.low is None else action.clamp(self.low, self.high)


@dataclass
class TrainState:
    """All that changes during training; a checkpoint is this, the environments and the log's position."""

    agent: Agent
    optimizer: RMSprop
    reward_scaler: RewardScaler
    obs: np.ndarray  # [N, D] what the next action is chosen on
    noise_generator: torch.Generator
    global_step: int = 0
    iteration: int = 0

    @classmethod
    def create(cls, args: Args, envs: VecEnv) -> "TrainState":
        sizes = envs.single_observation_space.shape[0], envs.single_action_space, args.hidden
        agent = Agent(*sizes, torch_generator(args.seed, "init")).to(args.device)
        return cls(
            agent=agent,
            optimizer=RMSprop(agent.parameters(), args.rmsprop_alpha, args.rmsprop_eps),
            reward_scaler=RewardScaler(args.num_envs, args.gamma),
            obs=envs.reset(),
            noise_generator=torch_generator(args.seed, "noise", args.device),
        )

    def cut(self, obs: np.ndarray) -> None:
        """Goes on in `obs` [N, D] after all episodes were dropped, as an engine does that cannot save its state."""
        self.obs = obs
        self.reward_scaler.running_return.zero_()


def collect(state: TrainState, envs: VecEnv, rollout: Rollout, args: Args) -> None:
    """Fills `rollout` [T, N] with the current policy."""
    agent, space = state.agent, envs.single_action_space
    outputs = mlp_on_arrays(agent.actor, agent.obs_norm.on_arrays())
    shape = (args.num_steps, args.num_envs, agent.actor[-1].out_features)
    noise = policy_noise(shape, agent.log_std, state.noise_generator, args.device)  # [T, N, A]
    for t, step_noise in enumerate(noise.cpu().numpy()):
        obs = rollout.put_obs(t, state.obs)  # [N, D]
        # μ + σε, [N, A], or the largest of the logits with Gumbel's noise, [N]
        action, env_action = sampled_action(outputs(obs) + step_noise, space)
        step = envs.step(env_action)
        rollout.put_step(t, action, step)
        state.obs = step.obs
    state.global_step += args.batch_size


STATS = ("losses/policy_loss", "losses/value_loss", "losses/entropy", "losses/grad_norm", "losses/explained_variance")


def update(state: TrainState, rollout: Rollout, gradient_step: Callable, args: Args) -> dict[str, Tensor]:
    """One gradient step on all that was collected."""
    # here and not in the gradient step, whose compiler would write out its loop over time step by step
    rewards = state.reward_scaler(rollout.rewards, rollout.done) if args.scale_rewards else rollout.rewards  # [T, N]
    rollout, rewards, agent = rollout.to(args.device), rewards.to(args.device), state.agent
    batch = (rollout.obs, rollout.final_obs, rollout.actions, rewards, rollout.terminated, rollout.truncated)
    remaining = 1.0 - state.iteration * args.batch_size / args.total_timesteps if args.anneal_lr else 1.0
    learning_rate = torch.tensor(args.learning_rate * remaining, device=args.device)
    coefs = (args.gamma, args.gae_lambda, args.vf_coef, args.ent_coef, args.max_grad_norm)
    # cloned, since a replayed CUDA graph writes into the same memory again
    stats = gradient_step(agent, state.optimizer, batch, learning_rate, *coefs).clone()
    state.iteration += 1
    std = {} if agent.log_std is None else {"charts/action_std": agent.log_std.detach().exp().mean()}
    return {**dict(zip(STATS, stats.unbind(), strict=True)), "charts/learning_rate": learning_rate, **std}


def gradient_step(
    agent: Agent, optimizer: RMSprop, batch: tuple[Tensor, ...], learning_rate: Tensor,
    gamma: float, gae_lambda: float, vf_coef: float, ent_coef: float, max_grad_norm: float,
) -> Tensor:  # fmt: skip
    """Advantages, loss, gradient and one optimizer step on a whole rollout; returns the numbers named by `STATS`."""
    raw_obs, final_obs, actions, rewards, terminated, truncated = batch  # [T, N, ...]
    done = terminated | truncated
    obs = agent.obs_norm(raw_obs)
    values = agent.value(obs)  # [T, N]
    with torch.no_grad():
        rewards, next_values = rewards.to(values.dtype), agent.value(agent.obs_norm(final_obs))
        advantages = gae(rewards, values, next_values, terminated, done, gamma, gae_lambda)
        returns = advantages + values

    policy = agent.policy(obs)
    policy_loss = aggregate(policy_gradient(policy.log_prob(actions), advantages))
    value_loss = aggregate(squared_value_loss(values, returns))
    entropy = policy.entropy().mean()
    loss = policy_loss + vf_coef * value_loss - ent_coef * entropy

    grads = torch.autograd.grad(loss, optimizer.parameters)
    grads, grad_norm = clip_grad_norm(grads, max_grad_norm)
    optimizer.step(grads, learning_rate)
    agent.obs_norm.update(raw_obs)  # only now: the actions belong to the scales that they were chosen with
    with torch.no_grad():
        return torch.stack([policy_loss, value_loss, entropy, grad_norm, explained_variance(values, returns)])


def main(args: Args) -> None:
    with usage_errors():
        envs = make_vec(args.env, args.num_envs, args.seed, args.vec, threads=args.env_threads)
        check_spaces(envs, "any")
        eval_envs = make_vec(args.env, args.eval_episodes, args.seed, args.vec, EVAL_STREAM, args.env_threads)

    def evaluate(state: TrainState) -> tuple[np.ndarray, np.ndarray]:
        """Returns and lengths of the deterministic policy's episodes: its mean or its most likely actions."""
        agent = state.agent

        def likeliest_action(obs: Tensor) -> Tensor:
            return agent.clip(agent.policy(agent.obs_norm(obs)).mode())

        return run_episodes(eval_envs, on_arrays(likeliest_action, args.device))

    with Run(args, envs, evaluate) as run:
        fast_gradient_step = compile_function(gradient_step, run.compile, args.device)
        state = run.resume_or(lambda: TrainState.create(args, envs))
        space, dtype = envs.single_action_space, torch.int64 if state.agent.log_std is None else torch.float32
        rollout = Rollout.allocate(args.num_steps, args.num_envs, state.obs.shape[1:], space.shape, action_dtype=dtype)
        while state.global_step < args.total_timesteps:
            with run.phase("collect"):
                collect(state, envs, rollout, args)  # [T, N]
            run.check_finite(actions=rollout.actions, rewards=rollout.rewards, observations=rollout.final_obs)
            with run.phase("update"):
                run.metrics(update(state, rollout, fast_gradient_step, args))
            run.end_iteration(state)
        results = run.results(state)
        save_policy(run.run_dir / "policy", state.agent, args, envs, {**run.recorded, **results})
        run.finish(results)


def save_policy(folder: Path, agent: Agent, args: Args, envs: VecEnv, card: dict) -> None:
    """The policy as a file of its own, without critic and optimizer: `python -m cleanrl_zoo.zoo evaluate <folder>`."""
    sizes = [*envs.single_observation_space.shape, *args.hidden, agent.actor[-1].out_features]
    card["policy"] = zoo.policy_spec(sizes, "tanh", envs.single_action_space)
    zoo.save(folder, policy=zoo.Policy(card["policy"], agent.actor, agent.log_std, agent.obs_norm), card=card)


if __name__ == "__main__":
    main(parse_args(Args, PRESETS))
