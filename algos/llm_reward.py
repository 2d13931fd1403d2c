"""A reward model: a language model that scores completions, learned from which of two was preferred.

Ouyang et al. (2022), "Training language models to follow instructions with human feedback", arXiv:2203.02155, section
3.5, the second of its three steps, after Bradley & Terry (1952). The score r(x, y) is a linear function of the last
hidden state at the completion's own last token, its stop token.

    P(y_w before y_l | x) = σ( r(x, y_w) − r(x, y_l) )
    L = −1/M Σ log σ( r(x, y_w) − r(x, y_l) − m ) + c ( r(x, y_w) + r(x, y_l) )²       M pairs, to be minimised

m is 0, or with --margin how much better y_w was judged (Touvron et al. 2023, arXiv:2307.09288, equation 2). c,
--center-coef, keeps the scores around 0, which the first term leaves free (Eisenstein et al. 2023, arXiv:2312.09244).

The pairs come from a file (--pairs), or are sampled from the model before training and judged by the task, one right
and one wrong completion of a prompt; they are then in the run's folder as pairs.jsonl. A run is judged by the share of
the held-out pairs that it scores the right way round. Its policy folder is what llm_ppo.py and dpo.py take as
--reward-model.

Deviations from the paper, each with its reason:

 1. All pairs of a prompt count as they come; the paper puts the K(K−1)/2 pairs of one prompt into one batch.
 2. The head is zero at first, so that every score is 0 and every pair a tie; the trunk learns from the second step on.
 3. Dropout is off while training, so that a score is a function of the text alone.
 4. Constant learning rate after a linear rise, gradient clipped to a norm of 1, Adam without weight decay.

Run:    python algos/llm_reward.py --num-pairs 6000 --learning-rate 3e-4 --total-tokens 100000
Expect: agrees with 0.82 to 0.84 of the held-out pairs (seed 1 on two machines), in a minute on one core.
"""

import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from cleanrl_zoo.core import aggregate, bradley_terry, preference_accuracy
from cleanrl_zoo.llm import Completions, LanguageModel, PromptSource, load_language_model, make_task
from cleanrl_zoo.llm.pairs import (
    PairSource,
    Preferences,
    encode,
    final_values,
    hold_out,
    kept_pairs,
    read_pairs,
    sample_pairs,
    save_reward_model,
    task_pairs,
)
from cleanrl_zoo.nn import Adam, clip_grad_norm
from cleanrl_zoo.run import LanguageArgs, Run, parse_args, torch_generator, usage_errors
from cleanrl_zoo.run.arguments import check, check_left_out
from cleanrl_zoo.run.distributed import World, join_world, leave_world
from cleanrl_zoo.run.progress import Words


@dataclass
class Args(LanguageArgs):
    """A reward model for completions, learned from pairs of them."""

    words: ClassVar[Words] = Words("tokens", "accuracy", "training pairs", "held-out pairs", 3)
    model: str = "results/zoo/addition_sft"
    """folder or Hugging Face name of a causal language model; tiny: a small Llama with random weights, token = byte"""
    pairs: str | None = None
    """JSONL file, folder or name of a Hugging Face dataset with prompt, chosen and rejected (--margin: and with
    chosen_score and rejected_score); the prompts are taken as they are"""
    pairs_from: Literal["model", "task"] = "model"
    """without --pairs: the model's samples, right against wrong ones; or the task's answers against random ones"""
    num_pairs: int = 2048
    """pairs that are made without --pairs"""
    pair_samples: int = 8
    """completions of a prompt from which a pair is taken"""
    held_out_pairs: str = "0.1"
    """share of the prompts of the pairs that is held out, or a second file or dataset"""
    batch_size: int = 64
    """pairs of one optimizer step"""
    total_tokens: int = 50_000
    """completion tokens of the whole run; the last iteration may go beyond"""
    learning_rate: float = 3e-4
    """Adam's"""
    warmup: int = 10
    """optimizer steps over which the learning rate rises"""
    max_grad_norm: float = 1.0
    """norm to which the gradient is clipped"""
    margin: bool = False
    """take the difference of the pair's own scores from that of the model's"""
    center_coef: float = 0.0
    """c, weight of the square that keeps scores around 0"""
    overlong: Literal["drop", "cut"] = "drop"
    """pairs longer than --max-length or the context: drop them, or cut the completion before its stop token"""

    def check(self) -> None:
        super().check()
        check(self, "num_pairs", "batch_size", at_least=1)
        check(self, "pair_samples", "micro_batch", at_least=2)
        check(self, "learning_rate", "max_grad_norm", above=0)
        check(self, "warmup", "center_coef", at_least=0)
        if self.pairs is None and self.pairs_from == "model":
            self.check_exact_logprobs()
        check_left_out(self, "an evaluation judges all held-out pairs", "eval_episodes", "show_samples", "top_p")

    @property
    def subject(self) -> str:
        return Path(self.pairs).stem if self.pairs is not None else self.task


