"""Deep Q-learning for discrete actions, with four parts to switch on one at a time.

Mnih et al. (2015), "Human-level control through deep reinforcement learning", Nature 518, algorithm 1. With B a batch
from the replay, Q_θ the network and Q_θ̄ its slow copy:

    y    = r + γ(1 − terminated) max_a' Q_θ̄(s', a')
    L(θ) = E_B[ ½ δ² ],   δ = y − Q_θ(s, a)             with --loss huber |δ| − ½ where |δ| > 1
    --double        y = r + γ(1 − terminated) Q_θ̄(s', argmax_a' Q_θ(s', a'))       van Hasselt et al. (2016), equation 4
    --dueling       Q(s, a) = V(s) + A(s, a) − mean_a' A(s, a')                    Wang et al. (2016), equation 9
    --prioritized   P(i) ∝ p_iᵅ,   L = E_B[ w_i ½ δ_i² ],   w_i ∝ P(i)^−β          Schaul et al. (2016), section 3
    --n-step        y = Σ_{k<n} γᵏ r_{t+k} + γⁿ(1 − terminated) max_a' Q_θ̄(s_{t+n}, a')    Sutton (1988)

Deviations from the papers, each with its reason:

 1. The defaults are CleanRL's: Adam instead of RMSprop, two small layers, the squared error. The paper's clipped error
    is --loss huber.
 2. An episode cut by the time limit bootstraps from its last observation: only a termination ends the sum of rewards.
 3. With N environments, N steps are taken and then N × --updates-per-step updates made: as many as with one. "Train
    every f steps" elsewhere is 1/f here. --target-update-every counts environment steps, too (in the paper, updates).
 4. Dueling: V and A have a last hidden layer each; the gradient of what is below it is not divided by √2.
 5. Prioritised: β rises linearly to 1 over the run. The learning rate stays, which the paper divides by four.
 6. n steps: not corrected for exploring actions. The sum ends early, with its own power of γ, at an episode's end.

This file is longer than 300 lines: each of the four parts costs its own.

Run:    python algos/dqn.py --env CartPole-v1
Expect: 496 ± 5 (last 100 training episodes, five seeds), in three to five minutes on one core.
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
from cleanrl_zoo.envs import EVAL_STREAM, VecEnv, VecStep, check_spaces, make_vec
from cleanrl_zoo.envs.episodes import on_arrays, run_episodes
from cleanrl_zoo.nn import Adam, clip_grad_norm, dueling_as_linear, mlp, mlp_on_arrays, uniform_fan_in
from cleanrl_zoo.run import EnvArgs, Run, check, compile_function, parse_args, torch_generator, usage_errors
from cleanrl_zoo.run.arguments import check_learning_starts


@dataclass
class Args(EnvArgs):
    """Deep Q-learning for discrete actions."""

    env: str = "CartPole-v1"
    """Gymnasium's name of an environment with a Discrete action space and flat observations"""
    total_timesteps: int = 500_000
    """environment steps of the whole run, all environments together"""
    num_envs: int = 1
    """environments stepped side by side"""
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
    learning_rate: float = 2.5e-4
    """Adam's learning rate"""
    gamma: float = 0.99
    """discount factor"""
    buffer_size: int = 10_000
    """transitions that the replay holds"""
    learning_starts: int = 10_000
    """steps with uniformly random actions before the first update"""
    updates_per_step: float = 0.1
    """updates per environment step"""
    update_every: int = 1
    """environment steps between two rounds of updates; a policy that stays for some steps explores further"""
    batch_size: int = 128
    """transitions per update (B)"""
    target_update_every: int = 500
    """environment steps between two updates of the slow copy"""
    tau: float = 1.0
    """τ, weight of the network in each update of its slow copy; 1 copies"""
    start_epsilon: float = 1.0
    """ε, chance of a random action, at step 0"""
    end_epsilon: float = 0.05
    """ε after it has fallen"""
    exploration_fraction: float = 0.5
    """share of the run over which ε falls linearly"""
    per_alpha: float = 0.6
    """α of prioritised replay; 0 is uniform"""
    per_beta: float = 0.4
    """β of its importance weights at step 0; 1 at the end"""
    max_grad_norm: float | None = None
    """norm to which the gradient is clipped; by default it is not"""
    hidden: tuple[int, ...] = (120, 84)
    """widths of the hidden layers"""

    def check(self) -> None:
        super().check()
        check(self, "n_step", "update_every", "batch_size", "target_update_every", "hidden", at_least=1)
        check(self, "learning_rate", "updates_per_step", "max_grad_norm", above=0)
        check(self, "gamma", "start_epsilon", "end_epsilon", "per_alpha", "per_beta", at_least=0, at_most=1)
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
    "mountain_car": {"env": "MountainCar-v0", "total_timesteps": 120_000, "double": True, "n_step": 3, "loss": "huber",
                     "learning_rate": 1e-3, "buffer_size": 20_000, "learning_starts": 1000, "updates_per_step": 0.5,
                     "update_every": 16, "target_update_every": 600, "end_epsilon": 0.02, "exploration_fraction": 0.2,
                     "hidden": (128, 128)},
    "lunar_lander": {"env": "LunarLander-v3", "total_timesteps": 400_000, "num_envs": 4, "double": True, "n_step": 3,
                     "loss": "huber", "learning_rate": 3e-4, "gamma": 0.995, "buffer_size": 400_000, "tau": 0.005,
                     "updates_per_step": 0.5, "target_update_every": 4, "end_epsilon": 0.02,
                     "exploration_fraction": 0.15, "max_grad_norm": 10.0, "hidden": (256, 256)},
    "debug": {"total_timesteps": 1024, "num_envs": 4, "learning_starts": 128, "updates_per_step": 0.0625,
              "batch_size": 32, "target_update_every": 100, "hidden": (32, 32), "compile": False, "eval_episodes": 2,
              "checkpoint_every": 512, "env_threads": 1, "log_every": 256},
}  # fmt: skip
REPLAYS = {"none": Replay, "proportional": ProportionalReplay, "rank": RankReplay}


