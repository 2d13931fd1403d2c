"""How float32 matrix products are computed on the CPU."""

from pathlib import Path

import torch

LARGEST_ERROR = 1e-5  # of a product's entries against their root mean square; float32 gives 1e-6, bfloat16 3e-3


def fast_matmul(device: str = "cpu", cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Sets torch's float32 matrix products to the faster way that is as exact as float32, and returns its name.

    Torch multiplies by MKL, which runs at half speed on AMD processors with 512-bit vectors. "medium" takes oneDNN
    instead, which is allowed to round to bfloat16 and does so where the processor can multiply it: whether it does is
    measured, since that would change what is learned. The choice depends on the processor alone, never on a clock, so
    that a resumed run makes it again. Everywhere else, and on other devices: "highest", torch's default.
    """
    torch.set_float32_matmul_precision("highest")
    try:
        text = cpuinfo.read_text()
    except OSError:  # not Linux
        return "highest"
    if device == "cpu" and "AuthenticAMD" in text and "avx512f" in text:
        torch.set_float32_matmul_precision("medium")
        if matmul_error() > LARGEST_ERROR:
            torch.set_float32_matmul_precision("highest")
    return torch.get_float32_matmul_precision()


def matmul_error(size: int = 256) -> float:
    """The largest error of a product of two standard normal matrices as now set, in units of its root mean square."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, size, generator=generator) for _ in range(2))
    return float(((a @ b).double() - a.double() @ b.double()).abs().max() / size**0.5)
