"""The run around an algorithm: arguments, seeds, log, evaluation points, checkpoints."""

from cleanrl_zoo.run.arguments import EnvArgs, LanguageArgs, RunArgs, check, parse_args, usage_errors
from cleanrl_zoo.run.compiling import compile_function, fold
from cleanrl_zoo.run.run import NonFinite, Run
from cleanrl_zoo.run.seeding import torch_generator

__all__ = [
    "EnvArgs",
    "LanguageArgs",
    "NonFinite",
    "Run",
    "RunArgs",
    "check",
    "compile_function",
    "fold",
    "parse_args",
    "torch_generator",
    "usage_errors",
]
