"""PETS: probabilistic ensembles with trajectory sampling, planning with a learned model and no policy network.

Chua, Calandra, McAllister & Levine (2018), "Deep Reinforcement Learning in a Handful of Trials using Probabilistic
Dynamics Models", arXiv:1805.12114, algorithm 1. An ensemble of E Gaussians p_i(s' − s | s, a) is fitted to all real
transitions after every episode. Every real step, a plan a_0 … a_{H−1} is sought whose imagined return is highest, and
its first action is taken:

    s_0 = s,   (s_{h+1} − s_h) ~ N(μ_i(s_h, a_h), Σ_i(s_h, a_h)) for each of 20 particles          section 5
    R(a_0 … a_{H−1}) = mean over particles of Σ_h γʰ r(s_h, a_h, s_{h+1})

    ts1    a particle's member i is drawn anew at every step: a plan that does not know which model is right
    tsinf  a particle keeps its member for the whole plan: one of the models is right, and which stays so

The cross-entropy method improves a normal distribution over plans (appendix; Botev et al. 2013):

    plans ~ N(μ, min(σ², (half the distance of μ to the nearer bound)²)), cut off at two deviations
    μ ← αμ + (1 − α) mean of the best plans,   σ² ← ασ² + (1 − α) variance of the best plans

μ begins where the last step's plan, shifted by one step, goes on, σ at a quarter of the box. `--optimizer random` takes
the best of as many plans, drawn uniformly.

Deviations from the paper, each with its reason:

 1. All plans of one round of the search are imagined under the same noise and, in ts1, the same draws of members: what
    differs between two plans is then their actions alone, and that noise is drawn once instead of once per plan. A
    plan's own return is distributed as in the paper.
 2. Members come in equal shares: of 20 particles and 5 members, 4 each, in ts1 at every step.
 3. A fit ends when none of the members has got better on a holdout for some epochs, and each keeps its best weights, as
    in algos/mbpo.py; the authors train for a fixed number of epochs. Bootstrap draws are made once per transition.
 4. Targets are normalised as the inputs are (`--no-scale-targets`: as published, inputs only). A change of position
    within a step of 0.02 s is a hundredth of one of velocity, and would hardly be learned.
 5. Rewards after an imagined termination count 0, and the particle stays where it ended; the paper's tasks never end.
 6. Rewards and terminations are known functions (envs/model_functions.py), as in the paper; `--learn-reward` has the
    model predict the reward as well. HalfCheetah-v4 does not observe the way it went, as the authors' own version does:
    the reward is that of the observed velocities.

There is no policy to save: the zoo holds none of this file. The model is saved in <run folder>/model together with the
episodes of the last evaluation, which it never learned from: `python benchmarks/world_model.py <run folder>`.
Every step of an evaluation is a search as well, so that it has few episodes, and comes by default only at the end, with
random numbers of its own; the training episodes are played without any exploration noise and are the learning curve.

This file is longer than 300 lines: two searches and two ways to propagate particles, each with its shapes.

Run:    python algos/pets.py --preset swing_up
Expect: 146 ± 1 in the final evaluation after 2500 real steps, three seeds (results/model_based), minutes on one core.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cleanrl_zoo.data.model_data import ModelData
from cleanrl_zoo.envs import EVAL_STREAM, VecEnv, VecStep, check_spaces, make_vec, run_episodes
from cleanrl_zoo.envs.episodes import on_arrays, played_episodes
from cleanrl_zoo.envs.model_functions import features, reward, termination
from cleanrl_zoo.nn import Adam, GaussianEnsemble, fit, fit_step, save_model
from cleanrl_zoo.run import EnvArgs, Run, check, compile_function, fold, parse_args, torch_generator, usage_errors
from cleanrl_zoo.run.arguments import check_learning_starts


@dataclass
class Args(EnvArgs):
    """Probabilistic ensembles with trajectory sampling."""

    env: str = "cartpole/SwingUp-v0"
    """environment with a bounded Box action space whose reward and termination are known to the model"""
    num_envs: int = 1
    """environments stepped side by side; each plans by itself"""
    total_timesteps: int = 2500
    """real environment steps of the whole run"""
    learning_starts: int = 200
    """real steps with uniformly random actions before the first fit"""
    optimizer: Literal["cem", "random"] = "cem"
    """search for a plan: cross-entropy method, or the best of as many random plans"""
    horizon: int = 25
    """H, steps of a plan"""
    population: int = 400
    """plans per round of the search"""
    rounds: int = 5
    """rounds of the search"""
    kept: int = 40
    """plans of a round that the next one's distribution is made of"""
    momentum: float = 0.1
    """α, weight of the old distribution"""
    propagation: Literal["ts1", "tsinf"] = "tsinf"
    """a particle draws its member at every step, or keeps it for the whole plan"""
    particles: int = 20
    """imagined trajectories per plan, shared out evenly among the members"""
    gamma: float = 1.0
    """discount factor within a plan"""
    members: int = 5
    """networks in the model (E)"""
    hidden: tuple[int, ...] = (200, 200, 200)
    """widths of the hidden layers of the model"""
    learning_rate: float = 1e-3
    """Adam's learning rate for the model"""
    weight_decay: float = 5e-5
    """λ of ½λ|W|² for each layer of the model"""
    batch_size: int = 32
    """transitions per member and step of a fit"""
    patience: int = 5
    """epochs without a better holdout error that end a fit"""
    max_epochs: int = 200
    """epochs after which a fit ends anyway"""
    model_every: int = 0
    """real steps between two fits of the model; 0: after every episode"""
    scale_targets: bool = True
    """normalise the targets of the model as its inputs are"""
    learn_reward: bool = False
    """the model predicts the reward too, instead of its known function"""
    eval_every: int = 0
    """real steps between two evaluations, whose every step is a search; 0: only at the end"""
    eval_episodes: int = 3
    """episodes of one evaluation"""
    log_every: int = 200
    """real steps between two rows of the log; metrics are means over the interval"""
    checkpoint_every: int = 1000
    """real steps between two checkpoints; 0: only at the end"""

    def check(self) -> None:
        super().check()
        check(self, "horizon", "population", "rounds", "kept", "particles", "members", "hidden", "batch_size",
              "patience", "max_epochs", at_least=1)  # fmt: skip
        check(self, "learning_rate", above=0)
        check(self, "weight_decay", "model_every", at_least=0)
        check(self, "gamma", at_least=0, at_most=1)
        check(self, "momentum", at_least=0, below=1)
        check_learning_starts(self)
        if self.learning_starts < 10:
            raise ValueError(f"--learning-starts {self.learning_starts}: must be at least 10, the first fit's data")
        if self.kept > self.population:
            raise ValueError(f"--kept {self.kept}: must be at most --population {self.population}")
        if self.particles % self.members:
            raise ValueError(f"--particles {self.particles}: must be a multiple of --members {self.members}")


