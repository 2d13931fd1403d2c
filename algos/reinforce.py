"""REINFORCE, the first policy gradient, for discrete and continuous actions: play whole episodes, take one step, again.

Williams (1992), "Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning", Machine
Learning 8; Sutton & Barto (2018), "Reinforcement Learning: An Introduction", sections 13.3 and 13.4.

    G_t = r_t + γ r_{t+1} + γ² r_{t+2} + …              the return from step t to the episode's end
    dθ  = Σ_t G_0 ∇ log π(a_t|s_t)                      --credit whole: Williams' episodic form
    dθ  = Σ_t G_t ∇ log π(a_t|s_t)                      --credit to_go: equation 13.8
    dθ  = Σ_t (G_t − V(s_t)) ∇ log π(a_t|s_t)           --credit baseline: equation 13.11
    dw  = Σ_t (G_t − V(s_t)) ∇ V(s_t)                   its V, learned beside the policy

At γ = 1 the three have one and the same mean and less and less variance: what was paid before an action says nothing
about it, and neither does what its state brings with any action. Below 1 the first weighs step t by γᵗ, as the gradient
of the discounted return does; the other two leave that weight out (deviation 3).

Deviations from the sources, each with its reason:

 1. One step is taken on a batch of episodes, by Adam, and the sum is a mean: less noise, and one learning rate for all
    tasks. It falls linearly to zero, so that the policy settles.
 2. The returns of a batch are whitened, which subtracts Williams' constant baseline b and gives V and the gradient one
    unit in every task.
 3. In to_go and baseline all steps weigh the same; the gradient of the discounted return would weigh step t with γᵗ (as
    the book's algorithms do) and forget late ones.
 4. An episode that its time limit cuts counts as complete: without a value there is nothing to stand for the rest.
 5. An iteration is `--num-steps` steps in each environment and what the episodes under way still need to end. Steps
    that an environment takes while it waits for the others are not learned from; the next iteration goes on where it
    then stands, and takes that for an episode's start.
 6. Observations are centred and divided by running scales, clipped to ±10; the weights begin orthogonal, with gain √2
    in hidden layers and 0.01 for the mean action or the logits, so that the first policy is nearly the same everywhere.
 7. A continuous action sampled outside the box is learned from as it is; only the environment's copy is clipped.

The defaults serve all environments, CartPole-v1 and Acrobot-v1 too: the last 100 training episodes of 100,000 steps
gave 494 and −483, those of 500,000 steps of Acrobot-v1 −88 (seeds 101 and 102).

Run:    python algos/reinforce.py --env Hopper-v4
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from cleanrl_zoo import zoo
from cleanrl_zoo.core import aggregate, discounted_returns, masked_mean, normalize, policy_gradient, squared_value_loss
from cleanrl_zoo.core.distributions import Categorical, DiagGaussian, policy_noise
from cleanrl_zoo.data.rollout import Rollout
from cleanrl_zoo.envs import EVAL_STREAM, ObsNormalizer, VecEnv, check_spaces, make_vec, sampled_action
from cleanrl_zoo.envs.episodes import on_arrays, run_episodes
from cleanrl_zoo.nn import Adam, grad_norm, mlp, mlp_on_arrays
from cleanrl_zoo.run import EnvArgs, Run, check, compile_function, parse_args, torch_generator, usage_errors


@dataclass
class Args(EnvArgs):
    """REINFORCE for discrete and continuous actions."""

    env: str = "Hopper-v4"
    """Gymnasium's name of an environment with flat observations, a Box or Discrete action space and a time limit"""
    total_timesteps: int = 3_000_000
    """environment steps of the whole run, all environments together; the last iteration may go beyond"""
    num_envs: int = 4
    """environments stepped side by side"""
    num_steps: int = 500
    """steps per environment and iteration, before the episodes under way are played to their end"""
    credit: Literal["whole", "to_go", "baseline"] = "to_go"
    """what weighs an action: the episode's whole return, the return from there on, or that less a learned value"""
    learning_rate: float = 3e-3
    """Adam's learning rate in the first iteration"""
    gamma: float = 0.99
    """discount factor"""
    hidden: tuple[int, ...] = (64, 64)
    """widths of the hidden layers of policy and value network"""

    def check(self) -> None:
        super().check()
        check(self, "num_steps", "hidden", at_least=1)
        check(self, "learning_rate", above=0)
        check(self, "gamma", at_least=0, at_most=1)


