"""The flags that the files share which learn tables, many independent runs side by side."""

from dataclasses import dataclass
from typing import Literal

from cleanrl_zoo.run.arguments import EnvArgs, check


@dataclass
class TableArgs(EnvArgs):
    """Flags of every file that learns a table per run."""

    env: str = "textbook/WindyGridworld-v0"
    """Gymnasium's name of an environment with discrete observations and actions"""
    num_envs: int = 10
    """independent runs side by side (R), each with its own environment and table; the first is evaluated and saved"""
    vec: Literal["auto", "gymnasium", "tabular"] = "auto"
    """engine: Gymnasium's vector environment, or as arrays where the exact model is known, which auto prefers"""
    total_timesteps: int = 100_000
    """environment steps, all runs together"""
    compile: bool = False
    """changes nothing: nothing here is compiled"""
    gamma: float = 1.0
    """discount factor"""
    render: bool = False
    """print values and policy of the first run at the end"""

    def check(self) -> None:
        """As `RunArgs.check`."""
        super().check()
        self.compile = False  # so that no compiling is told of
        check(self, "gamma", at_least=0, at_most=1)
        if self.device != "cpu":
            raise ValueError(f"--device {self.device}: tables are updated on the cpu; allowed is cpu")