# A smaller model and fewer plans than by default, which these tasks need no more of: minutes on one core.
SMALL = {"hidden": (64, 64), "rounds": 3, "population": 150, "kept": 15, "checkpoint_every": 500}
PRESETS = {
    "cart_pole": {"env": "cartpole/Balance-v0", "horizon": 25, **SMALL},
    "swing_up": {"env": "cartpole/SwingUp-v0", "horizon": 30, **SMALL},
    "pendulum": {"env": "Pendulum-v1", "horizon": 25, "total_timesteps": 2000, **SMALL},
    "half_cheetah": {"env": "HalfCheetah-v4", "total_timesteps": 300_000, "learning_starts": 1000, "horizon": 30,
                     "population": 500, "kept": 50, "hidden": (200, 200, 200, 200), "log_every": 1000,
                     "checkpoint_every": 10_000},
    "half_cheetah_light": {"env": "HalfCheetah-v4", "total_timesteps": 10_000, "learning_starts": 1000, "horizon": 20,
                           **SMALL, "log_every": 1000, "checkpoint_every": 1000},
    "debug": {"env": "cartpole/Balance-v0", "total_timesteps": 320, "learning_starts": 48, "horizon": 3,
              "population": 8, "rounds": 2, "kept": 2, "members": 2, "particles": 4, "hidden": (8, 8),
              "model_every": 64, "patience": 1, "max_epochs": 2, "compile": False, "eval_episodes": 2,
              "checkpoint_every": 96, "log_every": 64, "env_threads": 1},
}  # fmt: skip


class World(NamedTuple):
    """What is known of the environment."""

    low: Tensor  # the box of actions, [A]
    high: Tensor
    features: Callable  # obs -> what the model sees of it
    ended: Callable  # next_obs -> bool
    reward: Callable | None  # (obs, action, next_obs) -> reward; None: the model's first target

    @property
    def middle(self) -> Tensor:
        return (self.low + self.high) / 2