class QNetwork(nn.Module):
    """Q(s, ·), [B, A] for obs [B, D]; dueling, the last hidden layer is two side by side, of A and of V."""

    def __init__(self, args: Args, envs: VecEnv, generator: torch.Generator) -> None:
        super().__init__()
        num_actions, (*below, width) = int(envs.single_action_space.n), args.hidden
        last = 2 * width if args.dueling else width
        self.sizes = [*envs.single_observation_space.shape, *below, last, num_actions]
        self.features = nn.Sequential(*mlp(self.sizes[:-1], "relu"), nn.ReLU())
        self.head = mlp([width, num_actions])  # of Q, or of A
        self.value = mlp([width, 1]) if args.dueling else None
        uniform_fan_in(self, generator)

    def forward(self, obs: Tensor) -> Tensor:
        features = self.features(obs)
        if self.value is None:
            return self.head(features)
        features, features_of_value = features.chunk(2, -1)
        advantage = self.head(features)
        return self.value(features_of_value) + advantage - advantage.mean(-1, keepdim=True)  # [B, A]

    def preferences(self) -> Callable[[np.ndarray], np.ndarray]:
        """Of arrays [N, D], numbers [N, A] with the largest where Q has it: Q, or dueling A. By NumPy on the CPU."""
        width = self.head[0].in_features
        features, head = mlp_on_arrays(self.features), mlp_on_arrays(self.head)
        return lambda obs: head(features(obs)[:, :width])

    @torch.no_grad()
    def as_mlp(self) -> nn.Sequential:
        """The same function as a plain chain of layers: V + A − mean A is linear in what the two layers below say."""
        weight, bias = self.head.parameters()  # [A, W], [A]
        if self.value is not None:
            weight, bias = dueling_as_linear(self.head[0], self.value[0])  # [A, 2W], [A]
        chain = mlp(self.sizes, "relu", generator=torch.Generator()).to(weight.device)
        for own, parameter in zip(chain.parameters(), [*self.features.parameters(), weight, bias], strict=True):
            own.copy_(parameter)
        return chain


