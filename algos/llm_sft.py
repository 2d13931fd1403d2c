"""Supervised fine-tuning of a language model: maximum likelihood of given completions.

Ouyang et al. (2022), "Training language models to follow instructions with human feedback", arXiv:2203.02155, section
3.5, the first of its three steps.

    L = −1/N Σ_i Σ_t log π_θ(y_it | x_i, y_i,<t)        N the completion tokens of the batch; prompts are not learned

Deviations from the paper, each with its reason:

 1. The learning rate rises linearly over the first steps and falls along a cosine to zero: the usual schedule today.
 2. The mean is over all tokens of the optimizer step, however it is cut into micro-batches.
 3. A completion ends with the model's stop token, which is learned as well, or the model would not know when to stop.

The demonstrations are the task's own (`--noise` of them with a random answer of the right form, which leaves something
for reinforcement learning), or, with `--prompts`, the rows of a JSONL file with `prompt` and `completion`.

Run:    python algos/llm_sft.py --task addition --noise 0.5
Expect: 0.180 on held-out sums, sampled, after 350,000 tokens, in a minute and a quarter on one core (seed 1).
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cleanrl_zoo.core import aggregate
from cleanrl_zoo.llm import Completions, LanguageModel, PromptSource, load_language_model, make_task
from cleanrl_zoo.llm.evaluation import evaluate_held_out, sample_table, write_samples
from cleanrl_zoo.nn import Adam, clip_grad_norm
from cleanrl_zoo.run import LanguageArgs, Run, parse_args, torch_generator, usage_errors
from cleanrl_zoo.run.arguments import check
from cleanrl_zoo.run.distributed import World, join_world, leave_world
from cleanrl_zoo.run.seeding import stream_seed


@dataclass
class Args(LanguageArgs):
    """Supervised fine-tuning of a language model."""

    noise: float = 0.0
    """share of the demonstrations whose answer is replaced by a random one of the same form"""
    temperature: float = 1.0
    """of the completions that an evaluation samples; the loss is that of the model as it is"""
    total_tokens: int = 350_000
    """completion tokens of the whole run; the last step may go beyond"""
    batch_size: int = 64
    """demonstrations of one optimizer step"""
    micro_batch: int = 128
    """sequences that go through the model at once; changes memory and time, not the gradient"""
    learning_rate: float = 1e-3
    """Adam's, at its highest"""
    warmup: float = 0.05
    """share of the run over which the learning rate rises"""
    max_grad_norm: float = 1.0
    """norm to which the gradient is clipped"""
    width: int = 64
    """of --model tiny"""
    layers: int = 3
    """of --model tiny"""
    heads: int = 4
    """of --model tiny"""

    def check(self) -> None:
        super().check()
        check(self, "batch_size", "width", "layers", "heads", at_least=1)
        check(self, "learning_rate", "max_grad_norm", above=0)
        check(self, "noise", "warmup", at_least=0, at_most=1)
        if self.width % (2 * self.heads):
            raise ValueError(f"--width {self.width}: must be a multiple of 2 × --heads {self.heads}")


PRESETS = {
    "debug": {"total_tokens": 512, "batch_size": 16, "eval_episodes": 8, "checkpoint_every": 256, "log_every": 128},
}  # fmt: skip


@dataclass
class TrainState:
    """All that changes during training; a checkpoint is this, the source of prompts and the log's position."""

    agent: LanguageModel
    optimizer: Adam
    demonstration_generator: torch.Generator
    global_step: int = 0  # completion tokens learned from
    iteration: int = 0

    @classmethod
    def create(cls, args: Args, agent: LanguageModel) -> "TrainState":
        return cls(agent, Adam(agent.trainable()), torch_generator(args.seed, "minibatch"))


def collect(state: TrainState, source: PromptSource, args: Args) -> Completions:
    """The next demonstrations, encoded: prompts padded on the left, completions with their stop token on the right."""
    return source.encode_demonstrations(
        source.task.demonstrations(args.batch_size, state.demonstration_generator, args.noise)
    )


def update(state: TrainState, batch: Completions, args: Args, world: World) -> dict[str, Tensor | float]:
    """One optimizer step on the demonstrations, a few at a time; every divisor is that of the whole step."""
    agent, parameters = state.agent, state.optimizer.parameters
    done = state.global_step / args.total_tokens
    rise = min(1.0, (done + 1 / max(args.total_tokens, 1)) / args.warmup) if args.warmup else 1.0
    learning_rate = args.learning_rate * rise * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    tokens = batch.mask.sum()
    stats = torch.zeros(2, device=batch.mask.device)
    grads = [torch.zeros_like(parameter) for parameter in parameters]
    for part in world.parts(torch.arange(len(batch.ids)), args.micro_batch):
        few = batch.rows(part)
        out = agent.completion(few.tokens, few.attention_mask, few.mask, entropy=True)
        loss = aggregate(-out.logprob, few.mask, "token_mean", tokens)
        for grad, new in zip(grads, torch.autograd.grad(loss, parameters, materialize_grads=True), strict=True):
            grad += new
        stats += torch.stack([loss.detach(), aggregate(out.entropy.detach(), few.mask, "token_mean", tokens)])
    *grads, stats = world.sum([*grads, stats])
    grads, norm = clip_grad_norm(grads, args.max_grad_norm)
    state.optimizer.step(grads, torch.tensor(learning_rate))
    state.global_step += int(tokens)
    state.iteration += 1
    return {
        "losses/policy_loss": stats[0],
        "losses/entropy": stats[1],
        "losses/grad_norm": norm,
        "charts/learning_rate": learning_rate,
    }


def main(args: Args) -> None:
    world = join_world(args.device)
    with usage_errors():
        task = make_task(**args.task_settings())
        sizes = {"width": args.width, "layers": args.layers, "heads": args.heads} if args.model == "tiny" else {}
        agent, tokenizer, stop_ids = load_language_model(
            args.model, args.dtype, args.device, args.lora_rank, generator=torch_generator(args.seed, "init"), **sizes
        )
        generator = torch_generator(args.seed, "prompts")
        source = PromptSource(task, tokenizer, generator, args.max_length, agent.context, stop_ids, world)
        source.encode_demonstrations(task.demonstrations(1, torch_generator(args.seed, "minibatch"), args.noise))

    def evaluate(state: TrainState) -> tuple[np.ndarray, np.ndarray]:
        """Rewards and lengths of sampled completions of held-out prompts."""
        state.agent.eval()
        held_out = evaluate_held_out(
            state.agent, source, args.eval_episodes, stream_seed(args.seed, "evaluation"), args.temperature, args.top_p
        )
        state.agent.train()
        if args.show_samples:
            run.progress.message(sample_table(held_out, task.reward_names, args.show_samples))
            write_samples(run.run_dir / "samples", state.global_step, held_out, task.reward_names, args.show_samples)
        return held_out.results()

    with Run(args, source, evaluate, world) as run:
        state = run.resume_or(lambda: TrainState.create(args, agent))
        agent.train()  # dropout, where the model has it
        while state.global_step < args.total_tokens:
            with run.phase("collect"):
                batch = collect(state, source, args)
            with run.phase("update"):
                run.metrics(update(state, batch, args, world))
            run.end_iteration(state)
        results = run.results(state)
        if world.is_main:
            agent.save(run.run_dir / "policy", tokenizer)
            run.finish(results)
    leave_world()


if __name__ == "__main__":
    main(parse_args(Args, PRESETS))