@dataclass
class TrainState:
    """All that changes during training; a checkpoint is this, the environments and the log's position."""

    model: GaussianEnsemble
    optimizer: Adam
    data: ModelData  # inputs: obs and action; targets: change of obs, behind the reward where that is learned
    obs: np.ndarray  # [N, D] what the next action is chosen on
    plans: Tensor  # [N, H, A] where the next search begins
    middle: Tensor  # [A] of a plan that nothing is known of
    noise_generator: torch.Generator
    model_generator: torch.Generator
    global_step: int = 0
    fits: int = 0

    @classmethod
    def create(cls, args: Args, envs: VecEnv, world: World) -> "TrainState":
        obs_dim, action_dim = envs.single_observation_space.shape[0], len(world.low)
        inputs = world.features(torch.zeros(obs_dim)).shape[0] + action_dim
        targets = obs_dim + args.learn_reward
        model = GaussianEnsemble(
            args.members, inputs, targets, args.hidden, generator=torch_generator(args.seed, "init"),
            scale_targets=args.scale_targets,
        ).to(args.device)  # fmt: skip
        return cls(
            model=model,
            optimizer=Adam(model.parameters()),
            data=ModelData(args.total_timesteps + args.num_envs, obs_dim + action_dim, targets, args.members),
            obs=envs.reset(),
            plans=world.middle.repeat(args.num_envs, args.horizon, 1),
            middle=world.middle,
            noise_generator=torch_generator(args.seed, "noise", args.device),
            model_generator=torch_generator(args.seed, "model"),
        )

    def cut(self, obs: np.ndarray) -> None:
        """Goes on in `obs` [N, D] after all episodes were dropped, as an engine does that cannot save its state."""
        self.obs = obs
        self.plans[:] = self.middle


