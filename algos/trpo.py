"""Trust Region Policy Optimization, for discrete and continuous actions.

Schulman, Levine, Moritz, Jordan & Abbeel (2015), "Trust Region Policy Optimization", arXiv:1502.05477.

    maximise  L(θ) = E[ π_θ(a|s) / π_old(a|s) · A ]   subject to   E[ KL(π_old‖π_θ) ] ≤ δ       equation 14
    s ≈ H⁻¹g by conjugate gradient, g = ∇L, H = ∇² E[KL] = Jᵀ M J                               appendix C, C.1
    θ ← θ_old + αʲ β s,   β = √(2δ / sᵀHs),   j = 0, 1, 2, … until L rises and KL ≤ δ             appendix C
    A_t = Σ_k (γλ)ᵏ δ_{t+k},   δ_t = r_t + γ V(s_{t+1}) − V(s_t)         Schulman et al. 2016, equation 16

Deviations from the paper, each with its reason:

 1. Advantages are estimated with λ (arXiv:1506.02438) and a learned value, a network of its own, fitted by Adam; the
    paper sums rewards along single paths. Less variance, so that batches of 2048 are enough where it took 50,000 and
    more.
 2. Advantages are whitened over the batch. The length of the step does not depend on their scale, but the logged
    improvements then compare between tasks.
 3. Observations are centred and divided by running scales, rewards divided by the running deviation of the discounted
    return, both clipped to ±10: tasks differ in their units. The observation scales are frozen while a rollout is
    collected and trained on, so that π_θ is π_old before the step.
 4. H has `cg_damping` added to its diagonal, which keeps the step short where the batch says nothing of the curvature.
 5. Hidden layers of 64 and 64 instead of 30 or 50; weights begin orthogonal, with gain 0.01 for the policy's output.
 6. An episode cut by the time limit bootstraps from the value of its last observation; the paper does not say.
 7. An action sampled outside the box is learned from as it is; only the copy that the environment gets is clipped.
 8. δ is 0.02 instead of 0.01: on Hopper the runs with it were the better ones (a few short runs, no ablation).

The file is longer than 300 lines because it serves both kinds of actions and shows the whole step in one place.

The defaults serve all environments, CartPole-v1 and Acrobot-v1 too: after 100,000 steps the last 100 training episodes
gave 496 and −84, on CartPole-v1 with RL Baselines3 Zoo's settings for it 492 (seeds 101 and 102).

Run:    python algos/trpo.py --env Hopper-v4
Expect: 2103 ± 390 (last 100 training episodes, five seeds), in four to six minutes on one core.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from cleanrl_zoo import zoo
from cleanrl_zoo.core import aggregate, explained_variance, gae, kl_penalized_surrogate, normalize, squared_value_loss
from cleanrl_zoo.core.distributions import Categorical, DiagGaussian, policy_noise
from cleanrl_zoo.core.trust_region import conjugate_gradient, fisher_factors, fisher_vector_product, line_search
from cleanrl_zoo.data.rollout import Rollout
from cleanrl_zoo.envs import EVAL_STREAM, ObsNormalizer, RewardScaler, VecEnv, check_spaces, make_vec, sampled_action
from cleanrl_zoo.envs.episodes import on_arrays, run_episodes
from cleanrl_zoo.nn import Adam, mlp, mlp_on_arrays
from cleanrl_zoo.run import EnvArgs, Run, compile_function, parse_args, torch_generator, usage_errors
from cleanrl_zoo.run.arguments import check, check_divides_batch


@dataclass
class Args(EnvArgs):
    """Trust Region Policy Optimization for discrete and continuous actions."""

    env: str = "Hopper-v4"
    """Gymnasium's name of an environment with flat observations and Discrete or Box actions"""
    num_envs: int = 8
    """environments stepped side by side"""
    num_steps: int = 256
    """steps per environment and iteration (T); T × --num-envs transitions are one batch"""
    max_kl: float = 0.02
    """δ, bound on the mean KL(old‖new) of a step, in nats"""
    cg_iterations: int = 10
    """iterations of the conjugate gradient"""
    cg_damping: float = 0.1
    """added to the diagonal of the Fisher matrix"""
    fisher_subsample: int = 1
    """take every so-manyth transition for the Fisher matrix; from all environments only without a common divisor with
    --num-envs"""
    backtrack_coef: float = 0.8
    """α, factor by which the line search shortens a step that did not pass"""
    max_backtracks: int = 10
    """steps that the line search tries before the policy is left as it was"""
    init_log_std: float = -0.5
    """logarithm of the Gaussian policy's first standard deviation"""
    learning_rate: float = 1e-3
    """Adam's learning rate of the value network in the first iteration"""
    anneal_lr: bool = True
    """let the learning rate fall linearly to zero"""
    value_epochs: int = 10
    """passes of the value network over the batch"""
    minibatch_size: int = 64
    """transitions of one step of the value network; must divide the batch"""
    gamma: float = 0.99
    """discount factor"""
    gae_lambda: float = 0.95
    """λ of the generalised advantage estimate"""
    scale_rewards: bool = True
    """divide rewards by the running standard deviation of the discounted return"""
    hidden: tuple[int, ...] = (64, 64)
    """widths of the hidden layers of policy and value network"""

    def check(self) -> None:
        super().check()
        counts = ("num_steps", "cg_iterations", "max_backtracks", "value_epochs", "minibatch_size", "hidden")
        check(self, *counts, at_least=1)
        check(self, "fisher_subsample", at_least=1, at_most=self.batch_size)
        check(self, "learning_rate", "max_kl", above=0)
        check(self, "backtrack_coef", above=0, at_most=1)
        check(self, "gamma", "gae_lambda", at_least=0, at_most=1)
        check(self, "cg_damping", at_least=0)
        check(self, "init_log_std")
        check_divides_batch(self, "minibatch_size")

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps


