"""Distillation of a language model: a student learns a teacher's probabilities, on its own samples or the teacher's.

Agarwal et al. (2024), "On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes",
arXiv:2306.13649, section 3; Gu et al. (2024), "MiniLLM", arXiv:2306.08543. π is the student, π_T the teacher, ℓ the
log-prob of a token under the student, ℓ° the same before this batch's first update, ℓ^T under the teacher.

    --form full      samples of π     L = mean over tokens of Σ_v π(v) (log π(v) − log π_T(v)) = KL(π‖π_T), reverse
    --form sampled   samples of π     L = mean over tokens of −min( w A, clip(w, 1−ε, 1+ε) A ),  w = exp(ℓ − ℓ°),
                                          A = −(ℓ° − ℓ^T): the reward of a token is the teacher's log-prob over its own
    --form forward   samples of π_T   L = mean over tokens of −ℓ, which is KL(π_T‖π), forward, plus a constant

The reverse KL makes the student keep to what the teacher would say, where it goes itself; the forward KL makes it cover
all that the teacher says, where the teacher goes.

Deviations from the papers, each with its reason:

 1. The gradient is that of the tokens' KLs, not of the chance to come to their places: less noise (Agarwal et al.).
 2. All samples of one iteration come from one side; the papers mix them.
 3. Four optimizer steps per rollout by default: the samples of the last are as old as three steps.
 4. The sampled form does not discount: a token answers for its own KL alone, as in the full form.
 5. Dropout is off; the learning rate falls to zero; the gradient is clipped to a norm of 1.

This file is longer than 300 lines because the exact KL works on pieces of two models' heads.

Run:    python algos/llm_distill.py --teacher results/zoo/addition_grpo --max-length 8 --total-tokens 60000
Expect: 0.842 ± 0.015 on held-out sums (start: 0.180), three seeds, half a minute on one core; forward 0.826, sampled
        0.776: results/distillation.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cleanrl_zoo.core import Categorical, aggregate, categorical_kl, clipped_surrogate, k3
from cleanrl_zoo.llm import Completions, LanguageModel, PromptSource, load_language_model, make_task, sample
from cleanrl_zoo.llm.evaluation import describe_completions, evaluate_held_out, sample_table, write_samples
from cleanrl_zoo.nn import Adam, clip_grad_norm
from cleanrl_zoo.run import LanguageArgs, Run, parse_args, torch_generator, usage_errors
from cleanrl_zoo.run.arguments import check
from cleanrl_zoo.run.distributed import World, join_world, leave_world
from cleanrl_zoo.run.seeding import stream_seed

PIECE = 1 << 22  # logits of each model that are held at a time
KL_PROMPTS = 128  # held-out prompts on which an evaluation measures the KL to the teacher


@dataclass
class Args(LanguageArgs):
    """Distillation of a language model from a teacher."""

    model: str = "results/zoo/addition_sft"
    """folder or Hugging Face name of a causal language model; tiny: a small Llama with random weights, token = byte"""
    teacher: str | None = None
    """folder or Hugging Face name of the model to learn from; it must have the student's vocabulary"""
    form: Literal["full", "sampled", "forward"] = "full"
    """full: reverse KL over the whole vocabulary on the student's samples; sampled: its estimate by the sampled tokens,
    as PPO's advantage; forward: supervised learning on the teacher's samples"""
    num_prompts: int = 32
    """prompts of one iteration (P)"""
    group_size: int = 8
    """completions of each prompt (G)"""
    num_minibatches: int = 4
    """optimizer steps per epoch; must divide P × G"""
    update_epochs: int = 1
    """passes over the completions"""
    learning_rate: float = 2e-4
    """Adam's, in the first iteration"""
    anneal_lr: bool = True
    """let the learning rate fall linearly to zero"""
    max_grad_norm: float = 1.0
    """norm to which the gradient is clipped"""
    clip_low: float = 0.2
    """of --form sampled: 1 − clip_low is the ratio's lower bound"""
    clip_high: float = 0.2
    """of --form sampled: 1 + clip_high is the ratio's upper bound"""
    reward_weights: tuple[float, ...] = ()
    """weight of each of the task's rewards in the total that is shown; all 1 by default"""

    def check(self) -> None:
        super().check()
        check(self, "num_prompts", "group_size", "num_minibatches", "update_epochs", at_least=1)
        check(self, "learning_rate", "max_grad_norm", "clip_high", above=0)
        check(self, "clip_low", above=0, below=1)
        self.check_exact_logprobs()
        batch_size = self.num_prompts * self.group_size
        if batch_size % self.num_minibatches:
            batch = f"{batch_size} completions (--num-prompts {self.num_prompts} × --group-size {self.group_size})"
            raise ValueError(f"--num-minibatches {self.num_minibatches}: must divide the {batch}")
        if self.teacher is None:
            raise ValueError("--teacher: none is given; name the folder or Hugging Face model to learn from")


