"""Proximal Policy Optimization with an adaptive KL penalty, for discrete and continuous actions.

Schulman, Wolski, Dhariwal, Radford & Klimov (2017), "Proximal Policy Optimization Algorithms", arXiv:1707.06347.

    r(θ)     = π_θ(a|s) / π_old(a|s)                                                      section 3
    L_KLPEN  = E[ r A − β KL[π_old(·|s), π_θ(·|s)] ]                                      equation 8
    d        = E[ KL[π_old(·|s), π_θ(·|s)] ] after the update;  β ← 2β if d > 1.5 d_targ,
               β ← β/2 if d < d_targ/1.5                                                  section 4
    L        = −L_KLPEN + c₁ (V(s) − R)² − c₂ H[π(·|s)]           equation 9 with L_KLPEN, to be minimised
    A_t      = δ_t + γλ A_{t+1},   δ_t = r_t + γ V(s_{t+1}) − V(s_t)                       equations 11, 12
    R_t      = A_t + V(s_t)                               both with V as it was before the update

Where ppo.py and ppo_continuous.py clip the ratio, here distance costs: the loss has no flat part, and β rises while an
iteration moves the policy by more than 1.5 d_targ nats and falls while by less than d_targ/1.5. The KL is that of the
whole distributions, not of the sampled actions.

Deviations from the paper, each with its reason:
 1. Observations are centred and divided by running scales, rewards divided by the running deviation of the discounted
    return, both clipped to ±10: tasks differ in their units. The observation scales are frozen while a rollout is
    collected and trained on, so that the KL before the first minibatch is 0.
 2. Advantages are whitened per minibatch, the whole gradient is clipped to a norm of 0.5: less to tune per reward, and
    β has one unit in every task.
 3. Weights begin orthogonal, with gain √2 in hidden layers and 0.01 for the mean action or the logits. Adam's ε is
    1e-5, and its learning rate falls linearly to zero, so that the policy settles. The squared value error is halved.
 4. An episode cut by the time limit bootstraps from the value of its last observation; the paper does not say.
 5. A continuous action sampled outside the box is learned from as it is; only the environment's copy is clipped.
 6. Eight environments × 256 steps instead of one × 2048: faster, and no worse in ppo_continuous.py (results/num_envs).
 7. d_targ is 0.03, not the best of the paper's table 1 (0.01), with which Hopper was learned more slowly in a trial.

Run:    python algos/ppo_penalty.py --env Hopper-v4    (CartPole: --preset cart_pole)
Expect: 1992 ± 503 (Hopper-v4, last 100 training episodes, five seeds), in eight to ten minutes on one core.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from cleanrl_zoo import zoo
from cleanrl_zoo.core import AdaptiveKL, aggregate, explained_variance, gae, kl_penalized_surrogate, normalize
from cleanrl_zoo.core.distributions import Categorical, DiagGaussian, policy_noise
from cleanrl_zoo.core.value_losses import squared_value_loss
from cleanrl_zoo.data.rollout import Rollout
from cleanrl_zoo.envs import EVAL_STREAM, ObsNormalizer, RewardScaler, VecEnv, check_spaces, make_vec, sampled_action
from cleanrl_zoo.envs.episodes import on_arrays, run_episodes
from cleanrl_zoo.nn import Adam, clip_grad_norm, mlp, mlp_on_arrays
from cleanrl_zoo.run import EnvArgs, Run, compile_function, parse_args, torch_generator, usage_errors
from cleanrl_zoo.run.arguments import check, check_divides_batch


@dataclass
class Args(EnvArgs):
    """Proximal Policy Optimization (adaptive KL penalty) for discrete and continuous actions."""

    env: str = "Hopper-v4"
    """Gymnasium's name of an environment with flat observations and a Box or Discrete action space"""
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
    d_targ: float = 0.03
    """KL (nats) of the old to the new policy that β is steered to"""
    kl_coef: float = 1.0
    """β in the first iteration, the weight of the KL penalty"""
    vf_coef: float = 0.5
    """c₁, weight of the halved squared value error"""
    ent_coef: float = 0.0
    """c₂, weight of the entropy bonus"""
    max_grad_norm: float = 0.5
    """norm to which the gradient is clipped"""
    hidden: tuple[int, ...] = (64, 64)
    """widths of the hidden layers of policy and value network"""

    def check(self) -> None:
        super().check()
        check(self, "num_steps", "num_minibatches", "update_epochs", "hidden", at_least=1)
        check(self, "learning_rate", "d_targ", "kl_coef", "max_grad_norm", above=0)
        check(self, "gamma", "gae_lambda", at_least=0, at_most=1)
        check(self, "vf_coef", "ent_coef", at_least=0)
        check_divides_batch(self, "num_minibatches")

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps


PRESETS = {
    "cart_pole": {"env": "CartPole-v1", "total_timesteps": 500_000, "num_envs": 4, "num_steps": 128,
                  "learning_rate": 2.5e-4, "num_minibatches": 4, "update_epochs": 4, "ent_coef": 0.01,
                  "scale_rewards": False},
    "debug": {"total_timesteps": 1024, "num_envs": 2, "num_steps": 128, "num_minibatches": 4, "update_epochs": 2,
              "compile": False, "eval_episodes": 2, "checkpoint_every": 512, "env_threads": 1, "log_every": 256},
}  # fmt: skip


class Agent(nn.Module):
    """Two separate networks; the standard deviation of continuous actions does not depend on the state."""

    def __init__(self, obs_dim: int, space: gymnasium.Space, hidden: Sequence[int], generator: torch.Generator) -> None:
        super().__init__()
        gains, discrete = [2**0.5] * len(hidden), isinstance(space, gymnasium.spaces.Discrete)
        outputs = int(space.n if discrete else space.shape[0])
        self.obs_norm = ObsNormalizer((obs_dim,))
        self.actor = mlp([obs_dim, *hidden, outputs], "tanh", [*gains, 0.01], generator)
        self.critic = mlp([obs_dim, *hidden, 1], "tanh", [*gains, 1.0], generator)
        self.log_std = None if discrete else nn.Parameter(torch.zeros(outputs))
        for bound in ("low", "high"):  # of the box of allowed actions, [A]
            box = None if discrete else torch.tensor(getattr(space, bound), dtype=torch.float32)
            self.register_buffer(bound, box)

    def policy(self, output: Tensor, log_std: Tensor | None) -> Categorical | DiagGaussian:
        """The distribution with these logits, or with this mean and deviation."""
        return Categorical(output) if log_std is None else DiagGaussian(output, log_std)

    def value(self, normalized_obs: Tensor) -> Tensor:
        return self.critic(normalized_obs).squeeze(-1)

    def clip(self, action: Tensor) -> Tensor:
        return action if self.low is None else action.clamp(self.low, self.high)


