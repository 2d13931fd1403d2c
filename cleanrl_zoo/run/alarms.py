"""Alarms of language-model training: one plain sentence when a metric says that something is going wrong."""

import math
from collections.abc import Callable, Mapping
from typing import Any

ENTROPY_SHARE = 0.05  # of the first entropy
RUNAWAY_KL = 1.0  # nats per token from the reference
STEP_KL = 0.1  # nats per token within one iteration's update
SAMPLER_KL = 1e-3  # nats per token between what sampled and what is trained
ZERO_GROUPS = 0.5  # share of groups that teach nothing
RISE, FALL = 0.05, 0.05  # reward up and success down since the best success
DISPLACED = 0.5  # nats that chosen completions have lost of their log-prob at its highest

SEEN = ("first_entropy", "best_success", "reward_then", "best_chosen")

Row = Mapping[str, float]


class Alarms:
    """Reads every row of the log. An alarm sounds once when its condition begins, and again after it had ended."""

    def __init__(self) -> None:
        self.first_entropy: float | None = None
        self.best_success = -float("inf")
        self.reward_then = 0.0  # at the best success
        self.best_chosen = -float("inf")
        self.sounding: set[tuple[str, ...]] = set()
        # each reads the metrics that it is named by, and only rows that have them
        self.rules: dict[tuple[str, ...], Callable[[Row], str | None]] = {
            ("losses/entropy",): self._entropy,
            ("losses/ref_kl",): self._kl,
            ("losses/approx_kl",): self._step,
            ("charts/reward_mean", "charts/success"): self._hacking,
            ("charts/zero_std_groups",): self._groups,
            ("losses/sampler_kl",): self._sampler,
            ("rewards/margin", "rewards/chosen_logprob"): self._displacement,
        }

    def state_dict(self) -> dict[str, Any]:
        """What later rows are compared with, as far as it has been seen, and what is sounding; for a checkpoint."""
        values = {name: getattr(self, name) for name in SEEN}
        seen = {name: value for name, value in values.items() if value not in (None, -math.inf)}
        return {"seen": seen, "sounding": sorted(list(tags) for tags in self.sounding)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state_dict()`."""
        for name, value in state["seen"].items():
            setattr(self, name, value)
        self.sounding = {tuple(tags) for tags in state["sounding"]}

    def check(self, row: Row) -> list[str]:
        """The sentences of the alarms that begin with this row."""
        begun = []
        for tags, rule in self.rules.items():
            if not all(tag in row for tag in tags):
                continue
            sentence = rule(row)
            if sentence is not None and tags not in self.sounding:
                begun.append(sentence)
            (self.sounding.discard if sentence is None else self.sounding.add)(tags)
        return begun

    def _entropy(self, row: Row) -> str | None:
        entropy = row["losses/entropy"]
        if self.first_entropy is None:
            self.first_entropy = entropy
        if entropy >= ENTROPY_SHARE * self.first_entropy:
            return None
        return (
            f"the entropy fell from {self.first_entropy:.3g} to {entropy:.3g} nats: samples hardly differ any more, so "
            "little is left to learn from"
        )

    def _kl(self, row: Row) -> str | None:
        kl = row["losses/ref_kl"]
        if kl <= RUNAWAY_KL:
            return None
        return f"the policy is {kl:.3g} nats per token away from the reference: it may have lost what it knew"

    def _step(self, row: Row) -> str | None:
        kl = row["losses/approx_kl"]
        if kl <= STEP_KL:
            return None
        return f"one update moved the policy by {kl:.3g} nats per token: the learning rate is too high for this batch"

    def _hacking(self, row: Row) -> str | None:
        reward, success = row["charts/reward_mean"], row["charts/success"]
        if success >= self.best_success:
            self.best_success, self.reward_then = success, reward
        if success > self.best_success - FALL or reward < self.reward_then + RISE:
            return None
        return (
            f"the reward rose to {reward:.3g} while success fell from {self.best_success:.3g} to {success:.3g}: the "
            "policy is finding reward without solving the task"
        )

    def _groups(self, row: Row) -> str | None:
        share = row["charts/zero_std_groups"]
        if share <= ZERO_GROUPS:
            return None
        return (
            f"{share:.0%} of the groups have equal rewards: the prompts are too easy or too hard, and a comparison "
            "within the group has nothing to learn from"
        )

    def _sampler(self, row: Row) -> str | None:
        kl = row["losses/sampler_kl"]
        if kl <= SAMPLER_KL:
            return None
        return f"sampler and trainer are {kl:.3g} nats per token apart: use an --off-policy correction or one dtype"

    def _displacement(self, row: Row) -> str | None:
        chosen = row["rewards/chosen_logprob"]
        self.best_chosen = max(self.best_chosen, chosen)
        if row["rewards/margin"] <= 0 or chosen >= self.best_chosen - DISPLACED:
            return None
        return (
            f"the chosen completions became less likely, log-prob {self.best_chosen:.3g} to {chosen:.3g} nats, while "
            "the margin grew: likelihood moves to what is in neither list"
        )
