"""Where prompts come from and completions are judged: to a language model what environments are to a policy."""

from importlib import metadata
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from cleanrl_zoo.llm.models import LanguageModel
from cleanrl_zoo.llm.sampler import Completions, sample
from cleanrl_zoo.llm.tasks import Example, Prompt, RewardError, Task
from cleanrl_zoo.llm.tokenizer import decode, encode_prompts, pad_left, pad_right


class PromptError(ValueError):
    """A prompt that does not fit into the model's context; the message is one line."""


class Ranks(Protocol):
    """The processes that train together, each of which samples its share of the prompts."""

    def slice(self, rows: int) -> slice: ...

    def gather(self, tensor: Tensor) -> Tensor: ...


class PromptSource:
    """Draws prompts, encodes them, scores completions and counts these as episodes: reward as return, tokens as length.

    Args:
        task: gives prompts and judges texts.
        tokenizer: the model's.
        generator: of the training prompts; its state is the source's whole state.
        max_length: tokens of a completion; 0: the task's own number.
        context: tokens that prompt and completion may have together.
        stop_ids: tokens that end a completion.
        ranks: the processes that train together.
        weights: of the task's rewards in the total, [K]; all 1 by default.
    """

    exact_state = True
    max_episode_steps = None
    cut_episodes = 0
    engine = "transformers"
    errors = (RewardError, PromptError)  # end a run with one line and its last checkpoint

    def __init__(
        self,
        task: Task,
        tokenizer: Any,
        generator: torch.Generator,
        max_length: int,
        context: int,
        stop_ids: tuple[int, ...],
        ranks: Ranks,
        weights: tuple[float, ...] = (),
    ) -> None:
        self.task, self.tokenizer, self.generator, self.context = task, tokenizer, generator, context
        self.stop_ids, self.ranks = stop_ids, ranks
        self.max_length = max_length or task.max_length
        if weights and len(weights) != len(task.reward_names):
            names = ", ".join(task.reward_names)
            raise ValueError(
                f"--reward-weights has {len(weights)} numbers; the task's rewards are {names}: give one each"
            )
        self.weights = torch.tensor(weights or [1.0] * len(task.reward_names), dtype=torch.float64)  # [K]
        self._episodes: list[tuple[float, int]] = []

    @property
    def env_id(self) -> str:
        return self.task.name

    def versions(self) -> dict[str, str]:
        """Versions of the libraries that decide what is sampled."""
        return {name: metadata.version(name) for name in ("transformers", "tokenizers")}

    def draw(self, count: int) -> tuple[list[Example], Tensor, Tensor]:
        """`count` training prompts, their ids [count, P] and mask [count, P], padded on the left."""
        examples = self.task.draw(count, self.generator)
        return examples, *self.encode(examples)

    def held_out(self, count: int) -> tuple[list[Example], Tensor, Tensor]:
        """The first `count` held-out prompts, as `draw` gives them."""
        examples = self.task.held_out(count)
        return examples, *self.encode(examples)

    def encode(self, examples: list[Example]) -> tuple[Tensor, Tensor]:
        """Ids and mask of the prompts, [B, P], padded on the left.

        Raises:
            PromptError: for a prompt that leaves no room for a completion.
        """
        rows = encode_prompts(self.tokenizer, [example.prompt for example in examples])
        longest = max(range(len(rows)), key=lambda index: len(rows[index]))
        if len(rows[longest]) + self.max_length > self.context:
            raise PromptError(
                f"the prompt {str(examples[longest].prompt)[:40]!r} has {len(rows[longest])} tokens; with --max-length "
                f"{self.max_length} that is more than the model's context of {self.context}: shorten either"
            )
        return pad_left(rows, self.tokenizer.pad_token_id)

    def encode_demonstrations(self, pairs: list[tuple[Prompt, str]]) -> Completions:
        """Prompts with given completions, each ended by the stop token; one that is too long is cut, without one.

        Raises:
            PromptError: for a prompt that leaves no room for a completion.
        """
        prompt_ids, prompt_mask = self.encode([Example(prompt) for prompt, _ in pairs])
        texts = self.tokenizer([text for _, text in pairs], add_special_tokens=False)["input_ids"]
        rows = [[*ids, self.stop_ids[0]] for ids in texts]
        truncated = torch.tensor([len(row) > self.max_length for row in rows])
        ids, mask = pad_right([row[: self.max_length] for row in rows], self.tokenizer.pad_token_id)
        return Completions(prompt_ids, prompt_mask, ids, mask, torch.zeros(ids.shape), truncated)

    def texts(self, completions: Completions) -> list[str]:
        """What the model wrote, without stop tokens and padding."""
        return decode(self.tokenizer, completions.ids, completions.mask)

    def score(self, examples: list[Example], completions: Completions, group_size: int = 1) -> Tensor:
        """Rewards [B, K] in float64, B = `group_size` completions for each of the examples in turn; NaN: unscorable.

        Raises:
            RewardError: when a reward function raises.
        """
        repeated = [example for example in examples for _ in range(group_size)]
        return torch.from_numpy(np.asarray(self.task.score(repeated, self.texts(completions)), dtype=np.float64))

    def complete(
        self, model: LanguageModel, examples: list[Example], prompt_ids: Tensor, prompt_mask: Tensor, noise: Tensor,
        temperature: float = 1.0, top_p: float = 1.0,
    ) -> tuple[Completions, Tensor]:  # fmt: skip
        """Samples and scores a group of G completions for each of P prompts: completions [P·G, L], rewards [P, G, K].

        noise: uniform, [P, G, L]. Every rank samples and scores its share of the prompts and gets the whole.
        """
        prompts, group_size, width = noise.shape
        share, device = self.ranks.slice(prompts), model.device
        mine = sample(
            model, prompt_ids[share].to(device), prompt_mask[share].to(device), group_size, width, self.stop_ids,
            self.tokenizer.pad_token_id, noise[share].flatten(0, 1).to(device), temperature, top_p,
        )  # fmt: skip
        rewards = self.score(examples[share], mine, group_size)
        completions = mine.widen(width, self.tokenizer.pad_token_id).map(self.ranks.gather)
        return completions, self.ranks.gather(rewards.to(device)).cpu().view(prompts, group_size, -1)

    def total(self, rewards: Tensor) -> Tensor:
        """The weighted sum [...] of the components [..., K]."""
        return rewards @ self.weights.to(rewards.device)

    def record(self, rewards: Tensor, lengths: Tensor) -> None:
        """Counts completions as episodes: total rewards [B] and lengths [B]. Unscorable ones do not count."""
        pairs = zip(rewards.tolist(), lengths.tolist(), strict=True)
        self._episodes += [(reward, length) for reward, length in pairs if reward == reward]

    def pop_episodes(self) -> list[tuple[float, int]]:
        """The completions recorded since the last call: (reward, tokens)."""
        episodes, self._episodes = self._episodes, []
        return episodes

    def state_dict(self) -> dict[str, Tensor]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.generator.set_state(state["generator"])

    def close(self) -> None:
        """Nothing is held open."""