PRESETS = {
    "debug": {"total_timesteps": 1024, "num_envs": 2, "num_steps": 64, "compile": False, "eval_episodes": 2,
              "checkpoint_every": 512, "env_threads": 1, "log_every": 256},
}  # fmt: skip


class Agent(nn.Module):
    """Policy and value network; only `--credit baseline` uses the second."""

    def __init__(self, obs_dim: int, action_space: gymnasium.Space, args: Args) -> None:
        super().__init__()
        gains, generator = [2**0.5] * len(args.hidden), torch_generator(args.seed, "init")
        discrete = isinstance(action_space, gymnasium.spaces.Discrete)
        outputs = int(action_space.n) if discrete else action_space.shape[0]
        low, high = (None, None) if discrete else map(torch.as_tensor, (action_space.low, action_space.high))
        self.obs_norm = ObsNormalizer((obs_dim,))
        self.actor = mlp([obs_dim, *args.hidden, outputs], "tanh", [*gains, 0.01], generator)
        self.critic = mlp([obs_dim, *args.hidden, 1], "tanh", [*gains, 1.0], generator)
        self.log_std = None if discrete else nn.Parameter(torch.full((outputs,), -0.5))
        self.register_buffer("low", low)  # the box of allowed actions, [A]
        self.register_buffer("high", high)

    def policy(self, obs: Tensor) -> Categorical | DiagGaussian:
        output = self.actor(self.obs_norm(obs))
        return Categorical(output) if self.log_std is None else DiagGaussian(output, self.log_std)

    def value(self, obs: Tensor) -> Tensor:
        return self.critic(self.obs_norm(obs)).squeeze(-1)

    def clip(self, action: Tensor) -> Tensor:
        """What the environment gets of an action."""
        return action if self.low is None else action.clamp(self.low, self.high)


@dataclass
class TrainState:
    """All that changes during training; a checkpoint is this, the environments and the log's position."""

    agent: Agent
    optimizer: Adam
    obs: np.ndarray  # [N, D] what the next action is chosen on
    noise_generator: torch.Generator
    global_step: int = 0

    @classmethod
    def create(cls, args: Args, envs: VecEnv) -> "TrainState":
        agent = Agent(envs.single_observation_space.shape[0], envs.single_action_space, args).to(args.device)
        parameters = [p for name, p in agent.named_parameters() if args.credit == "baseline" or "critic" not in name]
        return cls(agent, Adam(parameters), envs.reset(), torch_generator(args.seed, "noise", args.device))

    def cut(self, obs: np.ndarray) -> None:
        """Goes on in `obs` [N, D] after the episodes under way were dropped: they are not learned from anyway."""
        self.obs = obs


def collect(state: TrainState, envs: VecEnv, rollout: Rollout, args: Args) -> Tensor:
    """Plays whole episodes into `rollout` [R, N]; returns the mask [R, N] of the steps that belong to them."""
    agent, space, (rows, num_envs) = state.agent, envs.single_action_space, rollout.rewards.shape
    outputs = mlp_on_arrays(agent.actor, agent.obs_norm.on_arrays())
    shape = (rows, num_envs, agent.actor[-1].out_features)
    noise = policy_noise(shape, agent.log_std, state.noise_generator, args.device)  # [R, N, A]
    mask, playing = np.zeros((rows, num_envs), bool), np.ones(num_envs, bool)
    for t, step_noise in enumerate(noise.cpu().numpy()):
        mask[t] = playing
        obs = rollout.put_obs(t, state.obs)  # [N, D]
        # μ + σε, [N, A], or the largest of the logits with Gumbel's noise, [N]
        action, env_action = sampled_action(outputs(obs) + step_noise, space)
        step = envs.step(env_action)
        rollout.put_step(t, action, step)
        state.obs = step.obs
        if t + 1 >= args.num_steps:
            playing &= ~(step.terminated | step.truncated)
        if not playing.any():
            break
    state.global_step += (t + 1) * num_envs
    return torch.from_numpy(mask)


STATS = ("losses/policy_loss", "losses/value_loss", "losses/entropy", "losses/grad_norm")


