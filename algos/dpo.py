"""Direct Preference Optimization and its family: a language model learns which of two completions is better.

Rafailov et al. (2023), "Direct Preference Optimization: Your Language Model is Secretly a Reward Model",
arXiv:2305.18290, section 4, and the methods that change its loss. For a prompt, y_w was chosen over y_l; s is a
completion's log-prob, the sum over its n tokens, s^r the same under the reference, the model as it was given.

    h = (s_w − s_w^r) − (s_l − s_l^r)                           the policy's implied reward is β (s − s^r)

    --loss   L, mean over the pairs of an optimizer step, to be minimised                      source
    dpo      −log σ(βh)                                                                        eq. 7
    ipo      (h − 1/(2β))²                                                                     arXiv:2310.12036, eq. 17
    hinge    max(0, 1 − βh)                                                                    arXiv:2309.06657
    odpo     −log σ(βh − α f(score_w − score_l))                                               arXiv:2402.10571
    simpo    −log σ(β s_w/n_w − β s_l/n_l − γ)                                                 arXiv:2405.14734, eq. 6
    orpo     −s_w/n_w − β log σ(log odds_w − log odds_l),  odds = p/(1−p), p = exp(s/n)        arXiv:2403.07691, eq. 6
    kto      1 − σ(β(t − z0)) of a good completion, 1 − σ(β(z0 − t)) of a bad one, unpaired,   arXiv:2402.01306, eq. 8
             t = s − s^r, z0 = max(0, mean t of completions after other prompts of the step)
    spin     dpo's; y_w a demonstration, y_l the model's own sample at the start of an         arXiv:2401.01335, eq. 4.7
             iteration of --num-pairs pairs, s^r the model's own log-probs then

The pairs come from a file (--pairs), or are sampled from the model before training and judged by the task, one right
and one wrong completion of a prompt; they are then in the run's folder as pairs.jsonl. With --online (Guo et al. 2024,
arXiv:2402.04792) every step samples two fresh completions of each prompt, judged by the task or by --reward-model.

Deviations, each with its reason:

 1. Dropout is off while training, and reference log-probs of given pairs are computed once, before the first step.
 2. Constant learning rate after a linear rise, gradient clipped to a norm of 1, Adam without weight decay.
 3. z0 of kto is that of the whole optimizer step; completions whose prompt is the same as their own are left out.
 4. odpo's f is the difference itself: its logarithm, the paper's, is 0 where scores are 0 and 1 (--offset-scale log).
 5. An accuracy counts as a tie, ½, what differs by less than rounding does: 1e-5 nats per token.

This file is longer than 300 lines because eight losses and three ways to come by pairs are one loop, to be compared.

Run:    python algos/dpo.py --loss dpo --beta 1 --total-tokens 40000
Expect: 0.492 ± 0.015 on held-out sums (start: 0.180), three seeds, in less than a minute on one core; the other losses
        and --online: results/preferences. With the default β of 0.1 no more than 0.42, falling later (one seed).
"""

import math
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from cleanrl_zoo.core import aggregate, dpo, hinge, ipo, k3, kto, masked_mean, orpo, preference_accuracy, simpo
from cleanrl_zoo.llm import Completions, LanguageModel, PromptSource, Reference, load_language_model, make_task, sample
from cleanrl_zoo.llm.evaluation import evaluate_held_out, sample_table, write_samples
from cleanrl_zoo.llm.pairs import (
    Judged,
    Pair,
    PairSource,
    Preferences,
    encode,
    final_values,
    hold_out,
    kept_pairs,
    load_reward_model,
    read_judged,
    read_pairs,
    sample_pairs,
    task_pairs,
    unpair,
)
from cleanrl_zoo.nn import Adam, clip_grad_norm
from cleanrl_zoo.run import LanguageArgs, Run, parse_args, torch_generator, usage_errors
from cleanrl_zoo.run.arguments import check, check_left_out, flag
from cleanrl_zoo.run.distributed import World, join_world, leave_world
from cleanrl_zoo.run.progress import LANGUAGE, Words
from cleanrl_zoo.run.seeding import stream_seed

TIE = 1e-5  # nats per token: what two equal log-probs may differ by
PAIRS = Words("tokens", "agreement", "training completions", "held-out pairs", 3)


