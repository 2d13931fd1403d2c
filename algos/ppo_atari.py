"""Proximal Policy Optimization with the clipped surrogate, for Atari games, from frames.

Schulman, Wolski, Dhariwal, Radford & Klimov (2017), "Proximal Policy Optimization Algorithms", arXiv:1707.06347.

    r(θ)   = π_θ(a|s) / π_old(a|s)                                                        section 3
    L_clip = E[ min( r A, clip(r, 1−ε, 1+ε) A ) ]                                         equation 7
    L      = −L_clip + c₁ (V(s) − R)² − c₂ H[π(·|s)]                                      equation 9, to be minimised
    A_t    = δ_t + γλ A_{t+1},   δ_t = r_t + γ V(s_{t+1}) − V(s_t)                         equations 11, 12
    R_t    = A_t + V(s_t)                                 both with V as it was before the update

What changes from ppo.py: the network of Mnih et al. (2015) reads four stacked frames, and policy and value share all of
it but their last layer, as in the paper's section 6.4 (hyper-parameters: table 5). Observations stay bytes until the
network divides them by 255; a rollout holds each twice (as `obs` and as `final_obs`), 58 MB at 8 × 128 steps.

Deviations from the paper, each with its reason:

 1. Four epochs of four minibatches instead of three of four; c₁ = 1 becomes ½ with the squared error halved; ε does not
    shrink with the learning rate: the settings that the results of the years since were made with.
 2. The value is clipped like the ratio: ½ max((V − R)², (V_old + clip(V − V_old, ±ε) − R)²), for the same reason;
    `--no-clip-value-loss` leaves only the ½.
 3. Advantages are whitened per minibatch; the gradient is clipped to a norm of 0.5.
 4. Orthogonal initialisation, √2 in hidden layers, 0.01 for the logits, 1 for the value; Adam's ε is 1e-5.
 5. A lost life ends the return that is learned from, and the game goes on (`--no-episodic-life` for whole games); the
    returns reported are those of whole games, rewards as the game gives them. Learned from is their sign.
 6. A game cut after 27,000 steps bootstraps from the value of its last frames; the paper does not say.
 7. ale-py cannot save a game, so that each checkpoint starts new ones: `--checkpoint-every` must leave ten time limits
    to each (2,160,000 steps for eight games).

Run:    python algos/ppo_atari.py --env ALE/Breakout-v5
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from cleanrl_zoo import zoo
from cleanrl_zoo.core import aggregate, clipped_surrogate, explained_variance, gae, k3, normalize
from cleanrl_zoo.core.distributions import Categorical
from cleanrl_zoo.core.value_losses import clipped_value_loss, squared_value_loss
from cleanrl_zoo.data.rollout import Rollout
from cleanrl_zoo.envs import EVAL_STREAM, VecEnv, check_spaces, make_vec
from cleanrl_zoo.envs.episodes import on_arrays, run_episodes
from cleanrl_zoo.nn import Adam, clip_grad_norm, mlp, nature_cnn
from cleanrl_zoo.run import EnvArgs, Run, compile_function, parse_args, torch_generator, usage_errors
from cleanrl_zoo.run.arguments import check, check_divides_batch, check_game_flags


@dataclass
class Args(EnvArgs):
    """Proximal Policy Optimization (clipped) for Atari games."""

    env: str = "ALE/Breakout-v5"
    """name of an Atari game ("ALE/…-v5"), or of another environment with frames and a Discrete action space"""
    total_timesteps: int = 10_000_000
    """environment steps (of four screens) of the whole run, all environments together"""
    checkpoint_every: int = 2_500_000
    """steps between two checkpoints, at which all games start anew; 0: only at the end"""
    eval_every: int = 1_000_000
    """steps between two evaluations of the deterministic policy; 0: only at the end"""
    episodic_life: bool = True
    """learn from lives instead of whole games"""
    repeat_action_probability: float = 0.0
    """sticky actions: the chance that the game repeats the last action instead; Machado et al. (2018) advise 0.25"""
    num_steps: int = 128
    """steps per environment and iteration (T); T × --num-envs transitions are one batch"""
    learning_rate: float = 2.5e-4
    """Adam's learning rate in the first iteration"""
    anneal_lr: bool = True
    """let the learning rate fall linearly to zero"""
    gamma: float = 0.99
    """discount factor"""
    gae_lambda: float = 0.95
    """λ of the generalised advantage estimate"""
    clip_rewards: bool = True
    """learn from the sign of the rewards"""
    num_minibatches: int = 4
    """minibatches per epoch; must divide the batch"""
    update_epochs: int = 4
    """passes over the batch"""
    clip_coef: float = 0.1
    """ε of the clipped surrogate, and of the clipped value loss"""
    clip_value_loss: bool = True
    """give the value no reward for moving more than ε away from the old value"""
    vf_coef: float = 0.5
    """c₁, weight of the halved squared value error"""
    ent_coef: float = 0.01
    """c₂, weight of the entropy bonus"""
    max_grad_norm: float = 0.5
    """norm to which the gradient is clipped"""
    channels: tuple[int, int, int] = (32, 64, 64)
    """filters of the three convolutions"""
    hidden: int = 512
    """width of the dense layer that policy and value read"""

    def check(self) -> None:
        super().check()
        check(self, "num_steps", "num_minibatches", "update_epochs", "channels", "hidden", at_least=1)
        check(self, "learning_rate", "clip_coef", "max_grad_norm", above=0)
        check(self, "gamma", "gae_lambda", "repeat_action_probability", at_least=0, at_most=1)
        check(self, "vf_coef", "ent_coef", at_least=0)
        check_divides_batch(self, "num_minibatches")

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps


