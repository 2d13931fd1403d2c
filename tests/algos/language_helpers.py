"""Helpers of the tests of language-model files: small models and batches, gradients without an optimizer, rewards."""

import json
import math
import os
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from algo_helpers import ROOT, final_checkpoint, rows_without_clock
from torch import Tensor

from cleanrl_zoo.llm import Completions, LanguageModel, PromptSource, load_language_model, make_task
from cleanrl_zoo.llm.models import CompletionOutput
from cleanrl_zoo.run import parse_args
from cleanrl_zoo.run.distributed import World

DEBUG = ("--preset", "debug")
SIZES = {"width": 16, "layers": 1, "heads": 2}
LANGUAGE_FILES = sorted(path.stem for path in (ROOT / "algos").glob("*.py") if "(LanguageArgs)" in path.read_text())


# Rewards for --reward language_helpers:NAME: a model with random weights gets some of each from the start


def ascii_share(prompt, completion, **columns):
    """Share of the characters that are ASCII: what half of all bytes are."""
    return sum(character < "\x80" for character in completion) / len(completion) if completion else 0.0


def all_alike(prompt, completion, **columns):
    return 0.5


def ascii_or_nothing(prompt, completion, **columns):
    """`ascii_share`, but no number for a completion that begins with a letter of the second half of ASCII."""
    return None if "@" <= completion[:1] < "\x80" else ascii_share(prompt, completion)


# Models and batches


def flags(module: ModuleType, *words: Any) -> Any:
    """The checked flags of `--preset debug` and `words`."""
    return parse_args(module.Args, module.PRESETS, [*DEBUG, *map(str, words)], getattr(module, "VARIANTS", None))


def tiny(lora_rank: int = 0, seed: int = 0, **settings: Any) -> tuple[LanguageModel, Any, tuple[int, ...]]:
    """A model of one layer and width 16, its tokenizer and its stop tokens."""
    generator = torch.Generator().manual_seed(seed)
    return load_language_model("tiny", lora_rank=lora_rank, generator=generator, **{**SIZES, **settings})


def tiny_with_dropout(lora_rank: int = 0) -> tuple[LanguageModel, Any, tuple[int, ...]]:
    """`tiny` with half of the attention dropped in train mode, and with LoRA an adapter that is not zero."""
    agent, tokenizer, stop_ids = tiny(lora_rank)
    agent.config.attention_dropout = 0.5
    for module in agent.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    with torch.no_grad():
        for name, weight in agent.named_parameters():
            if "lora_B" in name:
                weight.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(0))
    return agent, tokenizer, stop_ids


def prompt_source(
    tokenizer: Any, stop_ids: tuple[int, ...], reward: str | None = None, **settings: Any
) -> PromptSource:
    """Addition, judged by a function of this file where `reward` names one."""
    task = make_task("addition", reward=None if reward is None else f"language_helpers:{reward}")
    settings = {"max_length": 0, "context": 256, "ranks": World(), **settings}
    return PromptSource(task, tokenizer, torch.Generator().manual_seed(1), stop_ids=stop_ids, **settings)


def uneven(count: int = 6, dtype: torch.dtype = torch.float64) -> Completions:
    """Completions of 1 to 4 tokens after prompts of 2 to 4, with log-probs that some sampler may have had."""
    generator = torch.Generator().manual_seed(3)
    lengths, prompts = torch.arange(count) % 4 + 1, torch.arange(count) % 3 + 2
    mask = torch.arange(4) < lengths.unsqueeze(1)
    prompt_mask = torch.arange(4) >= 4 - prompts.unsqueeze(1)
    prompt_ids, ids = (torch.randint(256, (count, 4), generator=generator) for _ in range(2))
    logprob = torch.where(mask, -5 - torch.rand(count, 4, generator=generator, dtype=dtype), 0.0)
    return Completions(prompt_ids, prompt_mask, ids, mask, logprob, torch.zeros(count, dtype=torch.bool))


def padded(rows: list[list[float]]) -> Tensor:
    """Rows of different lengths as a matrix in float64, with zeros behind them."""
    width = max(map(len, rows))
    return torch.tensor([row + [0.0] * (width - len(row)) for row in rows], dtype=torch.float64)


class LogprobTable:
    """In place of a language model: its parameters are the log-probs [B, L] themselves; a prompt is its row's number.

    The entropy is taken for minus the log-prob.
    """

    device = torch.device("cpu")

    def __init__(self, logprob: Tensor) -> None:
        self.logprob = logprob.clone().requires_grad_()

    def trainable(self) -> list[Tensor]:
        return [self.logprob]

    def completion(self, tokens, attention_mask, mask, temperature=1.0, entropy=False, value=False, entropy_share=1.0):
        logprob = torch.where(mask, self.logprob[tokens[:, 0], : mask.shape[1]], 0.0)
        return CompletionOutput(logprob, -logprob if entropy else None, clamped_entropy=-2 * logprob)

    def rows_of(self, mask: Tensor) -> Completions:
        """One completion for each row, with the tokens that `mask` [B, L] says."""
        rows = torch.arange(len(mask)).unsqueeze(1)
        ids, zeros = torch.full(mask.shape, 65), torch.zeros(mask.shape, dtype=self.logprob.dtype)
        return Completions(rows, torch.ones_like(rows, dtype=torch.bool), ids, mask, zeros, mask[:, -1].clone())


class Recorder:
    """In place of the optimizer: keeps the gradients and leaves the parameters alone."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.parameters, self.grads = list(parameters), []

    def step(self, grads, learning_rate):
        self.grads = [grad.clone() for grad in grads]


class Half(World):
    """One of two ranks, whose sum is left to the test."""

    def sum(self, tensors):
        return list(tensors)

    def gather(self, tensor):
        return tensor


# Runs


def environment() -> dict[str, str]:
    """Of a process that finds this package, and this module for its rewards."""
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests/algos")))
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def cut_short(whole: Path, cut: Path) -> None:
    """Copies the run `whole` to `cut` as if killed after its last checkpoint but one, while it wrote the next row."""
    shutil.copytree(whole, cut)
    (cut / "summary.json").unlink()
    shutil.rmtree(cut / "policy")
    shutil.rmtree(sorted((cut / "checkpoints").iterdir())[-1])
    with open(cut / "metrics.jsonl", "a") as log:
        log.write('{"global_step": ')


def assert_same_run(first: Path, second: Path) -> None:
    """Log, parameters, optimizer, generators, evaluation, samples and the saved model are bit-equal."""
    assert rows_without_clock(first) == rows_without_clock(second)
    one, two = final_checkpoint(first), final_checkpoint(second)
    assert one.keys() == two.keys()
    assert [key for key in one if repr(one[key]) != repr(two[key])] == []
    summaries = [json.loads((run_dir / "summary.json").read_text()) for run_dir in (first, second)]
    for summary in summaries:
        del summary["wall_clock_s"], summary["steps_per_second"]
    assert summaries[0] == summaries[1]
    for folder in ("policy", "samples"):
        files = [
            {path.name: path.read_bytes() for path in sorted((run_dir / folder).glob("*"))}
            for run_dir in (first, second)
        ]
        assert files[0] == files[1], folder


def is_defined(tag: str) -> bool:
    """Whether run/metrics.py says what the tag means."""
    from cleanrl_zoo.run.metrics import METRICS, REWARDS

    return tag == "global_step" or tag in METRICS or tag.startswith(REWARDS)


def assert_finite(row: dict[str, float]) -> None:
    assert [tag for tag, value in row.items() if not math.isfinite(value)] == []
