"""Alarms of language-model training: one plain sentence when a metric says that something is going wrong."""

from collections.abc import Callable, Mapping

ENTROPY_SHARE = 0.05  # of the first entropy
RUNAWAY_KL = 1.0  # nats per token from the reference
STEP_KL = 0.1  # nats per token within one iteration's update
SAMPLER_KL = 1e-3  # nats per token between what sampled and what is trained
ZERO_GROUPS = 0.5  # share of groups that teach nothing
RISE, FALL = 0.05, 0.05  # reward up and success down since the best success

Row = Mapping[str, float]


class Alarms:
    """Reads every row of the log. An alarm sounds once when its condition begins, and again after it had ended."""

    def __init__(self) -> None:
        self.first_entropy: float | None = None
        self.best_success = -float("inf")
        self.reward_then = 0.0  # at the best success
        self.sounding: set[str] = set()
        self.rules: dict[str, Callable[[Row], str | None]] = {
            "entropy": self._entropy,
            "kl": self._kl,
            "step": self._step,
            "hacking": self._hacking,
            "groups": self._groups,
            "sampler": self._sampler,
        }

    def check(self, row: Row) -> list[str]:
        """The sentences of the alarms that begin with this row."""
        begun = []
        for name, rule in self.rules.items():
            sentence = rule(row)
            if sentence is not None and name not in self.sounding:
                begun.append(sentence)
            (self.sounding.discard if sentence is None else self.sounding.add)(name)
        return begun

    def _entropy(self, row: Row) -> str | None:
        entropy = row.get("losses/entropy")
        if entropy is None:
            return None
        if self.first_entropy is None:
            self.first_entropy = entropy
        if entropy >= ENTROPY_SHARE * self.first_entropy:
            return None
        return (
            f"the entropy fell from {self.first_entropy:.3g} to {entropy:.3g} nats: samples hardly differ any more, so "
            "little is left to learn from"
        )

    def _kl(self, row: Row) -> str | None:
        kl = row.get("losses/ref_kl")
        if kl is None or kl <= RUNAWAY_KL:
            return None
        return f"the policy is {kl:.3g} nats per token away from the reference: it may have lost what it knew"

    def _step(self, row: Row) -> str | None:
        kl = row.get("losses/approx_kl")
        if kl is None or kl <= STEP_KL:
            return None
        return f"one update moved the policy by {kl:.3g} nats per token: the learning rate is too high for this batch"

    def _hacking(self, row: Row) -> str | None:
        reward, success = row.get("charts/reward_mean"), row.get("charts/success")
        if reward is None or success is None:
            return None
        if success >= self.best_success:
            self.best_success, self.reward_then = success, reward
        if success > self.best_success - FALL or reward < self.reward_then + RISE:
            return None
        return (
            f"the reward rose to {reward:.3g} while success fell from {self.best_success:.3g} to {success:.3g}: the "
            "policy is finding reward without solving the task"
        )

    def _groups(self, row: Row) -> str | None:
        share = row.get("charts/zero_std_groups")
        if share is None or share <= ZERO_GROUPS:
            return None
        return f"{share:.0%} of the groups have equal rewards and teach nothing: the prompts are too easy or too hard"

    def _sampler(self, row: Row) -> str | None:
        kl = row.get("losses/sampler_kl")
        if kl is None or kl <= SAMPLER_KL:
            return None
        return f"sampler and trainer are {kl:.3g} nats per token apart: use an --off-policy correction or one dtype"