PRESETS = {
    "debug": {"env": "probe/MatchFrames-v0", "total_timesteps": 1024, "num_envs": 2, "update_epochs": 2,
              "channels": (4, 4, 4), "hidden": 16, "compile": False, "eval_every": 0, "eval_episodes": 2,
              "checkpoint_every": 512, "env_threads": 1, "log_every": 256},
}  # fmt: skip


class Agent(nn.Module):
    """One network of features from which a layer each reads the logits and the value."""

    def __init__(self, envs: VecEnv, channels: Sequence[int], hidden: int, generator: torch.Generator) -> None:
        super().__init__()
        obs_shape, num_actions = envs.single_observation_space.shape, int(envs.single_action_space.n)
        self.features = nature_cnn(obs_shape, channels, hidden, generator)
        self.actor = mlp([hidden, num_actions], gains=[0.01], generator=generator)
        self.critic = mlp([hidden, 1], gains=[1.0], generator=generator)

    def forward(self, obs: Tensor) -> tuple[Categorical, Tensor]:
        """Policy and value [B] of frames [B, C, H, W]."""
        features = self.features(obs)
        return Categorical(self.actor(features)), self.critic(features).squeeze(-1)


@dataclass
class TrainState:
    """All that changes during training; a checkpoint is this, the environments and the log's position."""

    agent: Agent
    optimizer: Adam
    obs: np.ndarray  # uint8 [N, C, H, W] what the next action is chosen on
    noise_generator: torch.Generator
    minibatch_generator: torch.Generator
    global_step: int = 0
    iteration: int = 0

    @classmethod
    def create(cls, args: Args, envs: VecEnv) -> "TrainState":
        agent = Agent(envs, args.channels, args.hidden, torch_generator(args.seed, "init")).to(args.device)
        return cls(
            agent=agent,
            optimizer=Adam(agent.parameters(), eps=1e-5),
            obs=envs.reset(),
            noise_generator=torch_generator(args.seed, "noise", args.device),
            minibatch_generator=torch_generator(args.seed, "minibatch", args.device),
        )

    def cut(self, obs: np.ndarray) -> None:
        """Goes on in `obs` [N, C, H, W] after all games were dropped: the engine cannot save its state."""
        self.obs = obs


@torch.no_grad()
def act(agent: Agent, obs: Tensor, noise: Tensor) -> Tensor:
    """The actions [N] sampled in `obs` [N, C, H, W] with `noise` [N, A], uniform in [0, 1)."""
    return agent(obs)[0].sample(noise)


def collect(state: TrainState, envs: VecEnv, rollout: Rollout, act: Callable, args: Args) -> None:
    """Fills `rollout` [T, N] with the current policy: the loop over actors of algorithm 1."""
    shape = (*rollout.actions.shape, int(envs.single_action_space.n))
    noise = torch.rand(shape, generator=state.noise_generator, device=args.device)  # [T, N, A]
    for t, step_noise in enumerate(noise):
        obs = torch.from_numpy(rollout.put_obs(t, state.obs)).to(args.device)  # [N, C, H, W]
        action = act(state.agent, obs, step_noise).cpu().numpy()  # [N]
        step = envs.step(action)
        rollout.put_step(t, action, step)
        state.obs = step.obs
    state.global_step += args.batch_size


STATS = ("losses/policy_loss", "losses/value_loss", "losses/entropy", "losses/approx_kl", "losses/clipfrac",
         "losses/clipfrac_low", "losses/clipfrac_high", "losses/grad_norm")  # fmt: skip