PRESETS = {
    "debug": {"model": "tiny", "teacher": "tiny", "total_tokens": 256, "num_prompts": 4, "group_size": 4,
              "eval_episodes": 8, "checkpoint_every": 128, "log_every": 64},
}  # fmt: skip


def completion_rows(model: LanguageModel, batch: Completions) -> tuple[Tensor, Tensor | None]:
    """What the logits of the n completion tokens come from: hidden states [n, H] and the head's weight [V, H].

    Where a model does more than a linear head does, the logits [n, V] themselves, and None.
    """
    start = -batch.ids.shape[1] - 1
    inputs = model.inputs(batch.tokens, batch.attention_mask) | {"use_cache": False}
    if model.linear_head:
        hidden = model.model.base_model(**inputs).last_hidden_state[:, start:-1]
        return hidden[batch.mask], model.model.get_output_embeddings().weight
    return model.model(**inputs).logits[:, start:-1][batch.mask], None


def piece_kl(
    rows: Tensor, head: Tensor | None, teacher_rows: Tensor, teacher_head: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor]:
    """KL(student‖teacher) and the student's entropy for some of the rows of `completion_rows`, [n] each, in nats."""
    logits = rows if head is None else rows @ head.T  # [n, V]
    teacher_logits = teacher_rows if teacher_head is None else teacher_rows @ teacher_head.T
    width = min(logits.shape[1], teacher_logits.shape[1])  # heads are padded differently beyond the vocabulary
    exact = torch.promote_types(logits.dtype, torch.float32)
    logits, teacher_logits = (x[:, :width].to(exact) / temperature for x in (logits, teacher_logits))
    return categorical_kl(logits, teacher_logits), Categorical(logits.detach()).entropy()


