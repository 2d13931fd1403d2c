"""Held-out rewards of a language model, and a table of what it wrote."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cleanrl_zoo.core.reduce import masked_mean, masked_std
from cleanrl_zoo.llm.models import LanguageModel
from cleanrl_zoo.llm.sampler import Completions, sample
from cleanrl_zoo.llm.source import PromptSource
from cleanrl_zoo.llm.tasks import Example, RewardError


@dataclass
class HeldOut:
    """One evaluation: a sampled completion for each held-out prompt."""

    examples: list[Example]
    texts: list[str]
    rewards: Tensor  # [B, K], NaN: unscorable
    total: Tensor  # [B]
    lengths: Tensor  # [B] tokens

    def results(self) -> tuple[np.ndarray, np.ndarray]:
        """Total rewards and lengths of the completions that could be scored.

        Raises:
            RewardError: when none could.
        """
        scored = ~self.total.isnan()
        if not scored.any():
            raise RewardError(f"none of {len(self.texts)} held-out completions could be scored")
        return self.total[scored].numpy(), self.lengths[scored].numpy()


def evaluate_held_out(
    model: LanguageModel,
    source: PromptSource,
    count: int,
    seed: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    batch: int = 256,
) -> HeldOut:
    """Samples one completion for each of the first `count` held-out prompts and scores it; temperature 0: greedy.

    The draws come from `seed` alone, the same at every evaluation, so that two evaluations differ by the model.
    """
    examples, prompt_ids, prompt_mask = source.held_out(count)
    noise = torch.rand(len(examples), source.max_length, generator=torch.Generator().manual_seed(seed))  # [B, L]
    texts, rewards, lengths = [], [], []
    for start in range(0, len(examples), batch):
        rows = slice(start, start + batch)
        completions = sample(
            model, prompt_ids[rows].to(model.device), prompt_mask[rows].to(model.device), 1, source.max_length,
            source.stop_ids, source.tokenizer.pad_token_id, noise[rows].to(model.device), temperature, top_p,
        )  # fmt: skip
        texts += source.texts(completions)
        rewards.append(source.score(examples[rows], completions))
        lengths.append(completions.lengths.cpu())
    scores = torch.cat(rewards)
    return HeldOut(examples, texts, scores, source.total(scores), torch.cat(lengths))


def describe_completions(
    completions: Completions, rewards: Tensor, total: Tensor, names: tuple[str, ...]
) -> dict[str, Tensor]:
    """What sampled completions were like, by the names of run/metrics.py.

    rewards: [B, K], the first of which verifies the answer; NaN: unscorable. total: [B], what is learned from.
    """
    scored, judged = ~total.isnan(), ~rewards.isnan().any(-1)  # [B]
    known, first = total.nan_to_num(0.0), rewards[:, 0].nan_to_num(0.0)  # [B]
    right = judged & (first == torch.where(judged, first, -torch.inf).amax())
    lengths = completions.lengths.to(known)
    components = {f"rewards/{name}": masked_mean(rewards[:, k].nan_to_num(0.0), judged) for k, name in enumerate(names)}
    return {
        **components,
        "charts/reward_mean": masked_mean(known, scored),
        "charts/reward_std": masked_std(known, scored),
        "charts/success": masked_mean(first, judged),
        "charts/completion_length": lengths.mean(),
        "charts/completion_length_max": lengths.max(),
        "charts/length_right": masked_mean(lengths, right),
        "charts/length_wrong": masked_mean(lengths, judged & ~right),
        "charts/truncated_frac": completions.truncated.to(known).mean(),
        "charts/unscorable": (~scored).to(known).sum(),
    }


def sample_table(held_out: HeldOut, names: tuple[str, ...], count: int, width: int = 100) -> str:
    """The first `count` completions as lines: rewards, prompt, completion."""
    lines = []
    for index in range(min(count, len(held_out.texts))):
        scores = "  ".join(
            f"{name} {score:.3g}" for name, score in zip(names, held_out.rewards[index].tolist(), strict=True)
        )
        prompt, text = _shown(held_out.examples[index].prompt), held_out.texts[index]
        lines.append(f"  {scores}  {json.dumps(prompt, ensure_ascii=False)[-width // 2:]} → "
                     f"{json.dumps(text, ensure_ascii=False)[:width]}")  # fmt: skip
    return "\n".join(lines)


def write_samples(folder: Path, step: int, held_out: HeldOut, names: tuple[str, ...], count: int) -> None:
    """The first `count` completions as `folder`/step_<step>.jsonl, written to a temporary name and renamed."""
    rows = [
        {
            "prompt": example.prompt,
            "completion": text,
            "rewards": {n: None if math.isnan(x) else x for n, x in zip(names, scores, strict=True)},  # JSON has no NaN
        }
        for example, text, scores in zip(held_out.examples, held_out.texts, held_out.rewards.tolist(), strict=True)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step:012d}.jsonl"
    temporary = path.with_name(f".writing-{path.name}")
    temporary.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows[:count]))
    temporary.rename(path)


def _shown(prompt: str | list[dict]) -> str:
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]