def update(state: TrainState, rollout: Rollout, minibatch_step: Callable, args: Args) -> dict[str, Tensor | float]:
    """Advantages, then K epochs of shuffled minibatches: the rest of algorithm 1."""
    agent, device = state.agent, args.device
    rollout = rollout.to(device)
    rewards = rollout.rewards.sign() if args.clip_rewards else rollout.rewards  # [T, N]
    obs, final_obs, actions = (x.flatten(0, 1) for x in (rollout.obs, rollout.final_obs, rollout.actions))  # [T·N, ...]
    with torch.no_grad():
        size = args.batch_size // args.num_minibatches  # all at once would need 0.3 MB a frame for activations
        now = [agent(x) for x in obs.split(size)]
        old_logprob = torch.cat([policy.log_prob(a) for (policy, _), a in zip(now, actions.split(size), strict=True)])
        values = torch.cat([value for _, value in now]).view_as(rewards)  # [T, N]
        next_values = torch.cat([agent(x)[1] for x in final_obs.split(size)]).view_as(rewards)
        flags = rollout.terminated, rollout.done
        advantages = gae(rewards.to(values.dtype), values, next_values, *flags, args.gamma, args.gae_lambda)  # [T, N]
        returns = advantages + values

    batch = [obs, actions, old_logprob, *(x.flatten() for x in (values, advantages, returns))]  # [T·N, ...]
    remaining = 1.0 - state.iteration * args.batch_size / args.total_timesteps if args.anneal_lr else 1.0
    learning_rate = torch.tensor(args.learning_rate * remaining, device=device)
    coefs = (args.clip_coef, args.clip_value_loss, args.vf_coef, args.ent_coef, args.max_grad_norm)
    epochs = []
    for _ in range(args.update_epochs):
        order = torch.randperm(args.batch_size, generator=state.minibatch_generator, device=device)
        rows = order.view(args.num_minibatches, -1)  # [minibatches, M]
        # cloned, since a replayed CUDA graph writes into the same memory again
        stats = [minibatch_step(agent, state.optimizer, batch, index, learning_rate, *coefs).clone() for index in rows]
        epochs.append(torch.stack(stats).mean(0))
    state.iteration += 1
    return {
        **dict(zip(STATS, torch.stack(epochs).mean(0), strict=True)),
        "losses/approx_kl": epochs[-1][STATS.index("losses/approx_kl")],
        "losses/explained_variance": explained_variance(values, returns),
        "charts/learning_rate": learning_rate,
    }


def minibatch_step(
    agent: Agent, optimizer: Adam, batch: list[Tensor], index: Tensor, learning_rate: Tensor,
    clip_coef: float, clip_value_loss: bool, vf_coef: float, ent_coef: float, max_grad_norm: float,
) -> Tensor:  # fmt: skip
    """Loss, gradient and one optimizer step on the rows `index` [M]; returns the numbers named by `STATS`."""
    obs, actions, old_logprob, old_value, advantages, returns = (x[index] for x in batch)  # [M, ...]
    policy, value = agent(obs)
    logprob = policy.log_prob(actions)  # [M]
    policy_loss = aggregate(clipped_surrogate(logprob, old_logprob, normalize(advantages), clip_coef, clip_coef))
    if clip_value_loss:
        value_loss = aggregate(clipped_value_loss(value, old_value, returns, clip_coef))
    else:
        value_loss = aggregate(squared_value_loss(value, returns))
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
    game = args.env.startswith("ALE/") and args.vec in ("auto", "atari")  # whose engine knows what follows
    sticky = {"repeat_action_probability": args.repeat_action_probability} if game else {}
    learning = {**sticky, "episodic_life": args.episodic_life} if game else {}
    with usage_errors():
        check_game_flags(args, game)
        envs = make_vec(args.env, args.num_envs, args.seed, args.vec, threads=args.env_threads, env_kwargs=learning)
        check_spaces(envs, "discrete", frames=True)
        eval_envs = make_vec(args.env, args.eval_episodes, args.seed, args.vec, EVAL_STREAM, args.env_threads, sticky)

    def evaluate(state: TrainState) -> tuple[np.ndarray, np.ndarray]:
        """Returns and lengths of the deterministic policy's games: its most likely actions."""
        agent = state.agent

        def likeliest_action(obs: Tensor) -> Tensor:
            return agent(obs)[0].mode()

        return run_episodes(eval_envs, on_arrays(likeliest_action, args.device, torch.uint8))

    with Run(args, envs, evaluate) as run:
        fast_act = compile_function(act, run.compile, args.device)
        fast_minibatch_step = compile_function(minibatch_step, run.compile, args.device)
        state = run.resume_or(lambda: TrainState.create(args, envs))
        shapes, dtypes = (state.obs.shape[1:], envs.single_action_space.shape), (torch.uint8, torch.int64)
        rollout = Rollout.allocate(args.num_steps, args.num_envs, *shapes, *dtypes)
        while state.global_step < args.total_timesteps:
            with run.phase("collect"):
                collect(state, envs, rollout, fast_act, args)  # [T, N]
            with run.phase("update"):
                run.metrics(update(state, rollout, fast_minibatch_step, args))
            run.end_iteration(state)
        results = run.results(state)
        save_policy(run.run_dir / "policy", state.agent, args, envs, {**run.recorded, **results, "env_kwargs": sticky})
        run.finish(results)


def save_policy(folder: Path, agent: Agent, args: Args, envs: VecEnv, card: dict) -> None:
    """The policy as a file of its own, without critic and optimizer: `python -m cleanrl_zoo.zoo evaluate <folder>`."""
    sizes = [args.hidden, int(envs.single_action_space.n)]
    shape = {"obs_shape": list(envs.single_observation_space.shape), "channels": list(args.channels)}
    card["policy"] = {**zoo.policy_spec(sizes, "relu", envs.single_action_space), "builder": "nature_cnn", **shape}
    zoo.save(folder, policy=zoo.Policy(card["policy"], nn.Sequential(agent.features, agent.actor)), card=card)


if __name__ == "__main__":
    main(parse_args(Args, PRESETS))
