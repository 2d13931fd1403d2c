"""Deep Q-learning for Atari games, from frames, with four parts to switch on one at a time.

Mnih et al. (2015), "Human-level control through deep reinforcement learning", Nature 518, algorithm 1. With B a batch
from the replay, Q_θ the network and Q_θ̄ its slow copy:

    y    = r + γ(1 − terminated) max_a' Q_θ̄(s', a')
    L(θ) = E_B[ ½ δ² ],   δ = y − Q_θ(s, a)             for --double, --dueling, --prioritized and --n-step see dqn.py

What changes from dqn.py: the network, which reads four stacked frames; the rewards, of which the sign is learned from;
the games, in which a lost life ends the return that is learned from (reported are whole games and their own rewards). A
million transitions take 7 GB, since each frame of Atari's engine, whose stacks move by one frame, is stored once.

Deviations from the papers, each with its reason: numbers 2 to 6 of dqn.py, and

 a. The defaults are CleanRL's, Adam and the squared error among them (the paper's is --loss huber), but for eight games
    side by side and orthogonal weights. Evaluations are greedy (paper: ε = 0.05).
 b. ale-py cannot save a game: each checkpoint starts new ones and must leave ten time limits to each (2,160,000 steps).

This file is longer than 300 lines: each of the four parts costs its own.

Run:    python algos/dqn_atari.py --preset pong    (10,000,000 steps, for days: --env ALE/Pong-v5)
Expect: -10 (last 100 training games, one seed; -21 at the start), in an hour and a quarter on one core.
"""

import math
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from cleanrl_zoo import zoo
from cleanrl_zoo.core import aggregate, double_q_target, polyak_update, q_target, squared_value_loss
from cleanrl_zoo.data.prioritized import ProportionalReplay, RankReplay
from cleanrl_zoo.data.replay import Batch, Replay
from cleanrl_zoo.envs import EVAL_STREAM, VecEnv, check_spaces, make_vec
from cleanrl_zoo.envs.episodes import on_arrays, run_episodes
from cleanrl_zoo.nn import Adam, clip_grad_norm, dueling_as_linear, mlp, nature_cnn
from cleanrl_zoo.run import EnvArgs, Run, check, compile_function, parse_args, torch_generator, usage_errors
from cleanrl_zoo.run.arguments import check_game_flags, check_learning_starts


