"""Group Relative Policy Optimization and its family: a language model learns from scores of its completions.

Shao et al. (2024), "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models",
arXiv:2402.03300, section 4.1, and the methods that change one of its parts. For a prompt, G completions are sampled and
scored; R is a completion's reward, ℓ the log-prob of a token, ℓ° the same before this batch's first update.

    A_i  = (R_i − mean_G R) / (std_G R + ε)                          the advantage of every token of completion i
    r    = exp(ℓ − ℓ°),   C(r, A) = min( r A, clip(r, 1−ε_low, 1+ε_high) A )          PPO's surrogate, per token
    L    = −1/B Σ_i 1/n_i Σ_t [ C(r_it, A_i) − β k3(π‖π_ref) ]                        equation 3, to be minimised

A `--variant` is settings of this one loop, and nothing else:

    name                    advantage                           surrogate              mean over        source
    reinforce               R − mean of the batch               −A ℓ                   sum, 1/B         Williams 1992
    rloo                    R − mean of the others              −A ℓ                   sum, 1/B         arXiv:2402.14740
    remax                   R − R of the greedy answer          −A ℓ                   sum, 1/B         arXiv:2310.10505
    grpo                    as above                            C, β = 0.04            sequence         arXiv:2402.03300
    dr_grpo                 R − mean_G                          C                      constant         arXiv:2503.20783
    dapo                    grpo's, equal groups redrawn,       C, ε_high = 0.28       token            arXiv:2503.14476
                            long answers punished softly
    gspo                    grpo's                              C of s, ε ≈ 4e-4       sequence         arXiv:2507.18071
    gspo_token              grpo's                              C of sg[s] exp(ℓ−sg ℓ) sequence         the same, 4.3
    reinforce_pp            R − β Σ k1 to come, whitened        C                      token            arXiv:2501.03262
    reinforce_pp_baseline   R − mean_G, whitened                C, k2 as loss          token            the same
    lite_ppo                (R − mean_G) / std of the batch     C                      token            arXiv:2508.08221
    cispo                   grpo's                              −sg[min(r, 5)] A ℓ     token            arXiv:2506.13585
    topr                    R − mean_G                          −A ℓ, weighed if A < 0 sum, 1/B         arXiv:2503.14286
    gdpo                    each reward's own, whitened         C                      token            arXiv:2601.05242

s is the geometric mean of a completion's r; topr's weight is min(Π π/π_sampler, 1), that of the whole completion. sg
stops the gradient; whitened is less the mean and over the standard deviation; k1, k2 and k3 are estimates of the KL to
the reference, log π/π_ref, half its square, and e^x − 1 − x of its negative x (core/kl.py).

`--off-policy` weighs the loss where sampler and trainer differ (`--sampler-dtype bfloat16`), ρ = exp(ℓ° − ℓ^b), ℓ^b as
recorded by the sampler, [low, cap] as --off-policy-low and --off-policy-cap say: vanilla ρ, tis min(ρ, cap), icepop ρ
inside [low, cap] or 0, mis the sequence's product or 0 above cap, veto 0 for a sequence with a token below the
threshold, ppo_is puts ratio and clip around the sampler.

Deviations, each with its reason:

 1. Where sampler and trainer are one model, ℓ° is what the sampler recorded: the same up to 1e-5, a pass less.
 2. Four optimizer steps per rollout by default, of a quarter each: with one, every ratio is 1 and variants coincide.
 3. The learning rate falls to zero; the gradient is clipped to a norm of 1; Adam has no weight decay.
 4. What is divided by the group's spread is exactly 0 where all its rewards are equal. A completion without a score
    adds nothing to the loss, and counts as an empty one where the mean is over sequences.
 5. Dropout is off while training too: the ratio must be 1 where nothing has changed.

This file is longer than 300 lines because the fourteen variants are settings of one loop, to be compared line by line.

Run:    python algos/grpo.py --variant grpo --max-length 8 --total-tokens 200000
Expect: 0.925 ± 0.006 on held-out sums (start: 0.180), three seeds, a minute on one core; the others: results/addition.
"""