PRESETS = {
    "debug": {"model": "tiny", "pairs_from": "task", "num_pairs": 64, "batch_size": 8, "total_tokens": 512,
              "checkpoint_every": 256, "log_every": 128},
}  # fmt: skip


@dataclass
class TrainState:
    """All that changes during training; a checkpoint is this and the log's position."""

    agent: LanguageModel
    optimizer: Adam
    order: Tensor  # [N] of the pairs in this pass over them
    minibatch_generator: torch.Generator
    position: int = 0  # step within the pass
    global_step: int = 0  # completion tokens learned from
    iteration: int = 0

    @classmethod
    def create(cls, args: Args, agent: LanguageModel, num_pairs: int) -> "TrainState":
        generator = torch_generator(args.seed, "minibatch")
        return cls(agent, Adam(agent.trainable()), torch.arange(num_pairs), generator)


def collect(state: TrainState, data: Preferences, args: Args) -> tuple[Completions, Tensor]:
    """The next M pairs, chosen and rejected in turn, and the difference of each pair's own scores [M]."""
    steps = math.ceil(len(data) / args.batch_size)  # of one pass
    if state.position == 0:
        state.order = torch.randperm(len(data), generator=state.minibatch_generator)
    index = state.order.tensor_split(steps)[state.position].sort().values  # [M]
    state.position = (state.position + 1) % steps
    completions, device = data.batch(index), state.agent.device
    state.global_step += int(completions.mask.sum())
    return completions.map(lambda x: x.to(device)), data.values[index].to(device, torch.float32)


def score(agent: LanguageModel, completions: Completions, pad_id: int) -> tuple[Tensor, Tensor]:
    """Scores of the chosen and of the rejected completions, [M] each."""
    return final_values(agent, completions, pad_id).view(-1, 2).unbind(1)


STATS = ("losses/loss", "rewards/accuracy", "rewards/chosen", "rewards/rejected")