@dataclass
class Args(EnvArgs):
    """Deep Q-learning for Atari games."""

    env: str = "ALE/Breakout-v5"
    """name of an Atari game ("ALE/…-v5"), or of another environment with frames and a Discrete action space"""
    total_timesteps: int = 10_000_000
    """environment steps (of four screens) of the whole run, all environments together"""
    checkpoint_every: int = 2_500_000
    """steps between two checkpoints, at which all games start anew; 0: only at the end"""
    eval_every: int = 1_000_000
    """steps between two evaluations of the greedy policy; 0: only at the end"""
    episodic_life: bool = True
    """learn from lives instead of whole games"""
    repeat_action_probability: float = 0.0
    """sticky actions: the chance that the game repeats the last action instead; Machado et al. (2018) advise 0.25"""
    clip_rewards: bool = True
    """learn from the sign of the rewards"""
    double: bool = False
    """double DQN: the online network chooses the action whose slow value is the target"""
    dueling: bool = False
    """dueling network: state value and advantages apart"""
    prioritized: Literal["none", "proportional", "rank"] = "none"
    """prioritised replay: by the TD error or by its rank"""
    n_step: int = 1
    """rewards summed before the bootstrap (n)"""
    loss: Literal["squared", "huber"] = "squared"
    """loss of the TD error"""
    learning_rate: float = 1e-4
    """Adam's learning rate"""
    gamma: float = 0.99
    """discount factor"""
    buffer_size: int = 1_000_000
    """transitions that the replay holds"""
    learning_starts: int = 80_000
    """steps with uniformly random actions before the first update"""
    updates_per_step: float = 0.25
    """updates per environment step"""
    update_every: int = 1
    """environment steps between two rounds of updates; a policy that stays for some steps explores further"""
    batch_size: int = 32
    """transitions per update (B)"""
    target_update_every: int = 1000
    """environment steps between two updates of the slow copy"""
    tau: float = 1.0
    """τ, weight of the network in each update of its slow copy; 1 copies"""
    start_epsilon: float = 1.0
    """ε, chance of a random action, at step 0"""
    end_epsilon: float = 0.01
    """ε after it has fallen"""
    exploration_fraction: float = 0.1
    """share of the run over which ε falls linearly"""
    per_alpha: float = 0.6
    """α of prioritised replay; 0 is uniform"""
    per_beta: float = 0.4
    """β of its importance weights at step 0; 1 at the end"""
    max_grad_norm: float | None = None
    """norm to which the gradient is clipped; by default it is not"""
    channels: tuple[int, int, int] = (32, 64, 64)
    """filters of the three convolutions"""
    hidden: int = 512
    """width of the dense layer"""

    def check(self) -> None:
        super().check()
        check(self, "n_step", "update_every", "batch_size", "target_update_every", "channels", "hidden", at_least=1)
        check(self, "learning_rate", "updates_per_step", "max_grad_norm", above=0)
        check(self, "gamma", "start_epsilon", "end_epsilon", "per_alpha", "per_beta", at_least=0, at_most=1)
        check(self, "repeat_action_probability", at_least=0, at_most=1)
        check(self, "tau", "exploration_fraction", above=0, at_most=1)
        check(self, "buffer_size", at_least=self.num_envs)
        check_learning_starts(self)

    @property
    def capacity(self) -> int:
        """Transitions that the replay has room for: no more than will ever be stored."""
        return min(self.buffer_size, self.total_timesteps + self.num_envs)

    def epsilon(self, step: int) -> float:
        """The chance of a random action at this environment step."""
        fallen = min(1.0, step / (self.exploration_fraction * self.total_timesteps))
        epsilon = self.start_epsilon + fallen * (self.end_epsilon - self.start_epsilon)
        return 1.0 if step < self.learning_starts else epsilon


PRESETS = {
    "pong": {"env": "ALE/Pong-v5", "total_timesteps": 500_000, "double": True, "n_step": 3, "loss": "huber",
             "learning_rate": 2.5e-4, "buffer_size": 500_000, "learning_starts": 10_000, "target_update_every": 2000,
             "exploration_fraction": 0.2, "max_grad_norm": 10.0, "channels": (16, 32, 32), "hidden": 256},
    "debug": {"env": "probe/MatchFrames-v0", "total_timesteps": 1024, "num_envs": 2, "env_threads": 1, "compile": False,
              "learning_starts": 128, "updates_per_step": 0.0625, "target_update_every": 100, "channels": (4, 4, 4),
              "hidden": 16, "eval_every": 0, "eval_episodes": 2, "checkpoint_every": 512, "log_every": 256},
}  # fmt: skip
REPLAYS = {"none": Replay, "proportional": ProportionalReplay, "rank": RankReplay}


class QNetwork(nn.Module):
    """Q(s, ·), [B, A] for frames [B, C, H, W]; dueling, the dense layer is two side by side, of A and of V."""

    def __init__(self, args: Args, envs: VecEnv, generator: torch.Generator) -> None:
        super().__init__()
        num_actions, width = int(envs.single_action_space.n), args.hidden
        self.sizes = [2 * width if args.dueling else width, num_actions]
        self.features = nature_cnn(envs.single_observation_space.shape, args.channels, self.sizes[0], generator)
        self.head = mlp([width, num_actions], generator=generator)  # of Q, or of A
        self.value = mlp([width, 1], generator=generator) if args.dueling else None

    def forward(self, obs: Tensor) -> Tensor:
        features = self.features(obs)
        if self.value is None:
            return self.head(features)
        features, features_of_value = features.chunk(2, -1)
        advantage = self.head(features)
        return self.value(features_of_value) + advantage - advantage.mean(-1, keepdim=True)  # [B, A]

    @torch.no_grad()
    def as_chain(self) -> nn.Sequential:
        """The same function as a plain chain of layers: V + A − mean A is linear in what the two layers below say."""
        weight, bias = self.head.parameters()  # [A, W], [A]
        if self.value is not None:
            weight, bias = dueling_as_linear(self.head[0], self.value[0])  # [A, 2W], [A]
        head = mlp(self.sizes, generator=torch.Generator()).to(weight.device)
        head[0].weight.copy_(weight), head[0].bias.copy_(bias)
        return nn.Sequential(self.features, head)