import math
import sys
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from cleanrl_zoo.core import (
    EntropyBand,
    aggregate,
    banded_weight,
    clipped_surrogate,
    clipped_weight_pg,
    conditional_reward,
    discounted_returns,
    gdpo,
    group_relative,
    k1,
    k2,
    k3,
    leave_one_out,
    masked_mean,
    masked_std,
    normalize,
    overlong_penalty,
    policy_gradient,
    sequence_logratio,
    sequence_weight,
    tapered_pg,
    token_veto,
    truncated_weight,
)
from cleanrl_zoo.llm import Completions, LanguageModel, PromptSource, Reference, load_language_model, make_task
from cleanrl_zoo.llm.evaluation import describe_completions, evaluate_held_out, sample_table, write_samples
from cleanrl_zoo.nn import Adam, clip_grad_norm
from cleanrl_zoo.run import LanguageArgs, Run, parse_args, torch_generator, usage_errors
from cleanrl_zoo.run.arguments import check
from cleanrl_zoo.run.distributed import World, join_world, leave_world
from cleanrl_zoo.run.seeding import stream_seed


@dataclass
class Args(LanguageArgs):
    """Group Relative Policy Optimization and its family, for language models."""

    model: str = "results/zoo/addition_sft"
    """folder or Hugging Face name of a causal language model; tiny: a small Llama with random weights, token = byte"""
    variant: str = "grpo"
    """named settings of the flags below: reinforce, rloo, remax, grpo, dr_grpo, dapo, gspo, gspo_token, reinforce_pp,
    reinforce_pp_baseline, lite_ppo, cispo, topr, gdpo"""
    num_prompts: int = 32
    """prompts of one iteration (P)"""
    group_size: int = 8
    """completions of each prompt (G)"""
    num_minibatches: int = 4
    """optimizer steps per epoch; must divide P × G"""
    update_epochs: int = 1
    """passes over the completions"""
    learning_rate: float = 2e-4
    """Adam's, at the beginning"""
    anneal_lr: bool = True
    """let the learning rate fall linearly to zero"""
    max_grad_norm: float = 1.0
    """norm to which the gradient is clipped"""
    reward_weights: tuple[float, ...] = ()
    """weight of each of the task's rewards in the total; all 1 by default"""
    conditional_rewards: bool = False
    """pay the task's other rewards only where its first, which verifies the answer, is at least 1"""
    baseline: Literal["none", "batch", "group", "leave_one_out", "greedy", "gdpo"] = "group"
    """what is subtracted from a reward: nothing, the mean of the batch, of the group, of the others in the group, the
    reward of the greedy completion; gdpo: each reward normalised in its group by itself, then weighed and added"""
    scale: Literal["none", "group", "batch"] = "group"
    """what --baseline group divides by: nothing, the group's standard deviation, or that of the batch"""
    whiten: Literal["none", "samples", "tokens"] = "none"
    """normalise advantages over all completions, or over all their tokens"""
    surrogate: Literal["clip", "weight", "taper", "none"] = "clip"
    """clip: PPO's; weight: detached clipped ratio times A ℓ; taper: A ℓ, weighed as topr does where A < 0; none: A ℓ"""
    ratio: Literal["token", "sequence", "sequence_token", "sequence_product"] = "token"
    """ratio of a token; geometric mean over the sequence, also with the token's own gradient; the sequence's product"""
    clip_low: float | None = 0.2
    """1 − clip_low is the ratio's lower bound; None: no bound (only for --surrogate weight)"""
    clip_high: float = 0.2
    """1 + clip_high is the ratio's upper bound"""
    dual_clip: float | None = None
    """bound c > 1 of the loss by −cA where A < 0"""
    aggregate: Literal["token_mean", "sequence_mean", "constant", "sum"] = "sequence_mean"
    """mean over tokens; over sequences of their means; sum over tokens by B × --max-length, or by B"""
    kl_coef: float = 0.0
    """β, weight of the KL to the reference, the model as it was given"""
    kl_estimator: Literal["k1", "k2", "k3", "rk3"] = "k3"
    """of the KL as a loss; rk3: k3 times the ratio, whose gradient is that of KL(policy‖reference)"""
    kl_in_reward: Literal["none", "sequence", "token"] = "none"
    """subtract β k1 from the rewards instead: its sum from the completion's, or each token's from its own and those
    before it"""
    ent_coef: float = 0.0
    """weight of the entropy bonus, whose entropy is averaged or summed as --aggregate says"""
    ent_share: float = 1.0
    """share of the vocabulary, its likeliest tokens, whose entropy the bonus is of"""
    ent_band: tuple[float, float] | None = None
    """nats per token between which to hold it: after each iteration --ent-coef moves by --ent-rate per nat outside"""
    ent_rate: float = 0.01
    """of --ent-band"""
    temperature_end: float | None = None
    """let the temperature move linearly from --temperature to this; evaluations stay at --temperature"""
    dynamic_sampling: bool = False
    """draw new prompts in place of those whose completions all have the same reward"""
    max_draws: int = 8
    """batches of prompts drawn for one iteration before it makes do with what it has"""
    overlong: Literal["none", "soft", "filter"] = "none"
    """soft: punish the last --overlong-cache tokens up to --max-length; filter: cut completions are not learned from"""
    overlong_cache: int = 0
    """tokens of the soft punishment; 0: a fifth of --max-length"""
    off_policy: Literal["none", "vanilla", "tis", "icepop", "mis", "veto", "ppo_is"] = "none"
    """correction between the sampler's log-probs and the trainer's"""
    off_policy_cap: float = 2.0
    """largest weight of tis, icepop and mis"""
    off_policy_low: float = 0.5
    """smallest weight of icepop"""
    veto_threshold: float = 1e-4
    """ratio of a token below which veto drops the sequence"""
    sampler_dtype: Literal["float32", "bfloat16"] = "float32"
    """weights of the copy that samples; bfloat16 really differs from the trainer"""

    def check(self) -> None:
        super().check()
        if self.variant not in VARIANTS:
            raise ValueError(f"--variant {self.variant}: this file has {', '.join(VARIANTS)}")
        check(self, "num_prompts", "group_size", "num_minibatches", "update_epochs", "max_draws", at_least=1)
        check(self, "learning_rate", "max_grad_norm", above=0)
        check(self, "clip_low", "clip_high", "kl_coef", "ent_coef", "ent_rate", "overlong_cache", at_least=0)
        check(self, "off_policy_cap", at_least=1)
        check(self, "off_policy_low", at_least=0, at_most=1)
        check(self, "veto_threshold", above=0, at_most=1)
        check(self, "dual_clip", above=1)
        check(self, "ent_share", above=0, at_most=1)
        check(self, "temperature_end", above=0)
        if self.ent_share < 1 and self.ent_coef == 0 and self.ent_band is None:
            raise ValueError(f"--ent-share {self.ent_share:g}: is of the bonus; give --ent-coef or --ent-band with it")
        if self.ent_band is not None and not 0 <= self.ent_band[0] <= self.ent_band[1]:
            raise ValueError(f"--ent-band {self.ent_band[0]:g} {self.ent_band[1]:g}: give 0 <= low <= high, in nats")
        self.check_exact_logprobs()
        if self.group_size == 1 and self.baseline in ("group", "leave_one_out", "gdpo"):
            raise ValueError(
                f"--group-size 1: --baseline {self.baseline} compares completions of one prompt; give at least 2"
            )
        if self.batch_size % self.num_minibatches:
            batch = f"{self.batch_size} completions (--num-prompts {self.num_prompts} × --group-size {self.group_size})"
            raise ValueError(f"--num-minibatches {self.num_minibatches}: must divide the {batch}")
        if self.baseline == "gdpo" and (self.overlong == "soft" or self.kl_in_reward == "sequence"):
            flags = "--overlong soft and --kl-in-reward sequence"
            raise ValueError(
                f"--baseline gdpo: normalises each of the task's rewards by itself; {flags} are not among them"
            )
        if self.baseline == "greedy" and (self.overlong == "soft" or self.kl_in_reward == "sequence"):
            flags = "--overlong soft and --kl-in-reward sequence"
            raise ValueError(f"--baseline greedy: the greedy completion is not charged for {flags}; leave them out")
        if self.ratio != "token" and self.surrogate != "clip":
            raise ValueError(f"--ratio {self.ratio}: only --surrogate clip has one; leave it at token")
        if self.clip_low is None and self.surrogate != "weight":
            raise ValueError("--clip-low None: only --surrogate weight can do without a lower bound; give a number")
        if self.kl_in_reward == "token" and self.whiten == "samples":
            raise ValueError(
                "--whiten samples: with --kl-in-reward token advantages differ by token; give tokens or none"
            )
        if self.ratio in ("sequence", "sequence_product") and self.kl_in_reward == "token":
            raise ValueError(f"--ratio {self.ratio}: needs one advantage per completion; give --kl-in-reward sequence")

    @property
    def batch_size(self) -> int:
        return self.num_prompts * self.group_size


