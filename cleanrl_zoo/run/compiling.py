"""`--compile`: one place for the compiler's settings."""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def compiler_missing(device: str) -> str | None:
    """Why `--compile` cannot work on this machine, in a few words, or None."""
    if device != "cpu":
        return None
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")  # torch's own choice
    if not shutil.which(compiler):
        return f"the C++ compiler {compiler} was not found"
    try:
        subprocess.run([compiler, "--version"], capture_output=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return f"the C++ compiler {compiler} does not work"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python's headers (Python.h) were not found"
    return None


def compile_function(function: Callable, enabled: bool, device: str = "cpu") -> Callable:
    """`function` compiled as one graph (an unbreakable one: `fullgraph`), or `function` itself when not `enabled`.

    On the CPU through the C++ wrapper; on CUDA as CUDA graphs. `torch.autograd.grad` inside the graph is traced
    (`trace_autograd_ops`), which is what lets one graph hold loss, gradient and optimizer step. Shapes are static:
    another batch size compiles anew. Global names and the settings of torch's own layers (not their parameters) are
    taken as the first call finds them and not looked at again, which is a tenth of the time of a small update. Each
    compiled function counts its own compilations, so that a process may make as many runs as it likes: torch's limit
    of eight is per function, and every `no_grad` wrapper is one and the same.
    """
    if not enabled:
        return function
    # The instruction-set check compiles and runs a test program for each set: four seconds of a cold start.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    import torch
    import torch._dynamo

    torch._dynamo.config.trace_autograd_ops = True
    # For the whole process. The argument dynamic=False says the same at every call, and takes 10 µs of each.
    torch._dynamo.config.automatic_dynamic_shapes = False
    options: dict[str, Any] = {"cpp_wrapper": True} if device == "cpu" else {"triton.cudagraphs": True}
    options["guard_filter_fn"] = _guards_that_can_fail
    return torch.compile(function, fullgraph=True, options=options, isolate_recompiles=True)


def _guards_that_can_fail(guards: Sequence[Any]) -> list[bool]:
    """Which of the compiler's conditions are tested at each call: those on tensors, and all but those on global names
    and torch's own layers."""
    import torch

    not_global = torch.compiler.skip_guard_on_globals_unsafe(guards)
    not_layers = torch.compiler.skip_guard_on_inbuilt_nn_modules_unsafe(guards)
    rest = zip(guards, not_global, not_layers, strict=True)
    return [guard.guard_type == "TENSOR_MATCH" or (one and other) for guard, one, other in rest]


def fold(body: Callable, carry: tuple, rows: tuple) -> tuple:
    """`carry = body(carry, row)` for each row of the tensors `rows`, which have a first dimension in common.

    A loop that the compiler may leave a loop: inside a function compiled for the CPU the body is compiled once (torch's
    `scan`), where a plain `for` is written out step by step, at seconds of compilation each. What the body returns has
    the shapes of `carry` and is none of its inputs.
    """
    import torch

    if torch.compiler.is_compiling() and carry[0].device.type == "cpu":
        from torch._higher_order_ops.scan import scan

        # scan also collects something at every step; it is not used
        return scan(lambda carry, row: (body(carry, row), torch.zeros(())), carry, rows, dim=0)[0]
    for row in zip(*rows, strict=True):
        carry = body(carry, row)
    return carry


def resolve_compile(enabled: bool, device: str) -> bool:
    """`enabled`, or False with a note on stderr where this machine has no compiler."""
    reason = compiler_missing(device) if enabled else None
    if reason is not None:
        print(f"note: running without --compile: {reason}", file=sys.stderr)
    return enabled and reason is None