def update(
    state: TrainState, completions: Completions, difference: Tensor, source: PairSource, args: Args, world: World,
    pad_id: int,
) -> dict[str, Tensor | float]:  # fmt: skip
    """One optimizer step on the pairs, a few at a time; every divisor is that of the whole step."""
    agent, parameters, pairs = state.agent, state.optimizer.parameters, len(difference)
    state.iteration += 1
    stats = torch.zeros(len(STATS), device=agent.device)
    agreed = torch.zeros(pairs, device=agent.device)  # [M]
    grads = [torch.zeros_like(parameter) for parameter in parameters]
    for part in world.parts(torch.arange(pairs, device=agent.device), args.micro_batch // 2):
        few = completions.rows((2 * part.unsqueeze(1) + torch.arange(2, device=agent.device)).flatten())
        chosen, rejected = score(agent, few, pad_id)
        loss = bradley_terry(chosen, rejected, difference[part] if args.margin else 0.0, args.center_coef)
        total = aggregate(loss, mode="sum", denominator=pairs)
        for grad, new in zip(grads, torch.autograd.grad(total, parameters, materialize_grads=True), strict=True):
            grad += new
        agreed[part] = preference_accuracy(chosen.detach(), rejected.detach()).to(agreed)
        numbers = (loss, agreed[part], chosen, rejected)
        stats += torch.stack([aggregate(x.detach(), mode="sum", denominator=pairs) for x in numbers])
    *grads, stats, agreed = world.sum([*grads, stats, agreed])
    source.record(agreed, completions.lengths.view(-1, 2).sum(1))
    grads, norm = clip_grad_norm(grads, args.max_grad_norm)
    learning_rate = args.learning_rate * min(1.0, state.iteration / max(args.warmup, 1))
    state.optimizer.step(grads, torch.tensor(learning_rate))
    metrics = dict(zip(STATS, stats, strict=True))
    return {
        **metrics,
        "rewards/margin": metrics["rewards/chosen"] - metrics["rewards/rejected"],
        "losses/grad_norm": norm,
        "charts/learning_rate": learning_rate,
    }


@torch.no_grad()
def agreement(agent: LanguageModel, held: Preferences, args: Args) -> tuple[np.ndarray, np.ndarray]:
    """Of each held-out pair, whether the scores are the right way round (1, ½, 0), [N], and its tokens."""
    right = torch.zeros(len(held), dtype=torch.float64)
    for index in held.total_lengths.argsort(stable=True).split(args.micro_batch // 2):
        few = held.batch(index).map(lambda x: x.to(agent.device))
        right[index] = preference_accuracy(*score(agent, few, held.pad_id)).double().cpu()
    return right.numpy(), held.lengths.view(-1, 2).sum(1).numpy()


def main(args: Args) -> None:
    world = join_world(args.device)
    pairs, parts = None, []
    with usage_errors(), warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        if args.pairs is not None:
            pairs = read_pairs(args.pairs, args.margin)
    with usage_errors():
        init, generator = torch_generator(args.seed, "init"), torch_generator(args.seed, "prompts")
        agent, tokenizer, stop_ids = load_language_model(
            args.model, args.dtype, args.device, args.lora_rank, value_head=True, generator=init
        )
        if pairs is None:
            task = make_task(**args.task_settings())
            prompts = PromptSource(task, tokenizer, generator, args.max_length, agent.context, stop_ids, world)
            prompts.held_out(1)
            if args.pairs_from == "task":
                pairs = task_pairs(task, args.num_pairs, generator)

        def encode_parts() -> list[Preferences]:
            """The pairs to learn from and those held out."""
            both = hold_out(pairs, args.held_out_pairs, lambda name: read_pairs(name, args.margin))
            limits = (stop_ids[0], args.max_length, agent.context, args.overlong == "cut")
            return [encode(tokenizer, part, *limits) for part in both]

        if pairs is not None:
            parts = encode_parts()
    source = PairSource(args.subject)

    with Run(args, source, lambda state: agreement(state.agent, parts[1], args), world) as run:
        for note in notes:
            run.progress.message(f"note: {note.message}")
        if pairs is None:
            settings = (args.num_pairs, generator, args.pair_samples, args.temperature)
            pairs = kept_pairs(
                run.run_dir / "pairs.jsonl", lambda: sample_pairs(agent, prompts, *settings), world.is_main
            )
            parts = encode_parts()
        for part in parts:
            if part.dropped:
                run.progress.message(f"note: {part.dropped} of {len(part) + part.dropped} pairs are too long, left out")
        state = run.resume_or(lambda: TrainState.create(args, agent, len(parts[0])))
        while state.global_step < args.total_tokens:
            with run.phase("collect"):
                batch = collect(state, parts[0], args)
            with run.phase("update"):
                run.metrics(update(state, *batch, source, args, world, tokenizer.pad_token_id))
            run.end_iteration(state)
        results = run.results(state)
        if world.is_main:
            save_reward_model(agent, run.run_dir / "policy", tokenizer)
            run.finish(results)
    leave_world()


if __name__ == "__main__":
    main(parse_args(Args, PRESETS))