@dataclass
class TrainState:
    """All that changes during training; a checkpoint is this, the environments and the log's position."""

    agent: Agent
    optimizer: Adam
    adaptive_kl: AdaptiveKL  # holds β
    reward_scaler: RewardScaler
    obs: np.ndarray  # [N, D] what the next action is chosen on
    noise_generator: torch.Generator
    minibatch_generator: torch.Generator
    global_step: int = 0
    iteration: int = 0

    @classmethod
    def create(cls, args: Args, envs: VecEnv) -> "TrainState":
        sizes = envs.single_observation_space.shape[0], envs.single_action_space, args.hidden
        agent = Agent(*sizes, torch_generator(args.seed, "init")).to(args.device)
        return cls(
            agent=agent,
            optimizer=Adam(agent.parameters(), eps=1e-5),
            adaptive_kl=AdaptiveKL(args.d_targ, args.kl_coef, "double_halve"),
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


STATS = ("losses/policy_loss", "losses/value_loss", "losses/entropy", "losses/grad_norm")


def update(state: TrainState, rollout: Rollout, minibatch_step: Callable, args: Args) -> dict[str, Tensor | float]:
    """Advantages, K epochs of shuffled minibatches, then the next β: the rest of algorithm 1 with section 4's loss."""
    agent, device = state.agent, args.device
    rewards = state.reward_scaler(rollout.rewards, rollout.done) if args.scale_rewards else rollout.rewards  # [T, N]
    rollout = rollout.to(device)
    with torch.no_grad():
        obs = agent.obs_norm(rollout.obs)  # [T, N, D]
        values, next_values = agent.value(obs), agent.value(agent.obs_norm(rollout.final_obs))  # [T, N]
        given = rewards.to(device, values.dtype), values, next_values, rollout.terminated, rollout.done
        advantages = gae(*given, args.gamma, args.gae_lambda)  # [T, N]
        returns = advantages + values
        old_output = agent.actor(obs)  # [T, N, A]: logits or mean actions
        old_log_std = None if agent.log_std is None else agent.log_std.clone()  # [A]

    batch = [x.flatten(0, 1) for x in (obs, rollout.actions, old_output, advantages, returns)]  # [T·N, ...]
    remaining = 1.0 - state.iteration * args.batch_size / args.total_timesteps if args.anneal_lr else 1.0
    learning_rate = torch.tensor(args.learning_rate * remaining, device=device)
    kl_coef = torch.tensor(state.adaptive_kl.coef, device=device)  # a tensor: a number that changes would compile anew
    coefs, epochs = (learning_rate, kl_coef, args.vf_coef, args.ent_coef, args.max_grad_norm), []
    for _ in range(args.update_epochs):
        order = torch.randperm(args.batch_size, generator=state.minibatch_generator, device=device)
        rows = order.view(args.num_minibatches, -1)  # [minibatches, M]
        # cloned, since a replayed CUDA graph writes into the same memory again
        stats = [minibatch_step(agent, state.optimizer, batch, old_log_std, index, *coefs).clone() for index in rows]
        epochs.append(torch.stack(stats).mean(0))
    with torch.no_grad():
        old, new = agent.policy(old_output, old_log_std), agent.policy(agent.actor(obs), agent.log_std)
        kl = old.kl(new).mean()  # d, over the whole batch
    state.adaptive_kl.update(kl)
    agent.obs_norm.update(rollout.obs)  # only now: the old policy belongs to the scales of the rollout
    state.iteration += 1
    return {
        **dict(zip(STATS, torch.stack(epochs).mean(0), strict=True)),
        "losses/kl": kl,
        "losses/kl_coef": kl_coef,
        "losses/explained_variance": explained_variance(values, returns),
        "charts/learning_rate": learning_rate,
    }


def minibatch_step(
    agent: Agent, optimizer: Adam, batch: list[Tensor], old_log_std: Tensor | None, index: Tensor,
    learning_rate: Tensor, kl_coef: Tensor, vf_coef: float, ent_coef: float, max_grad_norm: float,
) -> Tensor:  # fmt: skip
    """Loss, gradient and one optimizer step on the rows `index` [M]; returns the numbers named by `STATS`."""
    obs, actions, old_output, advantages, returns = (x[index] for x in batch)  # [M, ...]
    old, policy = agent.policy(old_output, old_log_std), agent.policy(agent.actor(obs), agent.log_std)
    old_logprob, logprob = old.log_prob(actions), policy.log_prob(actions)  # [M]
    kl, advantages = old.kl(policy), normalize(advantages)  # [M]
    policy_loss = aggregate(kl_penalized_surrogate(logprob, old_logprob, advantages, kl, kl_coef))
    value_loss = aggregate(squared_value_loss(agent.value(obs), returns))
    entropy = policy.entropy().mean()
    loss = policy_loss + vf_coef * value_loss - ent_coef * entropy  # equation 9, to be minimised

    grads = torch.autograd.grad(loss, optimizer.parameters)
    grads, grad_norm = clip_grad_norm(grads, max_grad_norm)
    optimizer.step(grads, learning_rate)
    return torch.stack([policy_loss, value_loss, entropy, grad_norm]).detach()


def main(args: Args) -> None:
    with usage_errors():
        envs = make_vec(args.env, args.num_envs, args.seed, args.vec, threads=args.env_threads)
        check_spaces(envs, "any")
        eval_envs = make_vec(args.env, args.eval_episodes, args.seed, args.vec, EVAL_STREAM, args.env_threads)

    def evaluate(state: TrainState) -> tuple[np.ndarray, np.ndarray]:
        """Returns and lengths of the deterministic policy's episodes: its mean or its most likely actions."""
        agent = state.agent

        def likeliest_action(obs: Tensor) -> Tensor:
            return agent.clip(agent.policy(agent.actor(agent.obs_norm(obs)), agent.log_std).mode())

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