@dataclass
class TrainState:
    """All that changes during training; a checkpoint is this, the environments and the log's position."""

    online: QNetwork
    target: QNetwork  # its slow copy
    optimizer: Adam
    replay: Replay
    obs: np.ndarray  # uint8 [N, C, H, W] what the next action is chosen on
    noise_generator: torch.Generator
    minibatch_generator: torch.Generator
    global_step: int = 0
    updates: int = 0
    target_updates: int = 0

    @classmethod
    def create(cls, args: Args, envs: VecEnv) -> "TrainState":
        online, obs = QNetwork(args, envs, torch_generator(args.seed, "init")).to(args.device), envs.reset()
        settings = {"obs_dtype": torch.uint8, "frame_stack": envs.engine == "atari", "gamma": args.gamma}
        settings |= {"action_dtype": torch.int64, "n_step": args.n_step, "device": args.device}
        settings |= {} if args.prioritized == "none" else {"alpha": args.per_alpha}
        replay = REPLAYS[args.prioritized](args.capacity, args.num_envs, obs.shape[1:], (), **settings)
        replay.begin(obs)
        generators = torch_generator(args.seed, "noise", args.device), torch_generator(args.seed, "minibatch")
        return cls(online, deepcopy(online).requires_grad_(False), Adam(online.parameters()), replay, obs, *generators)

    def cut(self, obs: np.ndarray) -> None:
        """Goes on in `obs` [N, C, H, W] after all games were dropped: the engine cannot save its state."""
        self.obs = obs
        self.replay.begin(obs)


@torch.no_grad()
def act(online: QNetwork, obs: Tensor, noise: Tensor, epsilon: Tensor) -> Tensor:
    """The ε-greedy actions [N] in `obs` [N, C, H, W]; `noise` [N, 2] uniform in [0, 1): whether to explore and how."""
    q_value = online(obs)  # [N, A]
    random_action = (noise[:, 1] * q_value.shape[-1]).long()
    return torch.where(noise[:, 0] < epsilon, random_action, q_value.argmax(-1))


def collect(state: TrainState, envs: VecEnv, act: Callable, args: Args) -> None:
    """One step of every environment, stored in the replay: the first half of algorithm 1's loop."""
    epsilon = torch.tensor(args.epsilon(state.global_step), device=args.device)
    noise = torch.rand(args.num_envs, 2, generator=state.noise_generator, device=args.device)
    action = act(state.online, torch.as_tensor(state.obs, device=args.device), noise, epsilon).cpu().numpy()  # [N]
    step = envs.step(action)
    state.replay.add(action, step._replace(reward=np.sign(step.reward)) if args.clip_rewards else step)
    state.obs = step.obs
    state.global_step += args.num_envs


STATS = ("losses/qf_loss", "losses/qf_values", "losses/grad_norm")


def update(state: TrainState, update_step: Callable, args: Args) -> dict[str, float]:
    """The updates of network and slow copy that have fallen due by this step: the second half of algorithm 1's loop."""
    replay, step = state.replay, state.global_step
    beta = args.per_beta + (1.0 - args.per_beta) * min(1.0, step / args.total_timesteps)
    constants = (args.learning_rate, args.double, args.loss == "huber", args.max_grad_norm or math.inf)
    last = step - step % args.update_every
    networks, prioritized, stats = (state.online, state.target), args.prioritized != "none", []
    while state.updates < int((last - args.learning_starts) * args.updates_per_step):
        index = replay.indices(args.batch_size, state.minibatch_generator)  # [B]
        weights = replay.weights(index, beta).to(args.device) if prioritized else None  # [B]
        batch = replay.gather(index)  # [B, ...]
        numbers, td_error = update_step(*networks, state.optimizer, batch, weights, *constants)
        if prioritized and numbers[0].isfinite():  # else the run ends with this iteration, and says what of
            replay.update_priorities(index, td_error.cpu())
        stats.append(numbers.clone())  # since a replayed CUDA graph writes into the same memory again
        state.updates += 1
    while state.target_updates < step // args.target_update_every:
        polyak_update(state.target, state.online, args.tau)
        state.target_updates += 1
    means = zip(STATS, torch.stack(stats).mean(0).tolist(), strict=True) if stats else ()
    return {**dict(means), "charts/epsilon": args.epsilon(step)}