def token_kl(
    student: LanguageModel, teacher: LanguageModel, batch: Completions, temperature: float
) -> tuple[Tensor, Tensor]:
    """Exact KL(student‖teacher) over the vocabulary at each token of the completions, and the entropy: [B, L] each.

    Logits are made for the completions' tokens alone, a piece at a time, and made again for the gradient.
    """
    rows, head = completion_rows(student, batch)
    with torch.no_grad():
        teacher_rows, teacher_head = completion_rows(teacher, batch)
    vocabulary = rows.shape[1] if head is None else len(head)
    pieces = (x.split(max(PIECE // vocabulary, 1)) for x in (rows, teacher_rows))
    parts = [
        checkpoint(piece_kl, part, head, teacher_part, teacher_head, temperature, use_reentrant=False)
        for part, teacher_part in zip(*pieces, strict=True)
    ]

    def spread(values: tuple[Tensor, ...]) -> Tensor:
        whole = values[0].new_zeros(batch.mask.shape)  # [B, L]
        whole[batch.mask] = torch.cat(values)
        return whole

    kl, entropy = (spread(values) for values in zip(*parts, strict=True))
    return kl, entropy


@dataclass
class TrainState:
    """All that changes during training; a checkpoint is this, the source of prompts and the log's position."""

    agent: LanguageModel
    optimizer: Adam
    noise_generator: torch.Generator
    minibatch_generator: torch.Generator
    global_step: int = 0  # completion tokens sampled
    begun_at: int = 0  # `global_step` before this iteration
    iteration: int = 0

    @classmethod
    def create(cls, args: Args, agent: LanguageModel) -> "TrainState":
        return cls(
            agent=agent,
            optimizer=Adam(agent.trainable()),
            noise_generator=torch_generator(args.seed, "noise"),
            minibatch_generator=torch_generator(args.seed, "minibatch"),
        )


def collect(
    state: TrainState, source: PromptSource, teacher: LanguageModel, args: Args
) -> tuple[Completions, dict[str, Tensor]]:
    """Samples B = P × G completions, of the student or of the teacher; their rewards are only shown."""
    state.begun_at = state.global_step
    prompts = source.draw(args.num_prompts)
    shape = (args.num_prompts, args.group_size, source.max_length)
    noise = torch.rand(shape, generator=state.noise_generator)  # [P, G, L]
    sampler = teacher if args.form == "forward" else state.agent
    completions, rewards = source.complete(sampler, *prompts, noise, args.temperature)  # rewards [P, G, K]
    state.global_step += int(completions.mask.sum())
    rewards = rewards.flatten(0, 1)  # [B, K]
    total = source.total(rewards)  # [B]
    source.record(total, completions.lengths)
    return completions, describe_completions(completions, rewards, total, source.task.reward_names)


def token_losses(
    agent: LanguageModel, teacher: LanguageModel, batch: Completions, args: Args
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, KL between student and teacher, the student's entropy and log-ratio at each token, [B, L] each."""
    zeros = torch.zeros_like(batch.logprob)
    if args.form == "full":
        kl, entropy = token_kl(agent, teacher, batch, args.temperature)
        return kl, kl, entropy, zeros
    texts = (batch.tokens, batch.attention_mask, batch.mask, args.temperature)
    out = agent.completion(*texts, entropy=True)
    if args.form == "forward":
        return -out.logprob, k3(batch.logprob, out.logprob), out.entropy, zeros
    with torch.no_grad():
        teacher_logprob = teacher.completion(*texts).logprob
    old_logprob = batch.logprob  # as it was sampled: the trainer's own, up to the last bits
    loss = clipped_surrogate(out.logprob, old_logprob, teacher_logprob - old_logprob, args.clip_low, args.clip_high)
    return loss, k3(old_logprob, teacher_logprob), out.entropy, out.logprob - old_logprob


STATS = ("losses/loss", "losses/teacher_kl", "losses/entropy", "losses/approx_kl", "losses/clipfrac_low",
         "losses/clipfrac_high")  # fmt: skip


def update(
    state: TrainState, completions: Completions, teacher: LanguageModel, args: Args, world: World
) -> dict[str, Tensor | float]:
    """Epochs of shuffled minibatches over the completions, one optimizer step each."""
    remaining = 1.0 - state.begun_at / args.total_tokens if args.anneal_lr else 1.0
    learning_rate = torch.tensor(args.learning_rate * remaining)
    steps = []
    for _ in range(args.update_epochs):
        order = torch.randperm(len(completions.ids), generator=state.minibatch_generator)
        steps += [
            minibatch_step(state.agent, teacher, state.optimizer, completions, index, learning_rate, args, world)
            for index in order.tensor_split(args.num_minibatches)
        ]
    state.iteration += 1
    means = dict(zip((*STATS, "losses/grad_norm"), torch.stack(steps).mean(0), strict=True))
    last_epoch = torch.stack(steps[-args.num_minibatches :]).mean(0)
    means["losses/approx_kl"] = last_epoch[STATS.index("losses/approx_kl")]
    if args.form == "forward":
        means["losses/forward_kl"] = means.pop("losses/teacher_kl")  # the teacher sampled: KL(teacher‖student)
    if args.form != "sampled":
        for name in ("approx_kl", "clipfrac_low", "clipfrac_high"):
            del means[f"losses/{name}"]
    return {**means, "charts/learning_rate": learning_rate}


def minibatch_step(
    agent: LanguageModel, teacher: LanguageModel, optimizer: Adam, completions: Completions, index: Tensor,
    learning_rate: Tensor, args: Args, world: World,
) -> Tensor:  # fmt: skip
    """Loss, gradient and one optimizer step on the completions `index` [M], a few at a time.

    Every divisor is that of the whole minibatch, so that neither `micro_batch` nor the number of ranks changes the
    gradient. Returns the numbers named by `STATS` and the gradient's norm.
    """
    tokens = completions.mask[index].sum().clamp(min=1)
    parameters = optimizer.parameters
    stats = torch.zeros(len(STATS), device=tokens.device)
    grads = [torch.zeros_like(parameter) for parameter in parameters]
    for part in world.parts(index, args.micro_batch):
        batch = completions.rows(part)
        loss, kl, entropy, logratio = token_losses(agent, teacher, batch, args)
        mean_loss = aggregate(loss, batch.mask, "token_mean", tokens)
        for grad, new in zip(grads, torch.autograd.grad(mean_loss, parameters, materialize_grads=True), strict=True):
            grad += new
        with torch.no_grad():
            numbers = (kl, entropy, k3(torch.zeros_like(logratio), logratio), logratio < math.log1p(-args.clip_low),
                       logratio > math.log1p(args.clip_high))  # fmt: skip
            stats += torch.stack([mean_loss, *(aggregate(x, batch.mask, "token_mean", tokens) for x in numbers)])
    *grads, stats = world.sum([*grads, stats])
    grads, norm = clip_grad_norm(grads, args.max_grad_norm)
    optimizer.step(grads, learning_rate)
    return torch.cat((stats, norm.reshape(1)))


@torch.no_grad()
def held_out_kl(student: LanguageModel, teacher: LanguageModel, source: PromptSource, args: Args) -> float:
    """Mean over tokens of KL(student‖teacher) on the student's own completions of held-out prompts: all forms alike."""
    _, prompt_ids, prompt_mask = source.held_out(min(args.eval_episodes, KL_PROMPTS))
    generator = torch.Generator().manual_seed(stream_seed(args.seed, "evaluation"))
    noise = torch.rand(len(prompt_ids), source.max_length, generator=generator)  # [B, L]
    prompt_ids, prompt_mask, noise = (x.to(student.device) for x in (prompt_ids, prompt_mask, noise))
    pad_id = source.tokenizer.pad_token_id
    completions = sample(
        student, prompt_ids, prompt_mask, 1, source.max_length, source.stop_ids, pad_id, noise, args.temperature
    )
    parts = torch.arange(len(prompt_ids)).split(args.micro_batch)
    total = sum(token_kl(student, teacher, completions.rows(few), args.temperature)[0].sum() for few in parts)
    return float(total / completions.mask.sum())


def load_teacher(args: Args, tokenizer: Any, init: torch.Generator) -> tuple[LanguageModel, tuple[int, ...]]:
    """The teacher and its stop tokens. ValueError, one line, where its vocabulary is not the student's."""
    teacher, other, stop_ids = load_language_model(args.teacher, args.dtype, args.device, generator=init)
    if other.get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"--teacher {args.teacher}: its {len(other)} tokens are not the {len(tokenizer)} of --model {args.model}, "
            "and only probabilities of the same tokens can be compared; give a teacher of the same family"
        )
    return teacher.requires_grad_(False), stop_ids


def main(args: Args) -> None:
    world = join_world(args.device)
    with usage_errors():
        task = make_task(**args.task_settings())
        init = torch_generator(args.seed, "init")
        agent, tokenizer, stop_ids = load_language_model(
            args.model, args.dtype, args.device, args.lora_rank, generator=init
        )
        teacher, more = load_teacher(args, tokenizer, init)
        stop_ids = (*stop_ids, *(stop for stop in more if stop not in stop_ids))
        context, prompts = min(agent.context, teacher.context), torch_generator(args.seed, "prompts")
        source = PromptSource(task, tokenizer, prompts, args.max_length, context, stop_ids, world, args.reward_weights)
        if args.num_prompts % world.size:
            raise ValueError(f"--num-prompts {args.num_prompts}: must be a multiple of the {world.size} ranks")
        source.held_out(1)

    def evaluate(state: TrainState) -> tuple[np.ndarray, np.ndarray]:
        """Rewards and lengths of the student's completions of held-out prompts."""
        held_out = evaluate_held_out(
            state.agent, source, args.eval_episodes, stream_seed(args.seed, "evaluation"), args.temperature
        )
        run.metrics({"eval/teacher_kl": held_out_kl(state.agent, teacher, source, args)})
        if args.show_samples:
            run.progress.message(sample_table(held_out, task.reward_names, args.show_samples))
            write_samples(run.run_dir / "samples", state.global_step, held_out, task.reward_names, args.show_samples)
        return held_out.results()

    with Run(args, source, evaluate, world) as run:
        state = run.resume_or(lambda: TrainState.create(args, agent))
        while state.global_step < args.total_tokens:
            with run.phase("collect"):
                completions, metrics = collect(state, source, teacher, args)
            with run.phase("update"):
                run.metrics({**metrics, **update(state, completions, teacher, args, world)})
            run.end_iteration(state)
        results = run.results(state)
        if world.is_main:
            agent.save(run.run_dir / "policy", tokenizer)
            run.finish(results)
    leave_world()


if __name__ == "__main__":
    main(parse_args(Args, PRESETS))
