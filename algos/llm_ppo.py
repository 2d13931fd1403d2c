"""Proximal Policy Optimization of a language model with a critic: a reward for each token, and one for the completion.

Ouyang et al. (2022), "Training language models to follow instructions with human feedback", arXiv:2203.02155, section
3.5, after Ziegler et al. (2019), "Fine-Tuning Language Models from Human Preferences", arXiv:1909.08593, section 2.2.
R is a completion's score, ℓ the log-prob of a token, ℓ° the same before this batch's first update, ℓ^ref that of the
model as it was given, V the value of the text before the token.

    r_t = −β (ℓ°_t − ℓ^ref_t) + 1[t is the completion's last token] R           Ouyang et al., equation 2
    A_t = δ_t + γλ A_{t+1},   δ_t = r_t + γ V°_{t+1} − V°_t                     Schulman et al. (2016), equation 16
    G_t = A_t + V°_t                                                            what V is to become
    L   = mean over tokens of −min( w A, clip(w, 1−ε, 1+ε) A ),  w = exp(ℓ − ℓ°)  PPO's surrogate, to be minimised
          + c₁ ½ max( (V − G)², (V° + clip(V − V°, ±ε_V) − G)² ) − c₂ H
    β   ← β (1 + clip(KL / target − 1, ±0.2) · n / horizon)                     with --kl-target; n completions

Deviations from the papers, each with its reason:

 1. The value is a linear head, zero at first, on the policy's own trunk: half the memory. --separate-critic gives it a
    model of its own, a copy of the policy at the start; Ouyang et al. begin from the reward model.
 2. Advantages are whitened once per rollout, over all its tokens, after G was made of them; the papers do not say.
 3. A completion cut by --max-length is scored at its own last token and counts as ended; --bootstrap-truncated
    takes the value of the whole text in place of what would have followed.
 4. β is constant by default, as in Ouyang et al.; their mixture with pre-training gradients (PPO-ptx) is left out.
 5. Dropout is off while training too: the ratio must be 1 where nothing has changed.
 6. The learning rate falls to zero; the gradient is clipped to a norm of 1; one Adam, without weight decay, has policy
    and critic.

This file is longer than 300 lines because scores, values and the penalty come from models of their own.

Run:    python algos/llm_ppo.py --max-length 8 --total-tokens 200000
Expect: 0.977 ± 0.003 on held-out sums (start: 0.180), three seeds, two to twelve minutes on one core.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from cleanrl_zoo.core import (
    AdaptiveKL,
    aggregate,
    clipped_surrogate,
    clipped_value_loss,
    explained_variance,
    gae,
    k1,
    k3,
    masked_mean,
    masked_std,
    normalize,
)
from cleanrl_zoo.llm import Completions, LanguageModel, PromptSource, Reference, load_language_model, make_task
from cleanrl_zoo.llm.evaluation import describe_completions, evaluate_held_out, sample_table, write_samples
from cleanrl_zoo.llm.pairs import final_values, load_reward_model
from cleanrl_zoo.nn import Adam, clip_grad_norm
from cleanrl_zoo.run import LanguageArgs, Run, parse_args, torch_generator, usage_errors
from cleanrl_zoo.run.arguments import check
from cleanrl_zoo.run.distributed import World, join_world, leave_world
from cleanrl_zoo.run.seeding import stream_seed


@dataclass
class Args(LanguageArgs):
    """Proximal Policy Optimization with a critic, for language models."""

    model: str = "results/zoo/addition_sft"
    """folder or Hugging Face name of a causal language model; tiny: a small Llama with random weights, token = byte"""
    num_prompts: int = 256
    """prompts of one iteration (P)"""
    group_size: int = 1
    """completions of each prompt (G); the critic needs no comparison, so one will do"""
    num_minibatches: int = 4
    """optimizer steps per epoch; must divide P × G"""
    update_epochs: int = 2
    """passes over the completions"""
    learning_rate: float = 2e-4
    """Adam's, of policy and critic, in the first iteration"""
    anneal_lr: bool = True
    """let the learning rate fall linearly to zero"""
    max_grad_norm: float = 1.0
    """norm to which the whole gradient is clipped"""
    reward_weights: tuple[float, ...] = ()
    """weight of each of the task's rewards in the total; all 1 by default"""
    reward_model: str | None = None
    """folder made by llm_reward.py: its score takes the place of the task's reward, which still counts successes"""
    gamma: float = 1.0
    """discount factor per token"""
    gae_lambda: float = 0.95
    """λ of the advantages: 0 one step, 1 whole returns"""
    bootstrap_truncated: bool = False
    """a completion cut by --max-length bootstraps from the value of its whole text"""
    clip_low: float = 0.2
    """1 − clip_low is the ratio's lower bound"""
    clip_high: float = 0.2
    """1 + clip_high is the ratio's upper bound"""
    value_clip: float | None = 0.2
    """how far a value may profit from moving away from what it was; None: any distance"""
    vf_coef: float = 0.5
    """weight of the value loss, which has its ½ already (c₁)"""
    ent_coef: float = 0.0
    """weight of the entropy bonus (c₂)"""
    kl_coef: float = 0.02
    """β, weight of the KL to the model as it was given, in the first iteration"""
    kl_target: float | None = None
    """nats per completion that β is moved to hold the KL at; None: β is constant"""
    kl_horizon: int = 10_000
    """completions in which β can move by a factor of about e^0.2"""
    separate_critic: bool = False
    """a critic with a trunk of its own instead of a value head on the policy's"""

    def check(self) -> None:
        super().check()
        check(self, "num_prompts", "group_size", "num_minibatches", "update_epochs", "kl_horizon", at_least=1)
        check(self, "learning_rate", "max_grad_norm", "clip_high", "value_clip", "kl_target", above=0)
        check(self, "clip_low", above=0, at_most=1)
        check(self, "gamma", "gae_lambda", at_least=0, at_most=1)
        check(self, "vf_coef", "ent_coef", "kl_coef", at_least=0)
        self.check_exact_logprobs()
        if self.batch_size % self.num_minibatches:
            batch = f"{self.batch_size} completions (--num-prompts {self.num_prompts} × --group-size {self.group_size})"
            raise ValueError(f"--num-minibatches {self.num_minibatches}: must divide the {batch}")
        if self.kl_target is not None and self.batch_size >= 5 * self.kl_horizon:
            batch = f"a batch, which has {self.batch_size} completions"
            raise ValueError(f"--kl-horizon {self.kl_horizon}: must be more than a fifth of {batch}")
        if self.kl_target is not None and self.kl_coef == 0:
            raise ValueError("--kl-coef 0: with --kl-target it is multiplied by a factor; give a number above 0")

    @property
    def batch_size(self) -> int:
        return self.num_prompts * self.group_size