def update(
    state: TrainState, rollout: Rollout, mask: Tensor, gradient_step: Callable, args: Args
) -> dict[str, Tensor | float]:
    """One gradient step on the batch."""
    steps = int(mask.any(1).sum())  # that were played in each environment
    before = state.global_step - steps * args.num_envs
    learning_rate = torch.tensor(args.learning_rate * (1.0 - before / args.total_timesteps), device=args.device)
    on_device = rollout.to(args.device)
    batch = (on_device.obs, on_device.actions, on_device.rewards.float(), on_device.done, mask.to(args.device))
    stats = gradient_step(state.agent, state.optimizer, batch, learning_rate, args.gamma, args.credit)
    # cloned, since a replayed CUDA graph writes into the same memory again
    metrics = dict(zip(STATS, stats.clone().unbind(), strict=True))
    state.agent.obs_norm.update(on_device.obs[:steps])  # only now: the actions belong to the scales that chose them
    if args.credit != "baseline":
        del metrics["losses/value_loss"]
    return {**metrics, "charts/learning_rate": learning_rate}


def gradient_step(
    agent: Agent, optimizer: Adam, batch: tuple[Tensor, ...], learning_rate: Tensor, gamma: float, credit: str
) -> Tensor:
    """Returns, loss, gradient and one optimizer step; gives the numbers named by `STATS`."""
    obs, actions, rewards, done, mask = batch  # [R, N, ...]
    returns = discounted_returns(rewards, torch.zeros_like(rewards), done, done, gamma)
    if credit == "whole":  # every step gets the return of its episode's first
        row = torch.arange(len(done), device=done.device).unsqueeze(1)
        first = torch.cat((torch.ones_like(done[:1]), done[:-1]))
        returns = returns.gather(0, torch.where(first, row, 0).cummax(0).values)
    returns = normalize(returns, mask)

    policy, value = agent.policy(obs), agent.value(obs)
    advantages = returns - value.detach() if credit == "baseline" else returns
    policy_loss = aggregate(policy_gradient(policy.log_prob(actions), advantages), mask)
    value_loss = aggregate(squared_value_loss(value, returns), mask)
    loss = policy_loss + value_loss if credit == "baseline" else policy_loss
    entropy = masked_mean(policy.entropy(), mask)
    grads = torch.autograd.grad(loss, optimizer.parameters)
    optimizer.step(grads, learning_rate)
    return torch.stack([policy_loss, value_loss, entropy, grad_norm(grads)]).detach()


def main(args: Args) -> None:
    with usage_errors():
        envs = make_vec(args.env, args.num_envs, args.seed, args.vec, threads=args.env_threads)
        check_spaces(envs, "any")
        if envs.max_episode_steps is None:
            raise ValueError(f"--env {args.env}: has no time limit; register it with max_episode_steps")
        eval_envs = make_vec(args.env, args.eval_episodes, args.seed, args.vec, EVAL_STREAM, args.env_threads)

    def evaluate(state: TrainState) -> tuple[np.ndarray, np.ndarray]:
        """Returns and lengths of the deterministic policy's episodes: its mean or its most likely actions."""
        agent = state.agent

        def likeliest_action(obs: Tensor) -> Tensor:
            return agent.clip(agent.policy(obs).mode())

        return run_episodes(eval_envs, on_arrays(likeliest_action, args.device))

    with Run(args, envs, evaluate) as run:
        fast_gradient_step = compile_function(gradient_step, run.compile, args.device)
        state = run.resume_or(lambda: TrainState.create(args, envs))
        space, dtype = envs.single_action_space, torch.int64 if state.agent.log_std is None else torch.float32
        rows = args.num_steps + envs.max_episode_steps - 1  # an episode begun at the last moment
        rollout = Rollout.allocate(rows, args.num_envs, state.obs.shape[1:], space.shape, action_dtype=dtype)
        while state.global_step < args.total_timesteps:
            with run.phase("collect"):
                mask = collect(state, envs, rollout, args)  # [R, N]
            run.check_finite(actions=rollout.actions, rewards=rollout.rewards, observations=rollout.final_obs)
            with run.phase("update"):
                run.metrics(update(state, rollout, mask, fast_gradient_step, args))
            run.end_iteration(state)
        results = run.results(state)
        save_policy(run.run_dir / "policy", state.agent, args, envs, {**run.recorded, **results})
        run.finish(results)


def save_policy(folder: Path, agent: Agent, args: Args, envs: VecEnv, card: dict) -> None:
    """The policy as a file of its own: `python -m cleanrl_zoo.zoo evaluate <folder>`."""
    sizes = [*envs.single_observation_space.shape, *args.hidden, agent.actor[-1].out_features]
    card["policy"] = zoo.policy_spec(sizes, "tanh", envs.single_action_space)
    zoo.save(folder, policy=zoo.Policy(card["policy"], agent.actor, agent.log_std, agent.obs_norm), card=card)


if __name__ == "__main__":
    main(parse_args(Args, PRESETS))
