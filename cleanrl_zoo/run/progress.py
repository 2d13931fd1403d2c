"""The progress line: live on a terminal, a plain line now and then otherwise."""

import shutil
import sys
import time


def duration(seconds: float) -> str:
    """`3h05m`, `4m10s` or `12s`."""
    seconds = int(seconds)
    if seconds >= 3600:
        return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
    return f"{seconds // 60}m{seconds % 60:02d}s" if seconds >= 60 else f"{seconds}s"


class Progress:
    """Writes `name  12,288/1,000,000  return 231.5  9,800 steps/s  1m40s left` to stderr.

    On a terminal the line is rewritten in place at most five times a second; elsewhere a new line comes every
    `plain_seconds`, so that a log file is not flooded.
    """

    def __init__(self, name: str, total_steps: int, first_step: int = 0, plain_seconds: float = 30.0) -> None:
        self.name, self.total, self.first = name, total_steps, first_step
        self.live = sys.stderr.isatty()
        self.every = 0.2 if self.live else plain_seconds
        self.started = self.written = time.perf_counter()

    def steps_per_second(self, step: int) -> float:
        """Mean rate since this process began training."""
        return (step - self.first) / max(time.perf_counter() - self.started, 1e-9)

    def update(self, step: int, recent_return: float | None) -> None:
        """Writes the line when it is due; `recent_return` is the mean of the last episodes, None before the first."""
        now = time.perf_counter()
        if now - self.written < self.every:
            return
        self.written = now
        rate = self.steps_per_second(step)
        shown = "-" if recent_return is None else f"{recent_return:,.1f}"
        left = duration(max(self.total - step, 0) / max(rate, 1e-9))
        self._write(f"{self.name}  {step:,}/{self.total:,}  return {shown}  {rate:,.0f} steps/s  {left} left")

    def message(self, text: str) -> None:
        """Writes a line that stays."""
        if self.live:
            sys.stderr.write("\r\033[K")
        sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def _write(self, text: str) -> None:
        if self.live:
            width = shutil.get_terminal_size().columns - 1
            sys.stderr.write("\r\033[K" + text[:width])
        else:
            sys.stderr.write(text + "\n")
        sys.stderr.flush()