PRESETS = {
    # the entropy bonus gives it something to learn where random bytes never get a reward
    "debug": {"model": "tiny", "total_tokens": 256, "num_prompts": 16, "ent_coef": 0.01, "eval_episodes": 8,
              "checkpoint_every": 128, "log_every": 64},
}  # fmt: skip


def separate_critic(args: Args, generator: torch.Generator) -> LanguageModel:
    """The policy's model once more, with a value head. Its own head is not trained: nothing is sampled from it."""
    critic, _, _ = load_language_model(
        args.model, args.dtype, args.device, args.lora_rank, value_head=True, generator=generator
    )
    head = critic.model.get_output_embeddings().weight
    if head is not critic.model.get_input_embeddings().weight:
        head.requires_grad_(False)
    return critic


def last_tokens(mask: Tensor) -> Tensor:
    """Where each row of `mask` [B, L] has its own last token, [B, L]; nowhere in a row without tokens."""
    return mask & (mask.flip(1).cumsum(1).flip(1) == 1)


@dataclass
class TrainState:
    """All that changes during training; a checkpoint is this, the source of prompts and the log's position."""

    agent: LanguageModel
    critic: LanguageModel | None  # None: the agent has the value head
    optimizer: Adam
    kl_coef: float
    noise_generator: torch.Generator
    minibatch_generator: torch.Generator
    global_step: int = 0  # completion tokens sampled
    begun_at: int = 0  # `global_step` before this iteration
    iteration: int = 0

    @classmethod
    def create(cls, args: Args, agent: LanguageModel, critic: LanguageModel | None = None) -> "TrainState":
        return cls(
            agent=agent,
            critic=critic,
            optimizer=Adam([*agent.trainable(), *(critic.trainable() if critic is not None else [])]),
            kl_coef=args.kl_coef,
            noise_generator=torch_generator(args.seed, "noise"),
            minibatch_generator=torch_generator(args.seed, "minibatch"),
        )