@dataclass
class Args(LanguageArgs):
    """Direct Preference Optimization and its family, for language models."""

    model: str = "results/zoo/addition_sft"
    """folder or Hugging Face name of a causal language model; tiny: a small Llama with random weights, token = byte"""
    loss: Literal["dpo", "ipo", "hinge", "odpo", "simpo", "orpo", "kto", "spin"] = "dpo"
    """what is minimised, as in this file's header"""
    online: bool = False
    """sample two completions of each prompt for every step, in place of pairs that were made before"""
    pairs: str | None = None
    """JSONL file, folder or name of a Hugging Face dataset with prompt, chosen and rejected (kto: or with prompt,
    completion and label; odpo: and with chosen_score and rejected_score); the prompts are taken as they are"""
    pairs_from: Literal["model", "task"] = "model"
    """without --pairs: the model's samples, right against wrong ones; or the task's answers against random ones"""
    num_pairs: int = 2048
    """pairs that are made without --pairs; with spin those of one iteration"""
    pair_samples: int = 8
    """completions of a prompt from which a pair is taken"""
    evaluate: Literal["task", "pairs"] = "task"
    """what a run is judged by: rewards of sampled completions of the task's held-out prompts, or the share of the
    held-out pairs that the policy agrees with"""
    held_out_pairs: str = "0.1"
    """with --evaluate pairs: share of the prompts of the pairs that is held out, or a second file or dataset"""
    reward_model: str | None = None
    """with --online: folder made by llm_reward.py, which judges in place of the task"""
    batch_size: int = 64
    """pairs of one optimizer step; kto: completions; online: prompts"""
    total_tokens: int = 50_000
    """completion tokens of the whole run, with --online those that are sampled; the last iteration may go beyond"""
    learning_rate: float = 1e-4
    """Adam's"""
    warmup: int = 10
    """optimizer steps over which the learning rate rises"""
    max_grad_norm: float = 1.0
    """norm to which the gradient is clipped"""
    beta: float | None = None
    """β (ipo: τ; orpo: λ); by default 0.1, with simpo 2"""
    label_smoothing: float = 0.0
    """dpo, odpo, spin: share of the pairs that are thought to be the wrong way round"""
    average: bool = False
    """ipo: log-probs are averaged over tokens, not summed"""
    offset_weight: float = 1.0
    """odpo: α"""
    offset_scale: Literal["linear", "log"] = "linear"
    """odpo: f"""
    gamma: float = 1.0
    """simpo: γ, by how much the chosen one is to be ahead"""
    desirable_weight: float = 1.0
    """kto: λ_D, weight of good completions"""
    undesirable_weight: float = 1.0
    """kto: λ_U, weight of bad completions"""
    spin_epochs: int = 2
    """spin: passes over the pairs of an iteration"""
    overlong: Literal["drop", "cut"] = "drop"
    """pairs longer than --max-length or the context: drop them, or cut the completion before its stop token"""
    measure_kl: bool = True
    """measure the KL from the model as it was given at each evaluation by the task; keeps a copy of its weights"""

    def check(self) -> None:
        super().check()
        check(self, "num_pairs", "batch_size", "spin_epochs", at_least=1)
        check(self, "pair_samples", at_least=2)
        check(self, "learning_rate", "max_grad_norm", "beta", above=0)
        check(self, "warmup", "gamma", "offset_weight", "desirable_weight", "undesirable_weight", at_least=0)
        check(self, "label_smoothing", at_least=0, at_most=0.5)
        if self.loss == "kto" and self.batch_size == 1:
            raise ValueError(
                "--batch-size 1: kto compares with completions after other prompts of the same step (z0), and one "
                "completion has none; give at least 2"
            )
        if self.loss != "kto" and self.micro_batch == 1:
            raise ValueError(
                "--micro-batch 1: both completions of a pair go through the model at once; give at least 2"
            )
        if self.label_smoothing and self.loss not in ("dpo", "odpo", "spin"):
            raise ValueError(f"--label-smoothing {self.label_smoothing}: --loss {self.loss} has none; leave it out")
        if self.average and self.loss != "ipo":
            raise ValueError(f"--average: is a form of ipo, --loss is {self.loss}; leave it out")
        if self.online and self.loss in ("kto", "spin"):
            why = "learns without pairs" if self.loss == "kto" else "samples what it rejects by itself"
            raise ValueError(f"--online: --loss {self.loss} {why}; leave it out or choose another loss")
        if self.pairs is not None and (self.online or self.loss == "spin"):
            how = "--online" if self.online else "--loss spin"
            raise ValueError(f"--pairs {self.pairs}: with {how} the pairs are sampled; leave one of the two out")
        if self.evaluate == "pairs" and (self.online or self.loss == "spin"):
            raise ValueError("--evaluate pairs: without given pairs none are held out; give task")
        if self.evaluate == "pairs":
            check_left_out(self, "--evaluate pairs samples nothing", "show_samples")
        if self.reward_model is not None and not self.online:
            raise ValueError(f"--reward-model {self.reward_model}: judges fresh samples; add --online or leave it out")
        if self.online or self.loss == "spin" or (self.pairs is None and self.pairs_from == "model"):
            self.check_exact_logprobs()

    @property
    def subject(self) -> str:
        return Path(self.pairs).stem if self.pairs is not None and self.evaluate == "pairs" else self.task

    @property
    def words(self) -> Words:
        """What a run is judged by."""
        return PAIRS if self.evaluate == "pairs" else LANGUAGE

    @property
    def strength(self) -> float:
        """β."""
        return self.beta if self.beta is not None else 2.0 if self.loss == "simpo" else 0.1