PRESETS = {
    "debug": {"total_timesteps": 1024, "num_envs": 2, "num_steps": 128, "value_epochs": 2, "compile": False,
              "eval_episodes": 2, "checkpoint_every": 512, "env_threads": 1, "log_every": 256},
}  # fmt: skip


class Agent(nn.Module):
    """Two separate networks; the standard deviation of continuous actions does not depend on the state."""

    def __init__(self, obs_dim: int, space: gymnasium.Space, args: Args, generator: torch.Generator) -> None:
        super().__init__()
        gains, discrete = [2**0.5] * len(args.hidden), isinstance(space, gymnasium.spaces.Discrete)
        outputs = int(space.n) if discrete else space.shape[0]
        low, high = (None, None) if discrete else map(torch.as_tensor, (space.low, space.high))
        self.obs_norm = ObsNormalizer((obs_dim,))
        self.actor = mlp([obs_dim, *args.hidden, outputs], "tanh", [*gains, 0.01], generator)
        self.critic = mlp([obs_dim, *args.hidden, 1], "tanh", [*gains, 1.0], generator)
        self.log_std = None if discrete else nn.Parameter(torch.full((outputs,), args.init_log_std))
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

    def policy_parameters(self) -> list[nn.Parameter]:
        """All that the trust-region step moves."""
        return [*self.actor.parameters(), *([] if self.log_std is None else [self.log_std])]