PLAIN = {"surrogate": "none", "aggregate": "sum"}  # −A ℓ, summed over the tokens
VARIANTS: dict[str, dict] = {
    "reinforce": {"baseline": "batch", **PLAIN},
    "rloo": {"baseline": "leave_one_out", **PLAIN, "kl_in_reward": "sequence"},
    "remax": {"baseline": "greedy", **PLAIN},
    "grpo": {"kl_coef": 0.04},
    "dr_grpo": {"scale": "none", "aggregate": "constant"},
    "dapo": {"aggregate": "token_mean", "clip_high": 0.28, "dynamic_sampling": True, "overlong": "soft"},
    "gspo": {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
    "gspo_token": {"ratio": "sequence_token", "clip_low": 3e-4, "clip_high": 4e-4},
    "reinforce_pp": {"baseline": "none", "whiten": "tokens", "aggregate": "token_mean", "kl_in_reward": "token",
                     "kl_coef": 0.001},
    "reinforce_pp_baseline": {"scale": "none", "whiten": "samples", "aggregate": "token_mean", "kl_estimator": "k2",
                              "kl_coef": 0.001},
    "lite_ppo": {"scale": "batch", "aggregate": "token_mean"},
    "cispo": {"surrogate": "weight", "clip_low": None, "clip_high": 4.0, "aggregate": "token_mean"},
    "topr": {"scale": "none", "surrogate": "taper", "aggregate": "sum"},
    "gdpo": {"baseline": "gdpo", "aggregate": "token_mean"},
}  # fmt: skip

PRESETS = {
    "debug": {"model": "tiny", "total_tokens": 256, "num_prompts": 4, "group_size": 4, "eval_episodes": 8,
              "checkpoint_every": 128, "log_every": 64},
}  # fmt: skip


@dataclass
class TrainState:
    """All that changes during training; a checkpoint is this, the source of prompts and the log's position."""

    agent: LanguageModel
    optimizer: Adam
    noise_generator: torch.Generator
    minibatch_generator: torch.Generator
    ent_band: EntropyBand  # holds the weight of the entropy bonus
    global_step: int = 0  # completion tokens sampled
    begun_at: int = 0  # where this iteration began: the learning rate is that of the tokens before it
    iteration: int = 0

    @classmethod
    def create(cls, args: Args, agent: LanguageModel) -> "TrainState":
        return cls(
            agent=agent,
            optimizer=Adam(agent.trainable()),
            noise_generator=torch_generator(args.seed, "noise"),
            minibatch_generator=torch_generator(args.seed, "minibatch"),
            ent_band=EntropyBand(*(args.ent_band or (0.0, math.inf)), args.ent_coef, args.ent_rate),
        )

    def settings(self, args: Args) -> Args:
        """Those of the next iteration, where the temperature or the weight of the entropy bonus moves."""
        temperature = args.temperature
        if args.temperature_end is not None:
            progress = min(self.global_step / args.total_tokens, 1.0)
            temperature += progress * (args.temperature_end - temperature)
        return replace(args, temperature=temperature, ent_coef=self.ent_band.coef)


@dataclass
class Groups:
    """P prompts with G completions each, as sampled and scored."""

    completions: Completions  # of P × G rows
    rewards: Tensor  # [P, G, K], NaN: unscorable
    greedy: Tensor  # [P] reward of the greedy completion; zeros where nobody asks
    keep: Tensor  # [P] whether the group is learned from, given others to take its place

    @property
    def scored(self) -> Tensor:
        """Which completions have a score, and their group a baseline, [P, G]."""
        return ~self.rewards.isnan().any(-1) & ~self.greedy.isnan().unsqueeze(1)

    @property
    def mask(self) -> Tensor:
        """The tokens that take part, [B, L]: those of completions with a score."""
        return self.completions.mask & self.scored.reshape(-1, 1).to(self.completions.mask.device)

    @classmethod
    def all_of(cls, drawn: list["Groups"], pad_id: int) -> "Groups":
        """All groups of several draws as one."""
        completions = Completions.cat([groups.completions for groups in drawn], pad_id)
        rest = (torch.cat([getattr(groups, name) for groups in drawn]) for name in ("rewards", "greedy", "keep"))
        return cls(completions, *rest)

    @classmethod
    def first_kept(cls, drawn: list["Groups"], count: int, pad_id: int) -> "Groups":
        """The first `count` groups to keep; where there are too few, also some of the others."""
        whole = cls.all_of(drawn, pad_id)
        chosen = torch.argsort(~whole.keep, stable=True)[:count]  # [P] kept ones first, in the order of drawing
        group_size = whole.rewards.shape[1]
        rows = (chosen.unsqueeze(1) * group_size + torch.arange(group_size)).flatten()
        return cls(whole.completions.rows(rows), whole.rewards[chosen], whole.greedy[chosen], whole.keep[chosen])


@dataclass
class Rollout:
    """What one iteration learns from: B = P × G completions of up to L tokens."""

    completions: Completions
    advantages: Tensor  # [B, L]
    old_logprob: Tensor  # [B, L] the trainer's, before the first update
    ref_logprob: Tensor  # [B, L] the reference's; the sampler's where no KL is asked for

    def rows(self, index: Tensor) -> "Rollout":
        """The completions `index` [M], without columns in which none of them has a token."""
        part = self.completions.rows(index)
        width = part.ids.shape[1]
        return Rollout(part, *(x[index, :width] for x in (self.advantages, self.old_logprob, self.ref_logprob)))


def collect(state: TrainState, source: PromptSource, sampler: LanguageModel, args: Args) -> tuple[Groups, dict]:
    """Samples and scores `num_prompts` groups; with dynamic sampling only such as teach something."""
    drawn: list[Groups] = []
    kept, state.begun_at = 0, state.global_step
    while kept < args.num_prompts and len(drawn) < args.max_draws:
        examples, prompt_ids, prompt_mask = source.draw(args.num_prompts)
        shape = (args.num_prompts, args.group_size, source.max_length)
        noise = torch.rand(shape, generator=state.noise_generator)  # [P, G, L]
        prompts = (examples, prompt_ids, prompt_mask)
        completions, rewards = source.complete(sampler, *prompts, noise, args.temperature)
        state.global_step += int(completions.mask.sum())
        greedy = torch.zeros(args.num_prompts, dtype=torch.float64)
        if args.baseline == "greedy":
            answers, their_rewards = source.complete(sampler, *prompts, noise[:, :1], temperature=0.0)
            state.global_step += int(answers.mask.sum())
            greedy = source.total(paid_rewards(their_rewards, args)).squeeze(1)  # [P]
        total = source.total(rewards)  # [P, G]
        source.record(total.flatten(), completions.lengths)
        paid = source.total(paid_rewards(rewards, args))  # [P, G]
        differ = paid.nan_to_num(-torch.inf).amax(1) > paid.nan_to_num(torch.inf).amin(1)  # [P]
        drawn.append(Groups(completions, rewards, greedy, differ | (not args.dynamic_sampling)))
        kept += int(drawn[-1].keep.sum())
    return Groups.first_kept(drawn, args.num_prompts, source.tokenizer.pad_token_id), describe(drawn, source, args)


def paid_rewards(rewards: Tensor, args: Args) -> Tensor:
    """What of the rewards [..., K] is paid: all, or the others only where the first is met."""
    if not args.conditional_rewards:
        return rewards
    return torch.cat([rewards[..., :1], conditional_reward(rewards[..., 1:], rewards[..., :1])], -1)


def describe(drawn: list[Groups], source: PromptSource, args: Args) -> dict[str, float | Tensor]:
    """What the sampled completions were like, those of dropped groups too."""
    whole = Groups.all_of(drawn, pad_id=0)  # nothing is decoded here
    total, scored = source.total(whole.rewards), ~whole.rewards.isnan().any(-1)  # [P, G]
    paid = source.total(paid_rewards(whole.rewards, args))  # [P, G] what the groups are compared by
    top, bottom = torch.where(scored, paid, -torch.inf), torch.where(scored, paid, torch.inf)
    highest, lowest = top.amax(1), bottom.amin(1)  # [P]
    vary = top.amax() > bottom.amin()
    names = source.task.reward_names
    return {
        **describe_completions(whole.completions, whole.rewards.flatten(0, 1), total.flatten(), names),
        "charts/zero_std_groups": (highest <= lowest).double().mean(),
        "charts/groups_all_right": ((lowest == top.amax()) & vary).double().mean(),
        "charts/groups_all_wrong": ((highest == bottom.amin()) & vary).double().mean(),
        "charts/dropped_groups": 1 - whole.keep.double().mean(),
    }


def learned(groups: Groups, args: Args) -> Tensor:
    """The tokens that the loss is of, [B, L]: those that take part, without cut completions where they are filtered."""
    kept = ~groups.completions.truncated.unsqueeze(1)  # [B, 1]
    return groups.mask & kept if args.overlong == "filter" else groups.mask


def credit(groups: Groups, source: PromptSource, old_logprob: Tensor, ref_logprob: Tensor, args: Args) -> Tensor:
    """The advantage of every token, [B, L]: from rewards to credit, as the variant has it."""
    completions, device = groups.completions, old_logprob.device
    scored, mask = groups.scored, groups.mask  # [P, G], [B, L]
    rewards = paid_rewards(groups.rewards.nan_to_num(0.0), args)  # [P, G, K]
    total = source.total(rewards)  # [P, G]
    if args.overlong == "soft":
        cache = args.overlong_cache or max(source.max_length // 5, 1)
        total = total + overlong_penalty(completions.lengths, source.max_length, cache).view_as(total).to(total)
    token_kl = torch.where(mask, k1(old_logprob, ref_logprob), 0.0)  # [B, L]
    if args.kl_in_reward == "sequence":
        total = total - args.kl_coef * token_kl.sum(1).view_as(total).to(total)

    if args.baseline == "group":
        advantages = group_relative(total, args.scale, mask=scored)  # [P, G]
    elif args.baseline == "leave_one_out":
        advantages = leave_one_out(total, scored)
    elif args.baseline == "greedy":
        advantages = total - groups.greedy.nan_to_num(0.0).unsqueeze(1)
    elif args.baseline == "batch":
        advantages = total - masked_mean(total, scored)
    elif args.baseline == "gdpo":
        advantages = gdpo(rewards, source.weights, mask=scored)
    else:
        advantages = total
    if args.whiten == "samples":
        advantages = normalize(advantages, scored)
    advantages = torch.where(scored, advantages, 0.0).to(device, torch.float32)
    mask = learned(groups, args)  # only now: a cut completion still counts in its group's baseline
    tokens = torch.where(mask, advantages.reshape(-1, 1), 0.0)  # [B, L]
    if args.kl_in_reward == "token":  # a token answers for the KL of the tokens from it on
        zero = torch.zeros_like(token_kl)
        to_come = discounted_returns(token_kl, zero, zero, zero, 1.0, dim=1)
        tokens = tokens - args.kl_coef * torch.where(mask, to_come, 0.0)
    if args.whiten == "tokens":
        tokens = normalize(tokens, mask)
    return tokens


def prepare(
    groups: Groups, source: PromptSource, agent: LanguageModel, reference: Reference | None, args: Args
) -> tuple[Rollout, dict[str, Tensor]]:
    """Log-probs of trainer and reference before the first update, and advantages."""
    completions = replace(groups.completions, mask=groups.mask)
    old_logprob = ref_logprob = completions.logprob  # [B, L]
    if args.sampler_dtype != args.dtype:
        old_logprob = in_parts(agent, completions, args)
    if reference is not None:
        ref_logprob = in_parts(reference, completions, args)
    advantages = credit(groups, source, old_logprob, ref_logprob, args)
    mask = learned(groups, args)
    return Rollout(replace(completions, mask=mask), advantages, old_logprob, ref_logprob), {
        "charts/advantage_mean": masked_mean(advantages, mask),
        "charts/advantage_std": masked_std(advantages, mask),
    }


@torch.no_grad()
def in_parts(model: LanguageModel | Reference, completions: Completions, args: Args) -> Tensor:
    """Log-probs of the completions under `model`, [B, L], `micro_batch` sequences at a time."""
    logprob = torch.zeros_like(completions.logprob)
    for index in torch.arange(len(logprob)).split(args.micro_batch):
        rows = completions.rows(index)
        out = model.completion(rows.tokens, rows.attention_mask, rows.mask, args.temperature)
        logprob[index, : rows.ids.shape[1]] = out.logprob
    return logprob


def policy_loss(
    logprob: Tensor, old_logprob: Tensor, behavior_logprob: Tensor, advantages: Tensor, mask: Tensor, *,
    ratio: str, surrogate: str, clip_low: float | None, clip_high: float, dual_clip: float | None,
    off_policy: str, off_policy_cap: float, off_policy_low: float, veto_threshold: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The variant's loss per token, to be aggregated, and the logarithm of its ratio. Everything is [B, L]."""
    center = behavior_logprob if off_policy == "ppo_is" else old_logprob
    logratio = torch.where(mask, logprob - center, 0.0)
    if ratio == "sequence":
        logratio = sequence_logratio(logprob, center, mask).unsqueeze(1).expand_as(mask)
    elif ratio == "sequence_token":
        logratio = sequence_logratio(logprob, center, mask, per_token=True)
    elif ratio == "sequence_product":
        logratio = logratio.sum(1, keepdim=True).expand_as(mask)
    at_center = torch.zeros_like(logratio)

    if surrogate == "clip":
        loss = clipped_surrogate(logratio, at_center, advantages, clip_low, clip_high, dual_clip)
    elif surrogate == "weight":  # A ℓ: the ratio weighs, the log-prob has the gradient
        loss = clipped_weight_pg(logprob, center, advantages, clip_low, clip_high)
    elif surrogate == "taper":
        loss = tapered_pg(logprob, behavior_logprob, advantages, mask)
    else:
        loss = policy_gradient(logprob, advantages)

    if off_policy == "vanilla":
        loss = loss * truncated_weight(old_logprob, behavior_logprob, torch.inf)
    elif off_policy == "tis":
        loss = loss * truncated_weight(old_logprob, behavior_logprob, off_policy_cap)
    elif off_policy == "icepop":
        loss = loss * banded_weight(old_logprob, behavior_logprob, off_policy_low, off_policy_cap)
    elif off_policy == "mis":
        loss = loss * sequence_weight(old_logprob, behavior_logprob, mask, off_policy_cap)
    elif off_policy == "veto":
        loss = loss * token_veto(old_logprob, behavior_logprob, mask, veto_threshold)
    return loss, logratio.detach()


KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3, "rk3": k3}
LOSS_FLAGS = ("ratio", "surrogate", "clip_low", "clip_high", "dual_clip", "off_policy", "off_policy_cap",
              "off_policy_low", "veto_threshold")  # fmt: skip
STATS = ("losses/loss", "losses/policy_loss", "losses/ref_kl", "losses/entropy", "losses/approx_kl",
         "losses/clipfrac_low", "losses/clipfrac_high", "losses/sampler_kl", "losses/clamped_entropy")  # fmt: skip


def update(state: TrainState, rollout: Rollout, args: Args, world: World, max_length: int) -> dict[str, Tensor | float]:
    """Epochs of shuffled minibatches over the completions, one optimizer step each."""
    remaining = 1.0 - state.begun_at / args.total_tokens if args.anneal_lr else 1.0
    learning_rate = torch.tensor(args.learning_rate * remaining)
    steps, extremes, learned = [], [], []
    for _ in range(args.update_epochs):
        order = torch.randperm(len(rollout.advantages), generator=state.minibatch_generator)
        for index in order.tensor_split(args.num_minibatches):
            learned.append(rollout.completions.mask[index].any())
            stats, extreme = minibatch_step(
                state.agent, state.optimizer, rollout, index, learning_rate, args, world, max_length
            )
            steps.append(stats)
            extremes.append(extreme)
    state.iteration += 1
    table, learned, names = torch.stack(steps), torch.stack(learned), (*STATS, "losses/grad_norm")
    means = dict(zip(names, table.mean(0), strict=True))
    last_epoch = dict(zip(names, table[-args.num_minibatches :].mean(0), strict=True))
    lowest, highest = torch.stack(extremes).unbind(1)
    if args.kl_coef == 0:
        del means["losses/ref_kl"]  # there is no reference
    if args.ent_share == 1:
        del means["losses/clamped_entropy"]  # it is that of all tokens
    moved = {} if args.ent_band is None else {"losses/ent_coef": state.ent_band.coef}
    if learned.any():  # an optimizer step without tokens has measured nothing
        state.ent_band.update(masked_mean(table[:, names.index("losses/clamped_entropy")], learned))
    if args.temperature_end is not None:
        moved["charts/temperature"] = args.temperature
    return {
        **moved,
        **means,
        "losses/approx_kl": last_epoch["losses/approx_kl"],
        "losses/clipfrac": means["losses/clipfrac_low"] + means["losses/clipfrac_high"],
        "losses/sampler_kl": steps[0][names.index("losses/sampler_kl")],  # before anything has changed
        "losses/ratio_min": lowest.min().exp(),
        "losses/ratio_max": highest.max().exp(),
        "charts/learning_rate": learning_rate,
    }


def minibatch_step(
    agent: LanguageModel, optimizer: Adam, rollout: Rollout, index: Tensor, learning_rate: Tensor, args: Args,
    world: World, max_length: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Loss, gradient and one optimizer step on the completions `index` [M], a few at a time.

    Every divisor is that of the whole minibatch, so that neither `micro_batch` nor the number of ranks changes the
    gradient. Returns the numbers named by `STATS` and the gradient's norm, and the smallest and largest log-ratio.
    """
    mask = rollout.completions.mask[index]
    tokens = mask.sum().clamp(min=1)
    divisor = {"token_mean": tokens, "constant": len(index) * max_length}.get(args.aggregate, len(index))
    settings = {name: getattr(args, name) for name in LOSS_FLAGS}
    parameters = optimizer.parameters
    lowest = -math.inf if args.clip_low is None or args.clip_low >= 1 else math.log1p(-args.clip_low)
    highest = math.log1p(args.clip_high)
    stats = torch.zeros(len(STATS), device=mask.device)
    extremes = torch.zeros(2, device=mask.device)
    grads = [torch.zeros_like(parameter) for parameter in parameters]
    for part in world.parts(index, args.micro_batch):
        rows = rollout.rows(part)
        batch, old_logprob = rows.completions, rows.old_logprob
        texts = (batch.tokens, batch.attention_mask, batch.mask, args.temperature)
        out = agent.completion(*texts, entropy=True, entropy_share=args.ent_share)
        token_loss, logratio = policy_loss(
            out.logprob, old_logprob, batch.logprob, rows.advantages, batch.mask, **settings
        )  # [B, L]
        policy = aggregate(token_loss, batch.mask, args.aggregate, divisor)
        bonus = out.entropy if args.ent_share == 1 else out.clamped_entropy
        entropy = aggregate(bonus, batch.mask, args.aggregate, divisor)
        loss = policy - args.ent_coef * entropy
        if args.kl_coef > 0 and args.kl_in_reward == "none":
            kl = KL_ESTIMATORS[args.kl_estimator](out.logprob, rows.ref_logprob)
            kl = kl * (out.logprob - old_logprob).exp() if args.kl_estimator == "rk3" else kl
            loss = loss + args.kl_coef * aggregate(kl, batch.mask, args.aggregate, divisor)
        for grad, new in zip(grads, torch.autograd.grad(loss, parameters, materialize_grads=True), strict=True):
            grad += new
        with torch.no_grad():
            numbers = (k3(out.logprob, rows.ref_logprob), out.entropy, k3(old_logprob, out.logprob), logratio < lowest,
                       logratio > highest, k3(batch.logprob, out.logprob), bonus)  # fmt: skip
            means = [aggregate(x, batch.mask, "token_mean", tokens) for x in numbers]
            stats += torch.stack([loss, policy, *means])
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
        agent, tokenizer, stop_ids = load_language_model(
            args.model, args.dtype, args.device, args.lora_rank, generator=torch_generator(args.seed, "init")
        )
        prompts = torch_generator(args.seed, "prompts")
        source = PromptSource(
            task, tokenizer, prompts, args.max_length, agent.context, stop_ids, world, args.reward_weights
        )
        if args.num_prompts % world.size:
            raise ValueError(f"--num-prompts {args.num_prompts}: must be a multiple of the {world.size} ranks")
        if args.overlong_cache > source.max_length:
            limit = f"a completion has at most {source.max_length} tokens (--max-length)"
            raise ValueError(f"--overlong-cache {args.overlong_cache}: {limit}; give at most that")
        source.held_out(1)
    reference = agent.reference() if args.kl_coef > 0 else None  # the model as it was given
    sampler = agent.sampler_copy(args.sampler_dtype)
    same, no_ratio = sampler is agent, args.off_policy == "ppo_is" and args.surrogate in ("none", "taper")
    if args.off_policy != "none" and (same or no_ratio) and world.is_main:
        reason = f"with --surrogate {args.surrogate}, which has no ratio"
        if same:
            reason = "while the sampler is the trainer; --sampler-dtype bfloat16 makes them differ"
        print(f"note: --off-policy {args.off_policy}: changes nothing {reason}", file=sys.stderr)

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
        state = run.resume_or(lambda: TrainState.create(args, agent))
        while state.global_step < args.total_tokens:
            with run.phase("collect"):
                sampler.refresh(agent)
                now = state.settings(args)
                groups, metrics = collect(state, source, sampler, now)
            with run.phase("update"):
                rollout, more = prepare(groups, source, agent, reference, now)
                run.metrics({**metrics, **more, **update(state, rollout, now, world, source.max_length)})
            run.end_iteration(state)
        results = run.results(state)
        if world.is_main:
            agent.save(run.run_dir / "policy", tokenizer)
            run.finish(results)
    leave_world()


if __name__ == "__main__":
    main(parse_args(Args, PRESETS, variants=VARIANTS))
