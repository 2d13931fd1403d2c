"""The run around an algorithm: arguments, seeds, log, evaluation points, checkpoints."""

from cleanrl_zoo.run.arguments import (
    EnvArgs,
    RunArgs,
    check_above,
    check_at_least,
    check_between,
    parse_args,
    usage_errors,
)
from cleanrl_zoo.run.compiling import compile_function
from cleanrl_zoo.run.run import NonFinite, Run
from cleanrl_zoo.run.seeding import INIT_STREAM, MINIBATCH_STREAM, NOISE_STREAM, torch_generator

__all__ = [
    "INIT_STREAM",
    "MINIBATCH_STREAM",
    "NOISE_STREAM",
    "EnvArgs",
    "NonFinite",
    "Run",
    "RunArgs",
    "check_above",
    "check_at_least",
    "check_between",
    "compile_function",
    "parse_args",
    "torch_generator",
    "usage_errors",
]