REFERENCE_FREE = ("simpo", "orpo")
PRESETS = {
    "debug": {"model": "tiny", "pairs_from": "task", "num_pairs": 32, "batch_size": 8, "total_tokens": 512,
              "eval_episodes": 8, "checkpoint_every": 256, "log_every": 128},
}  # fmt: skip


def shares(count: int, size: int, world: World) -> list[Tensor]:
    """This rank's share of the numbers below `count`, at most `size` at a time."""
    return [part for part in torch.arange(count)[world.slice(count)].split(size) if len(part)]


@dataclass
class Batch:
    """What one optimizer step learns from: M pairs, chosen and rejected in turn, or M judged completions (kto)."""

    completions: Completions  # of 2M or M rows
    values: Tensor  # [M] by how much the chosen one's score is higher; kto: 1 good, 0 bad
    ref_logprob: Tensor | None  # [2M] or [M] summed over tokens; None: not known yet, or not needed


@dataclass
class TrainState:
    """All that changes during training; a checkpoint is this, the source of prompts and the log's position."""

    agent: LanguageModel
    optimizer: Adam
    order: Tensor  # [N] of the pairs in this pass over them
    minibatch_generator: torch.Generator
    noise_generator: torch.Generator
    pool: dict[str, Tensor] = field(default_factory=dict)  # spin: the pairs of this iteration
    position: int = 0  # step within the pass
    epoch: int = 0
    global_step: int = 0  # completion tokens learned from; online: sampled
    iteration: int = 0

    @classmethod
    def create(cls, args: Args, agent: LanguageModel, num_pairs: int) -> "TrainState":
        return cls(
            agent=agent,
            optimizer=Adam(agent.trainable()),
            order=torch.arange(num_pairs),
            minibatch_generator=torch_generator(args.seed, "minibatch"),
            noise_generator=torch_generator(args.seed, "noise"),
        )


def collect(
    state: TrainState, source: PromptSource | PairSource, data: Preferences | None, reward_model: LanguageModel | None,
    args: Args, world: World,
) -> tuple[Batch, dict[str, Tensor]]:  # fmt: skip
    """The next pairs: of those that are given, or fresh ones."""
    if args.online:
        return sample_two(state, source, reward_model, args, world)
    if args.loss == "spin":
        data = own_pairs(state, source, args, world)
    steps = math.ceil(len(data) / args.batch_size)  # of one pass
    if state.position == 0:
        state.order = torch.randperm(len(data), generator=state.minibatch_generator)
    index = state.order.tensor_split(steps)[state.position].sort().values  # [M]
    index = index[data.total_lengths[index].argsort(stable=True)]  # texts of like length go through the model together
    state.position = (state.position + 1) % steps
    state.epoch += state.position == 0
    completions, device = data.batch(index), state.agent.device
    state.global_step += int(completions.mask.sum())
    ref_logprob = None if data.ref_logprob is None else data.ref_logprob[data.rows(index)].to(device)
    return Batch(completions.map(lambda x: x.to(device)), data.values[index].to(device), ref_logprob), {}