@dataclass
class TrainState:
    """All that changes during training; a checkpoint is this, the environments and the log's position."""

    agent: Agent
    optimizer: Adam  # of the value network
    reward_scaler: RewardScaler
    obs: np.ndarray  # [N, D] what the next action is chosen on
    noise_generator: torch.Generator
    minibatch_generator: torch.Generator
    global_step: int = 0
    iteration: int = 0

    @classmethod
    def create(cls, args: Args, envs: VecEnv) -> "TrainState":
        obs_dim, space = envs.single_observation_space.shape[0], envs.single_action_space
        agent = Agent(obs_dim, space, args, torch_generator(args.seed, "init")).to(args.device)
        return cls(
            agent=agent,
            optimizer=Adam(agent.critic.parameters()),
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


def update(state: TrainState, rollout: Rollout, minibatch_step: Callable, args: Args) -> dict[str, Tensor | float]:
    """Advantages, one step of the policy on the whole batch, then the value network's epochs."""
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
    obs, actions, advantages, returns = (x.flatten(0, 1) for x in (obs, rollout.actions, advantages, returns))
    policy_stats = policy_step(agent, obs, actions, normalize(advantages), args)  # on all [T·N, ...]

    remaining = 1.0 - state.iteration * args.batch_size / args.total_timesteps if args.anneal_lr else 1.0
    learning_rate = torch.tensor(args.learning_rate * remaining, device=device)
    losses = []
    for _ in range(args.value_epochs):
        order = torch.randperm(args.batch_size, generator=state.minibatch_generator, device=device)
        for index in order.view(-1, args.minibatch_size):
            # cloned, since a replayed CUDA graph writes into the same memory again
            losses.append(minibatch_step(agent, state.optimizer, obs, returns, index, learning_rate).clone())
    agent.obs_norm.update(rollout.obs)  # only now: π_old belongs to the scales of the rollout
    state.iteration += 1
    return {
        **policy_stats,
        "losses/value_loss": torch.stack(losses).mean(),
        "losses/explained_variance": explained_variance(values, returns.view_as(values)),
        "charts/learning_rate": learning_rate,
        **({} if agent.log_std is None else {"charts/action_std": agent.log_std.detach().exp().mean()}),
    }


def policy_step(
    agent: Agent, obs: Tensor, actions: Tensor, advantages: Tensor, args: Args
) -> dict[str, Tensor | float]:
    """One step on `obs` [B, D]: direction, length, line search. A refused step leaves the policy bit-equal."""
    parameters = agent.policy_parameters()
    policy = agent.policy(obs)
    old = frozen(policy)
    old_logprob = old.log_prob(actions)  # [B]

    def surrogate_and_kl(policy: DiagGaussian | Categorical) -> tuple[Tensor, Tensor]:
        kl = old.kl(policy)  # [B]
        # equation 14; its bound stands in for the penalty
        loss = kl_penalized_surrogate(policy.log_prob(actions), old_logprob, advantages, kl, kl_coef=0.0)
        return aggregate(loss), aggregate(kl)

    loss, _ = surrogate_and_kl(policy)  # −L
    gradient = torch.cat([part.flatten() for part in torch.autograd.grad(loss, parameters)])  # −g, [P]

    policy = agent.policy(obs[:: args.fisher_subsample])
    factors = fisher_factors(aggregate(frozen(policy).kl(policy)), tensors(policy), parameters)

    def fisher(vector: Tensor) -> Tensor:
        return fisher_vector_product(factors, parameters, vector, args.cg_damping)

    direction = conjugate_gradient(fisher, -gradient, args.cg_iterations)  # s
    curvature = (direction @ fisher(direction)).clamp(min=torch.finfo(direction.dtype).tiny)  # sᵀHs; 0 only for s = 0
    step = (2 * args.max_kl / curvature).sqrt() * direction  # βs

    def evaluate() -> tuple[Tensor, Tensor]:
        return surrogate_and_kl(agent.policy(obs))

    result = line_search(evaluate, step, parameters, args.max_kl, args.backtrack_coef, args.max_backtracks)
    with torch.no_grad():
        entropy = agent.policy(obs).entropy().mean()
    return {
        "losses/policy_loss": result.loss,
        "losses/improvement": loss.detach() - result.loss,
        "losses/expected_improvement": -result.fraction * (gradient @ step),
        "losses/kl": result.kl,
        "losses/step_fraction": result.fraction,
        "losses/step_accepted": float(result.accepted),
        "losses/grad_norm": gradient.norm(),
        "losses/entropy": entropy,
    }


def tensors(policy: DiagGaussian | Categorical) -> tuple[Tensor, ...]:
    return (policy.logits,) if isinstance(policy, Categorical) else (policy.mean, policy.log_std)


def frozen(policy: DiagGaussian | Categorical) -> DiagGaussian | Categorical:
    """The same distributions in memory of their own: log_std is otherwise the parameter's, which the step moves."""
    return type(policy)(*(tensor.detach().clone() for tensor in tensors(policy)))


def minibatch_step(
    agent: Agent, optimizer: Adam, obs: Tensor, returns: Tensor, index: Tensor, learning_rate: Tensor
) -> Tensor:
    """One step of the value network on the rows `index` [M]; returns its loss."""
    loss = aggregate(squared_value_loss(agent.value(obs[index]), returns[index]))
    optimizer.step(torch.autograd.grad(loss, optimizer.parameters), learning_rate)
    return loss.detach()


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
        fast_minibatch_step = compile_function(minibatch_step, run.compile, args.device)
        state = run.resume_or(lambda: TrainState.create(args, envs))
        space, dtype = envs.single_action_space, torch.int64 if state.agent.log_std is None else torch.float32
        rollout = Rollout.allocate(args.num_steps, args.num_envs, state.obs.shape[1:], space.shape, action_dtype=dtype)
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
    sizes = [*envs.single_observation_space.shape, *args.hidden, agent.actor[-1].out_features]
    card["policy"] = zoo.policy_spec(sizes, "tanh", envs.single_action_space)
    zoo.save(folder, policy=zoo.Policy(card["policy"], agent.actor, agent.log_std, agent.obs_norm), card=card)


if __name__ == "__main__":
    main(parse_args(Args, PRESETS))