@dataclass
class Rollout:
    """What one iteration learns from: B = P × G completions of up to L tokens."""

    completions: Completions
    advantages: Tensor  # [B, L] whitened
    returns: Tensor  # [B, L]
    old_logprob: Tensor  # [B, L]
    old_value: Tensor  # [B, L]

    def rows(self, index: Tensor) -> "Rollout":
        """The completions `index` [M], without columns in which none of them has a token."""
        part = self.completions.rows(index)
        width = part.ids.shape[1]
        arrays = (self.advantages, self.returns, self.old_logprob, self.old_value)
        return Rollout(part, *(x[index, :width] for x in arrays))


def collect(
    state: TrainState, source: PromptSource, reward_model: LanguageModel | None, args: Args, world: World
) -> tuple[Completions, Tensor, dict[str, Tensor]]:
    """Samples B completions and scores them, [B]; NaN: the reward could not score it."""
    state.begun_at = state.global_step
    prompts = source.draw(args.num_prompts)
    shape = (args.num_prompts, args.group_size, source.max_length)
    noise = torch.rand(shape, generator=state.noise_generator)  # [P, G, L]
    completions, rewards = source.complete(state.agent, *prompts, noise, args.temperature)  # rewards [P, G, K]
    state.global_step += int(completions.mask.sum())
    rewards = rewards.flatten(0, 1)  # [B, K]
    scores = source.total(rewards)  # [B]
    source.record(scores, completions.lengths)
    if reward_model is not None:
        parts, pad_id = world.parts(torch.arange(len(scores)), args.micro_batch), source.tokenizer.pad_token_id
        with torch.no_grad():
            values = [final_values(reward_model, completions.rows(few), pad_id) for few in parts]
        scores = world.gather(torch.cat(values)).to(scores)
    return completions, scores, describe_completions(completions, rewards, scores, source.task.reward_names)


