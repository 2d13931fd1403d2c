"""The progress line: live on a terminal, a plain line now and then otherwise."""

import contextlib
import shutil
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass


def duration(seconds: float) -> str:
    """`3h05m`, `4m10s` or `12s`."""
    seconds = int(seconds)
    if seconds >= 3600:
        return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
    return f"{seconds // 60}m{seconds % 60:02d}s" if seconds >= 60 else f"{seconds}s"


@dataclass(frozen=True)
class Words:
    """What a run counts and is judged by, in the words of its field."""

    unit: str  # of `global_step`
    score: str
    episodes: str
    evaluation: str
    digits: int  # of a score, behind the point

    def number(self, score: float) -> str:
        """A score as it is shown."""
        return f"{score:,.{self.digits}f}"


CONTROL = Words("steps", "return", "training episodes", "final deterministic evaluation", 1)
LANGUAGE = Words("tokens", "reward", "training completions", "held-out prompts, sampled", 3)


class Progress:
    """Writes `12,288/1,000,000  return 231.5  9,800 steps/s  1m40s left  ppo_continuous Hopper-v4 seed 1` to stderr.

    On a terminal the line is rewritten in place at most five times a second, and the end of it is left out where the
    terminal is narrow; elsewhere a new line comes every `plain_seconds`, so that a log file is not flooded. The rate is
    that since the first iteration, which compiles.
    """

    def __init__(
        self,
        name: str,
        total_steps: int,
        first_step: int = 0,
        words: Words = CONTROL,
        plain_seconds: float = 30.0,
        silent: bool = False,
    ) -> None:
        self.name, self.total, self.words, self.silent = name, total_steps, words, silent
        self.live = sys.stderr.isatty()
        self.every = 0.2 if self.live else plain_seconds
        self.started = self.written = time.perf_counter()
        self._base = (first_step, self.started)
        self._warm = False

    def steps_per_second(self, step: int) -> float:
        """Mean rate of this process since its first iteration (during that one: since its start)."""
        first, since = self._base
        return (step - first) / max(time.perf_counter() - since, 1e-9)

    def update(self, step: int, returns: Collection[float]) -> None:
        """Writes the line when it is due, with the mean of the last episodes' `returns`."""
        now = time.perf_counter()
        if not self._warm:
            self._base, self._warm = (step, now), True
            return
        if now - self.written < self.every:
            return
        self.written = now
        rate = self.steps_per_second(step)
        shown = self.words.number(sum(returns) / len(returns)) if returns else "-"
        left = duration(max(self.total - step, 0) / max(rate, 1e-9))
        parts = [
            f"{step:,}/{self.total:,}",
            f"{self.words.score} {shown}",
            f"{rate:,.0f} {self.words.unit}/s",
            f"{left} left",
            self.name,
        ]
        if self.live:
            width = shutil.get_terminal_size().columns - 1
            while len(parts) > 1 and len("  ".join(parts)) > width:
                parts.pop()
            self._write("\r\033[K" + "  ".join(parts)[:width])
        else:
            self._write("  ".join(parts) + "\n")

    def message(self, text: str) -> None:
        """Writes a line that stays."""
        self._write(("\r\033[K" if self.live else "") + text + "\n")

    def _write(self, text: str) -> None:
        if self.silent:
            return
        with contextlib.suppress(OSError):  # nobody reads any more (`| head`): no reason to stop training
            sys.stderr.write(text)
            sys.stderr.flush()