def sample_two(
    state: TrainState, source: PromptSource, reward_model: LanguageModel | None, args: Args, world: World
) -> tuple[Batch, dict[str, Tensor]]:
    """Two fresh completions of each prompt, the better one first; without those that are judged the same."""
    noise = torch.rand(args.batch_size, 2, source.max_length, generator=state.noise_generator)  # [P, 2, L]
    completions, rewards = source.complete(state.agent, *source.draw(args.batch_size), noise, args.temperature)
    state.global_step += int(completions.mask.sum())
    total = scores = source.total(rewards)  # [P, 2]
    source.record(total.flatten(), completions.lengths)
    if reward_model is not None:
        with torch.no_grad():
            parts = [
                final_values(reward_model, completions.rows(rows), source.tokenizer.pad_token_id)
                for rows in shares(total.numel(), args.micro_batch, world)
            ]
        scores = world.gather(torch.cat(parts)).view_as(total).to(total)
    difference = scores[:, 0] - scores[:, 1]  # [P]
    swap = (difference < 0).long()
    rows = 2 * torch.arange(args.batch_size).unsqueeze(1) + torch.stack([swap, 1 - swap], 1)  # [P, 2]
    keep = difference.abs() > 0  # not where one is NaN
    device, scored = state.agent.device, ~rewards.isnan().any(-1)
    return Batch(completions.rows(rows[keep].flatten().to(device)), difference[keep].abs().to(device), None), {
        "charts/reward_mean": masked_mean(total.nan_to_num(0.0), scored),
        "charts/success": masked_mean(rewards[..., 0].nan_to_num(0.0), scored),
        "charts/completion_length": completions.lengths.double().mean(),
        "charts/truncated_frac": completions.truncated.double().mean(),
        "charts/zero_std_groups": 1 - keep.double().mean(),
        "charts/unscorable": (~scored).sum().double(),
    }


def own_pairs(state: TrainState, source: PromptSource, args: Args, world: World) -> Preferences:
    """The pairs of this iteration of spin, made at its start: demonstrations against the model's own samples."""
    agent, pad_id = state.agent, source.tokenizer.pad_token_id
    if state.position == 0 and state.epoch % args.spin_epochs == 0:
        chosen = source.encode_demonstrations(source.task.demonstrations(args.num_pairs, source.generator))
        noise = torch.rand(args.num_pairs, source.max_length, generator=state.noise_generator)  # [N, L]
        parts = []
        for rows in shares(args.num_pairs, args.micro_batch, world):
            prompts = (x[rows].to(agent.device) for x in (chosen.prompt_ids, chosen.prompt_mask))
            settings = (1, source.max_length, source.stop_ids, pad_id, noise[rows].to(agent.device), args.temperature)
            parts.append(sample(agent, *prompts, *settings))
        own = Completions.cat(parts, pad_id).widen(source.max_length, pad_id).map(world.gather).map(Tensor.cpu)
        turns = torch.arange(2 * args.num_pairs).view(2, -1).T.flatten()  # 0, N, 1, N + 1, ...
        both = Completions.cat([chosen, own], pad_id).rows(turns)
        pairs = Preferences.of(both, torch.ones(args.num_pairs, dtype=torch.float64), pad_id)
        pairs.ref_logprob = summed_logprobs(agent, pairs, args, world)
        state.pool = {name: value for name, value in vars(pairs).items() if isinstance(value, Tensor)}
    return Preferences(**state.pool, pad_id=pad_id)