def credit(
    scores: Tensor, token_kl: Tensor, values: Tensor, final: Tensor, bootstrap: Tensor, mask: Tensor, *,
    kl_coef: float, gamma: float, gae_lambda: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Whitened advantages and returns of all tokens, [B, L] each, 0 where the mask [B, L] is.

    scores: [B]. token_kl, values: [B, L]. final: [B], value of the whole text, which counts where `bootstrap` [B] says
    so; elsewhere a completion's last token ends it. Where the mask has holes (text that the model did not write) the
    successor of a token is the next one that it wrote.
    """
    last = last_tokens(mask)
    rewards = torch.where(last, scores.unsqueeze(1), 0.0) - kl_coef * token_kl  # [B, L]
    terminated = last & ~bootstrap.unsqueeze(1)
    following = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], 1)
    next_values = torch.where(last, final.unsqueeze(1), following)
    advantages = gae(rewards, values, next_values, terminated, last, gamma, gae_lambda, mask, dim=1)
    returns = torch.where(mask, advantages + values, 0.0)
    return normalize(advantages, mask), returns


@torch.no_grad()
def before_update(
    state: TrainState, reference: Reference | None, completions: Completions, args: Args, world: World, pad_id: int
) -> list[Tensor]:
    """Log-probs of policy and reference, values (all [B, L]) and those of the whole texts [B], before any update.

    Every rank computes its share, `micro_batch` sequences at a time.
    """
    agent, critic, mask = state.agent, state.critic, completions.mask
    logprob, ref_logprob, values = torch.zeros(3, *mask.shape, device=mask.device)
    final = torch.zeros(len(mask), device=mask.device)
    share = world.slice(len(mask))
    for index in world.parts(torch.arange(len(mask)), args.micro_batch):
        rows = completions.rows(index)
        texts, width = (rows.tokens, rows.attention_mask, rows.mask, args.temperature), rows.ids.shape[1]
        out = agent.completion(*texts, value=critic is None)
        logprob[index, :width] = out.logprob
        values[index, :width] = out.value if critic is None else critic.completion(*texts, value=True).value
        if reference is not None:
            ref_logprob[index, :width] = reference.completion(*texts).logprob
        if args.bootstrap_truncated:
            final[index] = final_values(agent if critic is None else critic, rows, pad_id)
    if reference is None:
        ref_logprob = logprob
    return [world.gather(x[share]) for x in (logprob, ref_logprob, values, final)]


def prepare(
    state: TrainState, completions: Completions, scores: Tensor, reference: Reference | None, args: Args, world: World,
    pad_id: int,
) -> tuple[Rollout, dict[str, Tensor | float]]:  # fmt: skip
    """Credit for every token; then the weight of the penalty moves. A completion without a score takes no part."""
    scored = ~scores.isnan().to(completions.mask.device)  # [B]
    completions = replace(completions, mask=completions.mask & scored.unsqueeze(1))
    mask = completions.mask
    old_logprob, ref_logprob, values, final = before_update(state, reference, completions, args, world, pad_id)
    token_kl = torch.where(mask, k1(old_logprob, ref_logprob), 0.0)  # [B, L]
    kl_coef, sequence_kl = state.kl_coef, masked_mean(token_kl.sum(1), scored)
    advantages, returns = credit(
        scores.nan_to_num(0.0).to(values), token_kl, values, final, completions.truncated & args.bootstrap_truncated,
        mask, kl_coef=kl_coef, gamma=args.gamma, gae_lambda=args.gae_lambda,
    )  # fmt: skip
    if args.kl_target is not None:
        adaptive = AdaptiveKL(args.kl_target, kl_coef, "proportional", args.kl_horizon)
        state.kl_coef = adaptive.update(sequence_kl, int(scored.sum()))
    penalty = {
        "losses/kl_coef": kl_coef,
        "losses/sequence_kl": sequence_kl,
        "losses/ref_kl": masked_mean(k3(old_logprob, ref_logprob), mask),
    }
    raw = returns - values  # the advantages before they were whitened
    return Rollout(completions, advantages, returns, old_logprob, values), {
        **(penalty if reference is not None else {}),
        "losses/sampler_kl": masked_mean(k3(completions.logprob, old_logprob), mask),
        "losses/explained_variance": explained_variance(values[mask], returns[mask]),
        "charts/advantage_mean": masked_mean(raw, mask),
        "charts/advantage_std": masked_std(raw, mask),
    }


STATS = ("losses/loss", "losses/policy_loss", "losses/value_loss", "losses/entropy", "losses/approx_kl",
         "losses/clipfrac_low", "losses/clipfrac_high")  # fmt: skip


def update(state: TrainState, rollout: Rollout, args: Args, world: World) -> dict[str, Tensor | float]:
    """Epochs of shuffled minibatches over the completions, one optimizer step each."""
    remaining = 1.0 - state.begun_at / args.total_tokens if args.anneal_lr else 1.0
    learning_rate = torch.tensor(args.learning_rate * remaining)
    steps, extremes = [], []
    for _ in range(args.update_epochs):
        order = torch.randperm(len(rollout.advantages), generator=state.minibatch_generator)
        for index in order.tensor_split(args.num_minibatches):
            stats, extreme = minibatch_step(
                state.agent, state.critic, state.optimizer, rollout, index, learning_rate, args, world
            )
            steps.append(stats)
            extremes.append(extreme)
    state.iteration += 1
    names = (*STATS, "losses/grad_norm")
    means = dict(zip(names, torch.stack(steps).mean(0), strict=True))
    last_epoch = dict(zip(names, torch.stack(steps[-args.num_minibatches :]).mean(0), strict=True))
    lowest, highest = torch.stack(extremes).unbind(1)
    return {
        **means,
        "losses/approx_kl": last_epoch["losses/approx_kl"],
        "losses/clipfrac": means["losses/clipfrac_low"] + means["losses/clipfrac_high"],
        "losses/ratio_min": lowest.min().exp(),
        "losses/ratio_max": highest.max().exp(),
        "charts/learning_rate": learning_rate,
    }


def minibatch_step(
    agent: LanguageModel, critic: LanguageModel | None, optimizer: Adam, rollout: Rollout, index: Tensor,
    learning_rate: Tensor, args: Args, world: World,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Loss, gradient and one optimizer step on the completions `index` [M], a few at a time.

    Every divisor is that of the whole minibatch, so that neither `micro_batch` nor the number of ranks changes the
    gradient. Returns the numbers named by `STATS` and the gradient's norm, and the smallest and largest log-ratio.
    """
    tokens = rollout.completions.mask[index].sum().clamp(min=1)
    value_clip = math.inf if args.value_clip is None else args.value_clip
    lowest = math.log1p(-args.clip_low) if args.clip_low < 1 else -math.inf
    highest = math.log1p(args.clip_high)
    parameters = optimizer.parameters
    stats, extremes = (torch.zeros(size, device=tokens.device) for size in (len(STATS), 2))
    grads = [torch.zeros_like(parameter) for parameter in parameters]
    for part in world.parts(index, args.micro_batch):
        rows = rollout.rows(part)
        batch = rows.completions
        texts = (batch.tokens, batch.attention_mask, batch.mask, args.temperature)
        out = agent.completion(*texts, entropy=True, value=critic is None)
        value = out.value if critic is None else critic.completion(*texts, value=True).value  # [m, L]
        logratio = torch.where(batch.mask, out.logprob - rows.old_logprob, 0.0)
        losses = (
            clipped_surrogate(out.logprob, rows.old_logprob, rows.advantages, args.clip_low, args.clip_high),
            clipped_value_loss(value, rows.old_value, rows.returns, value_clip),
            out.entropy,
        )
        policy, value_loss, entropy = (aggregate(x, batch.mask, "token_mean", tokens) for x in losses)
        loss = policy + args.vf_coef * value_loss - args.ent_coef * entropy
        for grad, new in zip(grads, torch.autograd.grad(loss, parameters, materialize_grads=True), strict=True):
            grad += new
        with torch.no_grad():
            numbers = (k3(rows.old_logprob, out.logprob), logratio < lowest, logratio > highest)
            means = [aggregate(x, batch.mask, "token_mean", tokens) for x in numbers]
            stats += torch.stack([loss, policy, value_loss, entropy, *means])
            extremes[0].clamp_(max=logratio.min())
            extremes[1].clamp_(min=logratio.max())
    *grads, stats = world.sum([*grads, stats])
    grads, norm = clip_grad_norm(grads, args.max_grad_norm)
    optimizer.step(grads, learning_rate)
    every = world.gather(extremes.unsqueeze(0))  # [ranks, 2]
    return torch.cat((stats, norm.reshape(1))), torch.stack([every[:, 0].min(), every[:, 1].max()])


def main(args: Args) -> None:
    world = join_world(args.device)
    with usage_errors():
        task = make_task(**args.task_settings())
        init = torch_generator(args.seed, "init")
        agent, tokenizer, stop_ids = load_language_model(
            args.model, args.dtype, args.device, args.lora_rank, value_head=not args.separate_critic, generator=init
        )
        critic = separate_critic(args, init) if args.separate_critic else None
        reward_model = None
        if args.reward_model is not None:
            reward_model = load_reward_model(args.reward_model, tokenizer, args.dtype, args.device)
        prompts = torch_generator(args.seed, "prompts")
        source = PromptSource(
            task, tokenizer, prompts, args.max_length, agent.context, stop_ids, world, args.reward_weights
        )
        if args.num_prompts % world.size:
            raise ValueError(f"--num-prompts {args.num_prompts}: must be a multiple of the {world.size} ranks")
        source.held_out(1)
    reference = agent.reference() if args.kl_coef > 0 else None  # the model as it was given
    pad_id = tokenizer.pad_token_id

    def evaluate(state: TrainState) -> tuple[np.ndarray, np.ndarray]:
        """Rewards and lengths of sampled completions of held-out prompts."""
        held_out = evaluate_held_out(
            state.agent, source, args.eval_episodes, stream_seed(args.seed, "evaluation"), args.temperature
        )
        if args.show_samples:
            run.progress.message(sample_table(held_out, task.reward_names, args.show_samples))
            write_samples(run.run_dir / "samples", state.global_step, held_out, task.reward_names, args.show_samples)
        return held_out.results()

    with Run(args, source, evaluate, world) as run:
        state = run.resume_or(lambda: TrainState.create(args, agent, critic))
        while state.global_step < args.total_tokens:
            with run.phase("collect"):
                completions, scores, metrics = collect(state, source, reward_model, args, world)
            with run.phase("update"):
                rollout, more = prepare(state, completions, scores, reference, args, world, pad_id)
                run.metrics({**metrics, **more, **update(state, rollout, args, world)})
            run.end_iteration(state)
        results = run.results(state)
        if world.is_main:
            agent.save(run.run_dir / "policy", tokenizer)
            run.finish(results)
    leave_world()


if __name__ == "__main__":
    main(parse_args(Args, PRESETS))