def imagine(
    model: GaussianEnsemble, world: World, obs: Tensor, plans: Tensor, noise: Tensor, deal: Tensor | None, gamma: float
) -> tuple[Tensor, Tensor]:
    """Mean return [P] of plans [P, H, A] that start in `obs` [D], and the sum of all predictions (to find a NaN).

    noise: standard normal [H, S, targets] for S particles. The e-th S/E places belong to member e. A particle keeps its
    place (ts∞), or place p takes the particle from place deal[h, p] before step h (ts1; deal int64 [H, S], each row a
    permutation).
    """
    population, particles = len(plans), noise.shape[1]

    def step(carry: tuple[Tensor, ...], row: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        state, alive, returns, total, discount = carry
        action, draws, *place = row  # [P, A], [S, targets], and [S] in ts1
        if place:
            state, alive = state[place[0]], alive[place[0]]
        action = action.expand(particles, -1, -1)  # [S, P, A]
        inputs = torch.cat([world.features(state), action], -1)
        prediction = model(inputs.view(model.members, -1, inputs.shape[-1]))  # [E, S/E · P, targets]
        draws = draws.unsqueeze(1).expand(-1, population, -1).reshape(prediction.mean.shape)
        target = prediction.sample(draws).view(particles, population, -1)
        next_state = state + target[..., -state.shape[-1] :]
        earned = target[..., 0] if world.reward is None else world.reward(state, action, next_state)
        returns = returns + discount * (alive * earned).mean(0)
        alive = alive * (~world.ended(next_state))
        state = torch.where(alive.unsqueeze(-1) > 0, next_state, state)
        return state, alive, returns, total + target.sum(), discount * gamma

    state = obs.repeat(particles, population, 1)  # [S, P, D]
    begin = (torch.ones_like(state[..., 0]), obs.new_zeros(population), obs.new_zeros(()), obs.new_ones(()))
    rows = (plans.transpose(0, 1).contiguous(), noise) + (() if deal is None else (deal,))
    _, _, returns, total, _ = fold(step, (state, *begin), rows)
    return returns, total


def cem_step(
    model: GaussianEnsemble, world: World, obs: Tensor, mean: Tensor, variance: Tensor, draws: Tensor, noise: Tensor,
    deal: Tensor | None, kept: int, momentum: float, gamma: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """One round of the cross-entropy method over plans: the distribution's new mean and variance [H, A], the mean
    return of the plans that were kept, and the sum of all predictions (to find a NaN).

    draws: standard normal, cut off at two deviations, [P, H, A]. The rest as in `imagine`.
    """
    room = torch.minimum(mean - world.low, world.high - mean) / 2
    plans = mean + torch.minimum(variance.sqrt(), room) * draws  # [P, H, A]
    returns, total = imagine(model, world, obs, plans, noise, deal, gamma)
    best = returns.topk(kept)
    chosen = plans[best.indices]  # [kept, H, A]
    mean = torch.lerp(chosen.mean(0), mean, momentum)
    variance = torch.lerp(chosen.var(0, correction=0), variance, momentum)
    return mean, variance, best.values.mean(), total


def random_step(
    model: GaussianEnsemble, world: World, obs: Tensor, draws: Tensor, noise: Tensor, deal: Tensor | None, gamma: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The best [H, A] of P plans, its return, and the sum of all predictions (to find a NaN).

    draws: uniform in [0, 1), [P, H, A]. The rest as in `imagine`.
    """
    plans = torch.lerp(world.low, world.high, draws)
    returns, total = imagine(model, world, obs, plans, noise, deal, gamma)
    best = returns.topk(1)
    return plans[best.indices][0], best.values[0], total


@torch.no_grad()
def search(
    model: GaussianEnsemble, world: World, obs: Tensor, begin: Tensor, step: Callable, generator: torch.Generator,
    args: Args,
) -> tuple[Tensor, dict[str, Tensor], Tensor]:  # fmt: skip
    """The plan [H, A] for `obs` [D], what it promises, and the sum of all predictions (to find a NaN).

    begin: [H, A], where the cross-entropy method begins. step: `cem_step` or `random_step`, compiled or not.
    """
    device, shape = begin.device, (args.population, *begin.shape)
    targets = model.min_logvar.shape[0]
    # a copy, as all that follow are: an expanded view would be compiled for by itself
    mean, variance = begin, ((world.high - world.low) / 4).square().expand_as(begin).clone()
    value, total = torch.full((), -torch.inf, device=device), torch.zeros((), device=device)
    for _ in range(args.rounds):
        noise = torch.randn(args.horizon, args.particles, targets, generator=generator, device=device)
        deal = None
        if args.propagation == "ts1":
            deal = torch.rand(args.horizon, args.particles, generator=generator, device=device).argsort(-1)
        # what a step gives is cloned, since a replayed CUDA graph writes into the same memory again
        if args.optimizer == "cem":
            draws = torch.nn.init.trunc_normal_(torch.empty(shape, device=device), a=-2.0, b=2.0, generator=generator)
            outputs = step(model, world, obs, mean, variance, draws, noise, deal, args.kept, args.momentum, args.gamma)
            mean, variance, value, finite = (x.clone() for x in outputs)
        else:
            draws = torch.rand(shape, generator=generator, device=device)
            plan, found, finite = (x.clone() for x in step(model, world, obs, draws, noise, deal, args.gamma))
            mean, value = torch.where(found > value, plan, mean), torch.maximum(found, value)
        total = total + finite
    stats = {"charts/planned_return": value}
    if args.optimizer == "cem":
        stats["charts/planned_std"] = variance.sqrt().mean()
    return mean, stats, total


def plan(state: TrainState, world: World, step: Callable, args: Args) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """The first actions [N, A] of a plan for each environment, what they promise, and as `search` a number."""
    generator, shape = state.noise_generator, (args.num_envs, len(world.low))
    if state.fits == 0:
        share = torch.rand(shape, generator=generator, device=args.device)
        return torch.lerp(world.low, world.high, share), {}, share.sum()
    obs = torch.as_tensor(state.obs, dtype=torch.float32, device=args.device)  # [N, D]
    total, promised = torch.zeros((), device=args.device), []
    for env in range(args.num_envs):
        found, stats, finite = search(state.model, world, obs[env], state.plans[env], step, generator, args)
        state.plans[env] = found
        promised.append(stats)
        total = total + finite
    means = {tag: torch.stack([stats[tag] for stats in promised]).mean() for tag in promised[0]}
    return state.plans[:, 0].clone(), means, total


def collect(state: TrainState, envs: VecEnv, action: Tensor) -> VecStep:
    """One step of every environment with `action` [N, A], stored for the model; plans move on by a step."""
    action = action.cpu()
    step = envs.step(action.numpy())
    obs = torch.as_tensor(state.obs, dtype=torch.float32)
    target = torch.as_tensor(step.final_obs, dtype=torch.float32) - obs
    if state.data.targets.shape[-1] > obs.shape[-1]:
        target = torch.cat([torch.as_tensor(step.reward, dtype=torch.float32).unsqueeze(-1), target], -1)
    state.data.add(torch.cat([obs, action], -1), target)
    state.plans = torch.cat([state.plans[:, 1:], state.middle.expand_as(state.plans[:, :1])], 1)
    state.plans[torch.from_numpy(step.terminated | step.truncated)] = state.middle
    state.obs = step.obs
    state.global_step += len(step.obs)
    return step


def update(state: TrainState, world: World, fit_step: Callable, args: Args) -> dict[str, Tensor | float]:
    """Fits the model to all real transitions (algorithm 1, line 3)."""
    data, device = state.data, args.device
    data.commit(state.model_generator)
    obs, action = data.inputs.to(device).split([state.obs.shape[-1], len(world.low)], -1)
    fitted = fit(
        state.model, state.optimizer, torch.cat([world.features(obs), action], -1), data.targets.to(device),
        data.bootstrap.to(device), data.holdout.to(device), state.model_generator, args.learning_rate,
        [args.weight_decay] * (len(args.hidden) + 1), args.batch_size, args.patience, args.max_epochs, fit_step,
    )  # fmt: skip
    state.fits += 1
    return {
        "losses/model_nll": fitted.train_nll.mean(),
        "losses/model_error": fitted.holdout_error.mean(),
        "charts/model_epochs": fitted.epochs,
        **{f"model/error_{i}": error for i, error in enumerate(fitted.holdout_error)},
    }


def main(args: Args) -> None:
    with usage_errors():
        envs = make_vec(args.env, args.num_envs, args.seed, args.vec, threads=args.env_threads)
        check_spaces(envs, "box")
        space = envs.single_action_space
        if not np.isfinite([space.low, space.high]).all():
            raise ValueError(f"--env {args.env}: actions {space}: the bounds must be finite")
        low, high = (torch.as_tensor(x, dtype=torch.float32, device=args.device) for x in (space.low, space.high))
        known = None if args.learn_reward else reward(args.env)
        world = World(low, high, features(args.env), termination(args.env), known)
        eval_envs = make_vec(args.env, args.eval_episodes, args.seed, args.vec, EVAL_STREAM, args.env_threads)
    played: list[tuple[np.ndarray, np.ndarray]] = []  # obs and actions of the last evaluation's episodes

    def evaluate(state: TrainState) -> tuple[np.ndarray, np.ndarray]:
        """Returns and lengths of episodes that are planned with random numbers of their own."""
        generator = torch_generator(args.seed, "evaluation", args.device)
        plans = world.middle.repeat(args.eval_episodes, args.horizon, 1)
        steps: list[tuple[np.ndarray, np.ndarray]] = []

        def first_actions(obs: Tensor) -> Tensor:
            for env, begin in enumerate(plans):
                found, _, total = search(state.model, world, obs[env], begin, fast_step, generator, args)
                run.check_finite(**{"a prediction of the model": total})
                actions[env], plans[env] = found[0], torch.cat([found[1:], world.middle.unsqueeze(0)])
            return actions

        actions = torch.zeros(args.eval_episodes, len(low), device=args.device)
        outcome = run_episodes(eval_envs, on_arrays(first_actions, args.device), steps=steps)
        played[:] = played_episodes(steps, outcome[1])
        return outcome

    with Run(args, envs, evaluate) as run:
        functions = (cem_step if args.optimizer == "cem" else random_step, fit_step)
        fast_step, fast_fit = (compile_function(function, run.compile, args.device) for function in functions)
        state = run.resume_or(lambda: TrainState.create(args, envs, world))
        while state.global_step < args.total_timesteps:
            with run.phase("plan"):
                action, stats, total = plan(state, world, fast_step, args)
            run.check_finite(**{"a prediction of the model": total})
            run.metrics(stats)
            with run.phase("collect"):
                made = collect(state, envs, action)
            run.check_finite(rewards=made.reward, observations=made.final_obs)
            since = state.global_step - args.learning_starts
            due = (
                since >= state.fits * args.model_every if args.model_every else (made.terminated | made.truncated).any()
            )
            if since >= 0 and (due or state.fits == 0):
                with run.phase("model"):
                    run.metrics(update(state, world, fast_fit, args))
            run.end_iteration(state)
        results = run.results(state)
        if not played:  # resumed after the last evaluation
            evaluate(state)
        save_model(run.run_dir / "model", state.model, played, {**run.recorded, **results})
        run.finish(results)


if __name__ == "__main__":
    main(parse_args(Args, PRESETS))