@torch.no_grad()
def summed_logprobs(model: LanguageModel, data: Preferences, args: Args, world: World) -> Tensor:
    """Log-probs of all completions under `model` as it is now, [rows]; texts of like length go through it together."""
    result = torch.zeros(len(data.completion_ends), device=model.device)
    order = data.total_lengths.argsort(stable=True)
    for index in order.split(max(args.micro_batch // data.each, 1))[world.rank :: world.size]:
        few = data.batch(index).map(lambda x: x.to(model.device))
        logprob = model.completion(few.tokens, few.attention_mask, few.mask, args.temperature).logprob  # [M · each, L]
        result[data.rows(index).to(model.device)] = logprob.sum(1).float()
    return world.sum([result])[0].cpu()


def preference_loss(
    logprob: Tensor, ref_logprob: Tensor | None, lengths: Tensor, values: Tensor, z0: Tensor | None, args: Args
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss [M], implied rewards [rows] and agreement with the pair [M], from log-probs summed over `lengths` tokens."""
    beta, tie = args.strength, TIE * args.strength
    if args.loss == "kto":
        good = values != 0
        loss, reward = kto(logprob, ref_logprob, good, z0, beta, args.desirable_weight, args.undesirable_weight)
        zero = torch.zeros_like(reward)
        return loss, reward, preference_accuracy(reward.where(good, zero), zero.where(good, reward), tie * lengths)

    chosen, rejected = logprob.view(-1, 2).unbind(1)
    chosen_len, rejected_len = lengths.view(-1, 2).unbind(1)
    if args.loss == "simpo":
        loss, *rewards = simpo(chosen, rejected, chosen_len, rejected_len, beta, args.gamma)
    elif args.loss == "orpo":
        loss, *rewards = orpo(chosen / chosen_len, rejected / rejected_len, beta)
        loss = loss - chosen / chosen_len
    else:
        four = (chosen, rejected, *ref_logprob.view(-1, 2).unbind(1))
        if args.loss == "ipo":
            both = (chosen_len, rejected_len) * 2
            loss, *rewards = ipo(*(x / n for x, n in zip(four, both, strict=True)) if args.average else four, beta)
        elif args.loss == "hinge":
            loss, *rewards = hinge(*four, beta)
        else:
            distance = values.log() if args.offset_scale == "log" else values
            offset = args.offset_weight * distance.to(chosen) if args.loss == "odpo" else 0.0
            loss, *rewards = dpo(*four, beta, args.label_smoothing, offset)
        if not args.average:
            tie = tie * (chosen_len + rejected_len)
    return loss, torch.stack(rewards, 1).flatten(), preference_accuracy(*rewards, tie)


STATS = ("losses/loss", "rewards/accuracy", "rewards/chosen", "rewards/rejected", "rewards/chosen_logprob",
         "rewards/rejected_logprob", "rewards/chosen_length", "rewards/rejected_length")  # fmt: skip


def update(
    state: TrainState, batch: Batch, reference: Reference | None, args: Args, world: World
) -> dict[str, Tensor | float]:
    """One optimizer step on the pairs, a few at a time.

    Every divisor is that of the whole step, so that neither `micro_batch` nor the number of ranks changes the gradient.
    """
    agent, parameters, completions = state.agent, state.optimizer.parameters, batch.completions
    items = len(batch.values)  # M
    state.iteration += 1
    if items == 0:  # online: all pairs were judged the same
        return {}
    each = 1 if args.loss == "kto" else 2
    good = batch.values != 0 if args.loss == "kto" else torch.arange(2 * items, device=agent.device) % 2 == 0  # [rows]
    counts = good.sum().clamp(min=1), (~good).sum().clamp(min=1)
    z0 = mismatched_kl(agent, reference, completions, args, world) if args.loss == "kto" else None
    stats = torch.zeros(len(STATS), device=agent.device)
    grads = [torch.zeros_like(parameter) for parameter in parameters]
    # every rank has some of the short and some of the long ones
    for part in torch.arange(items)[world.rank :: world.size].split(max(args.micro_batch // each, 1)):
        if len(part) == 0:  # fewer pairs than ranks
            continue
        rows = (each * part.unsqueeze(1) + torch.arange(each)).flatten().to(agent.device)
        few = completions.rows(rows)
        inputs = (few.tokens, few.attention_mask, few.mask, args.temperature)
        logprob, ref_logprob = agent.completion(*inputs).logprob.sum(1), None  # [rows]
        if args.loss not in REFERENCE_FREE:
            known = batch.ref_logprob
            ref_logprob = reference.completion(*inputs).logprob.sum(1) if known is None else known[rows]
        values = batch.values[part.to(agent.device)]
        loss, reward, right = preference_loss(logprob, ref_logprob, few.lengths, values, z0, args)
        total = aggregate(loss, mode="sum", denominator=items)
        for grad, new in zip(grads, torch.autograd.grad(total, parameters, materialize_grads=True), strict=True):
            grad += new
        sides = [
            aggregate(x.detach(), side, "constant", count)
            for x in (reward, logprob, few.lengths)
            for side, count in zip((good[rows], ~good[rows]), counts, strict=True)
        ]
        stats += torch.stack([total.detach(), aggregate(right, mode="sum", denominator=items), *sides])
    *grads, stats = world.sum([*grads, stats])
    grads, norm = clip_grad_norm(grads, args.max_grad_norm)
    learning_rate = args.learning_rate * min(1.0, state.iteration / max(args.warmup, 1))
    state.optimizer.step(grads, torch.tensor(learning_rate))
    metrics = dict(zip(STATS, stats, strict=True))
    return {
        **metrics,
        **({"rewards/kto_baseline": z0} if z0 is not None else {}),
        "rewards/margin": metrics["rewards/chosen"] - metrics["rewards/rejected"],
        "losses/grad_norm": norm,
        "charts/learning_rate": learning_rate,
    }


@torch.no_grad()
def mismatched_kl(
    agent: LanguageModel, reference: Reference, completions: Completions, args: Args, world: World
) -> Tensor:
    """z0 of kto: the mean log-ratio of completions after the prompts of others, at least 0; 0 where there are none."""
    half = len(completions.ids) // 2  # neighbours may share a prompt
    prompt_ids, prompt_mask = completions.prompt_ids.roll(half, 0), completions.prompt_mask.roll(half, 0)
    other = torch.where(prompt_mask, prompt_ids, -1) != torch.where(completions.prompt_mask, completions.prompt_ids, -1)
    fits = prompt_mask.sum(1) + completions.lengths <= agent.context
    index = (other.any(1) & fits).nonzero().squeeze(1)
    mixed = Completions(prompt_ids, prompt_mask, completions.ids, completions.mask, completions.logprob, fits)
    logratio = torch.zeros((), device=agent.device)
    for part in shares(len(index), args.micro_batch, world):
        few = mixed.rows(index[part.to(index.device)])
        inputs = (few.tokens, few.attention_mask, few.mask, args.temperature)
        logratio += (agent.completion(*inputs).logprob - reference.completion(*inputs).logprob).sum()
    return (world.sum([logratio])[0] / max(len(index), 1)).clamp(min=0)


@torch.no_grad()
def agreement(agent: LanguageModel, held: Preferences, args: Args) -> tuple[np.ndarray, np.ndarray]:
    """Of each of the held-out items, whether the policy agrees, [N], and its tokens."""
    right = torch.zeros(len(held), dtype=torch.float64)
    for index in held.total_lengths.argsort(stable=True).split(max(args.micro_batch // held.each, 1)):
        few, rows = held.batch(index).map(lambda x: x.to(agent.device)), held.rows(index)
        logprob = agent.completion(few.tokens, few.attention_mask, few.mask, args.temperature).logprob.sum(1)
        ref_logprob = held.ref_logprob[rows].to(agent.device) if held.ref_logprob is not None else None
        values, z0 = held.values[index].to(agent.device), torch.zeros((), device=agent.device)
        right[index] = preference_loss(logprob, ref_logprob, few.lengths, values, z0, args)[2].double().cpu()
    return right.numpy(), held.lengths.view(len(held), -1).sum(1).numpy()


@torch.no_grad()
def kl_from_reference(agent: LanguageModel, reference: Reference, source: PromptSource, args: Args) -> Tensor:
    """Mean per token of k3 between the policy and the model as it was given, on samples for held-out prompts."""
    _, *prompts = source.held_out(min(args.eval_episodes, 128))
    prompt_ids, prompt_mask = (x.to(agent.device) for x in prompts)
    generator = torch.Generator().manual_seed(stream_seed(args.seed, "evaluation"))
    noise = torch.rand(len(prompt_ids), source.max_length, generator=generator).to(agent.device)
    settings = (1, source.max_length, source.stop_ids, source.tokenizer.pad_token_id, noise, args.temperature)
    own = sample(agent, prompt_ids, prompt_mask, *settings)
    out = reference.completion(own.tokens, own.attention_mask, own.mask, args.temperature)
    return masked_mean(k3(own.logprob, out.logprob), own.mask)


def read_items(args: Args, name: str) -> list[Pair] | list[Judged]:
    """What a file or dataset holds, as the loss needs it."""
    return read_judged(name) if args.loss == "kto" else read_pairs(name, scores=args.loss == "odpo")


def make_items(
    agent: LanguageModel, source: PromptSource, args: Args, path: Path, world: World
) -> list[Pair] | list[Judged]:
    """Pairs of the task, or of the model's own samples, which are kept in the file `path`."""
    generator = torch_generator(args.seed, "prompts")
    if args.pairs_from == "task":
        pairs = task_pairs(source.task, args.num_pairs, generator)
    else:
        settings = (args.num_pairs, generator, args.pair_samples, args.temperature)
        pairs = kept_pairs(path, lambda: sample_pairs(agent, source, *settings), world.is_main)
    return unpair(pairs) if args.loss == "kto" else pairs


def main(args: Args) -> None:
    world = join_world(args.device)
    made_before = not args.online and args.loss != "spin"
    with usage_errors(), warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        items = read_items(args, args.pairs) if args.pairs is not None else None
        sizes = [] if made_before else ["batch_size"] if args.online else ["num_pairs"]
        for name in sizes:
            if getattr(args, name) % world.size:
                raise ValueError(f"{flag(name)} {getattr(args, name)}: must be a multiple of the {world.size} ranks")
    with usage_errors():
        generator = torch_generator(args.seed, "init")
        agent, tokenizer, stop_ids = load_language_model(
            args.model, args.dtype, args.device, args.lora_rank, generator=generator
        )
        if items is not None and args.evaluate == "pairs":
            source = PairSource(args.subject)
        else:
            task, prompts = make_task(**args.task_settings()), torch_generator(args.seed, "prompts")
            source = PromptSource(task, tokenizer, prompts, args.max_length, agent.context, stop_ids, world)
            source.held_out(1)
        reward_model = None
        if args.reward_model is not None:
            reward_model = load_reward_model(args.reward_model, tokenizer, args.dtype, args.device)

        def encode_items(items: list[Pair] | list[Judged]) -> tuple[Preferences, Preferences | None]:
            """The pairs to learn from and those held out, with the log-probs of the model as it was given."""
            parts = [items]
            if args.evaluate == "pairs":
                parts = hold_out(items, args.held_out_pairs, lambda name: read_items(args, name))
            limits = (stop_ids[0], args.max_length, agent.context, args.overlong == "cut")
            return tuple(encode(tokenizer, part, *limits) for part in parts)

        data = encode_items(items) if items is not None else ()
    measured = args.measure_kl and args.evaluate == "task"
    asked = args.loss == "kto" or (args.online and args.loss not in REFERENCE_FREE)
    reference = agent.reference() if asked or measured else None  # the model as it was given

    def evaluate(state: TrainState) -> tuple[np.ndarray, np.ndarray]:
        """Rewards and lengths of sampled completions of held-out prompts, or agreement with the held-out pairs."""
        if args.evaluate == "pairs":
            return agreement(state.agent, data[1], args)
        if measured:
            run.metrics({"losses/ref_kl": kl_from_reference(state.agent, reference, source, args)})
        held_out = evaluate_held_out(
            state.agent, source, args.eval_episodes, stream_seed(args.seed, "evaluation"), args.temperature, args.top_p
        )
        if args.show_samples:
            run.progress.message(sample_table(held_out, task.reward_names, args.show_samples))
            write_samples(run.run_dir / "samples", state.global_step, held_out, task.reward_names, args.show_samples)
        return held_out.results()

    with Run(args, source, evaluate, world) as run:
        for note in notes:
            run.progress.message(f"note: {note.message}")
        if made_before and items is None:
            data = encode_items(make_items(agent, source, args, run.run_dir / "pairs.jsonl", world))
        for part in data:
            if part.dropped:
                run.progress.message(
                    f"note: {part.dropped} of {len(part) + part.dropped} were too long and are left out"
                )
            if args.loss not in REFERENCE_FREE:
                part.ref_logprob = summed_logprobs(agent, part, args, world)
        num_pairs = len(data[0]) if made_before else args.num_pairs if args.loss == "spin" else 0
        state = run.resume_or(lambda: TrainState.create(args, agent, num_pairs))
        while state.global_step < args.total_tokens:
            with run.phase("collect"):
                batch, metrics = collect(state, source, data[0] if data else None, reward_model, args, world)
            with run.phase("update"):
                run.metrics({**metrics, **update(state, batch, reference, args, world)})
            run.end_iteration(state)
        results = run.results(state)
        if world.is_main:
            agent.save(run.run_dir / "policy", tokenizer)
            run.finish(results)
    leave_world()


if __name__ == "__main__":
    main(parse_args(Args, PRESETS))