def update_step(
    online: QNetwork, target_network: QNetwork, optimizer: Adam, batch: Batch, weights: Tensor | None,
    learning_rate: float, double: bool, huber: bool, max_grad_norm: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One gradient step; gives the numbers named by `STATS` and the TD errors [B]. weights [B]: None for all 1."""
    with torch.no_grad():
        next_q, rest = target_network(batch.next_obs), (batch.terminated, batch.discount)  # [B, A], 2 × [B]
        if double:
            target = double_q_target(batch.reward, online(batch.next_obs), next_q, *rest)  # [B]
        else:
            target = q_target(batch.reward, next_q, *rest)
    q_value = online(batch.obs).gather(-1, batch.action[:, None]).squeeze(-1)  # [B]
    loss = nn.functional.huber_loss(q_value, target, reduction="none") if huber else squared_value_loss(q_value, target)
    loss = aggregate(loss if weights is None else weights * loss)
    grads, grad_norm = clip_grad_norm(torch.autograd.grad(loss, optimizer.parameters), max_grad_norm)
    optimizer.step(grads, learning_rate)
    return torch.stack([loss, q_value.mean(), grad_norm]).detach(), (target - q_value).detach()


def main(args: Args) -> None:
    game = args.env.startswith("ALE/") and args.vec in ("auto", "atari")  # whose engine knows what follows
    sticky = {"repeat_action_probability": args.repeat_action_probability} if game else {}
    learning = {**sticky, "episodic_life": args.episodic_life} if game else {}
    with usage_errors():
        check_game_flags(args, game)
        envs = make_vec(args.env, args.num_envs, args.seed, args.vec, threads=args.env_threads, env_kwargs=learning)
        check_spaces(envs, "discrete", frames=True)
        eval_envs = make_vec(args.env, args.eval_episodes, args.seed, args.vec, EVAL_STREAM, args.env_threads, sticky)
        shape, once = envs.single_observation_space.shape, envs.engine == "atari"
        memory = REPLAYS[args.prioritized].plan(args.capacity, args.num_envs, shape, (), torch.uint8, once)

    def evaluate(state: TrainState) -> tuple[np.ndarray, np.ndarray]:
        """Returns and lengths of the greedy policy's games."""
        network = state.online.as_chain()
        return run_episodes(eval_envs, on_arrays(lambda obs: network(obs).argmax(-1), args.device, torch.uint8))

    with Run(args, envs, evaluate) as run:
        print(memory, file=sys.stderr)
        fast_act = compile_function(act, run.compile, args.device)
        fast_update_step = compile_function(update_step, run.compile, args.device)
        state = run.resume_or(lambda: TrainState.create(args, envs))
        while state.global_step < args.total_timesteps:
            with run.phase("collect"):
                collect(state, envs, fast_act, args)
            with run.phase("update"):
                run.metrics(update(state, fast_update_step, args))
            run.end_iteration(state)
        results, frames = run.results(state), {"obs_shape": list(shape), "channels": list(args.channels)}
        spec = {
            **zoo.policy_spec(state.online.sizes, "relu", envs.single_action_space),
            "builder": "nature_cnn",
            **frames,
        }
        card = {**run.recorded, **results, "policy": spec, "env_kwargs": sticky}
        zoo.save(run.run_dir / "policy", policy=zoo.Policy(spec, state.online.as_chain()), card=card)
        run.finish(results)


if __name__ == "__main__":
    main(parse_args(Args, PRESETS))