@dataclass
class TrainState:
    """All that changes during training; a checkpoint is this, the environments and the log's position."""

    online: QNetwork
    target: QNetwork  # its slow copy
    optimizer: Adam
    replay: Replay
    obs: np.ndarray  # [N, D] what the next action is chosen on
    noise_generator: torch.Generator
    minibatch_generator: torch.Generator
    global_step: int = 0
    updates: int = 0
    target_updates: int = 0

    @classmethod
    def create(cls, args: Args, envs: VecEnv) -> "TrainState":
        online, obs = QNetwork(args, envs, torch_generator(args.seed, "init")).to(args.device), envs.reset()
        settings = {"action_dtype": torch.int64, "n_step": args.n_step, "device": args.device}
        settings |= {} if args.prioritized == "none" else {"alpha": args.per_alpha}
        replay = REPLAYS[args.prioritized](args.capacity, args.num_envs, obs.shape[1:], (), args.gamma, **settings)
        replay.begin(obs)
        generators = torch_generator(args.seed, "noise"), torch_generator(args.seed, "minibatch")
        return cls(online, deepcopy(online).requires_grad_(False), Adam(online.parameters()), replay, obs, *generators)

    def __post_init__(self) -> None:
        self.preferences = self.online.preferences()  # reads the memory of this network: it is changed in place only

    def cut(self, obs: np.ndarray) -> None:
        """Goes on in `obs` [N, D] after all episodes were dropped, as an engine does that cannot save its state."""
        self.obs = obs
        self.replay.begin(obs)


def act(preferences: Callable, obs: np.ndarray, noise: np.ndarray, epsilon: float) -> np.ndarray:
    """The ε-greedy actions [N] in `obs` [N, D] with `noise` [N, 2], uniform in [0, 1): whether to explore, and how.

    Not compiled: one observation is faster through NumPy, see `QNetwork.preferences`.
    """
    preference = preferences(obs)  # [N, A]
    random_action = (noise[:, 1] * preference.shape[-1]).astype(np.int64)
    return np.where(noise[:, 0] < epsilon, random_action, preference.argmax(-1))


def collect(state: TrainState, envs: VecEnv, act: Callable, args: Args) -> VecStep:
    """One step of every environment, stored in the replay: the first half of algorithm 1's loop."""
    noise = torch.rand(args.num_envs, 2, generator=state.noise_generator).numpy()
    action = act(state.preferences, state.obs, noise, args.epsilon(state.global_step))  # [N]
    step = envs.step(action)
    state.replay.add(action, step)
    state.obs = step.obs
    state.global_step += args.num_envs
    return step


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
    with usage_errors():
        envs = make_vec(args.env, args.num_envs, args.seed, args.vec, threads=args.env_threads)
        check_spaces(envs, "discrete")
        eval_envs = make_vec(args.env, args.eval_episodes, args.seed, args.vec, EVAL_STREAM, args.env_threads)
        memory = REPLAYS[args.prioritized].plan(args.capacity, args.num_envs, envs.single_observation_space.shape)

    def evaluate(state: TrainState) -> tuple[np.ndarray, np.ndarray]:
        """Returns and lengths of the greedy policy's episodes."""
        network = state.online.as_mlp()
        return run_episodes(eval_envs, on_arrays(lambda obs: network(obs).argmax(-1), args.device))

    with Run(args, envs, evaluate) as run:
        print(memory, file=sys.stderr)
        fast_update_step = compile_function(update_step, run.compile, args.device)
        state = run.resume_or(lambda: TrainState.create(args, envs))
        while state.global_step < args.total_timesteps:
            with run.phase("collect"):
                step = collect(state, envs, act, args)
            run.check_finite(rewards=step.reward, observations=step.final_obs)
            with run.phase("update"):
                run.metrics(update(state, fast_update_step, args))
            run.end_iteration(state)
        results, network = run.results(state), state.online
        policy = zoo.Policy(zoo.policy_spec(network.sizes, "relu", envs.single_action_space), network.as_mlp())
        zoo.save(run.run_dir / "policy", policy=policy, card={**run.recorded, **results, "policy": policy.spec})
        run.finish(results)


if __name__ == "__main__":
    main(parse_args(Args, PRESETS))
