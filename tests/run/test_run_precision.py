"""Which way float32 products go is decided by the processor and a measured error."""

import pytest
import torch

from cleanrl_zoo.run import precision


@pytest.fixture(autouse=True)
def precision_as_it_was():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


AMD = "vendor_id : AuthenticAMD\nflags : fpu avx2 avx512f\n"


@pytest.mark.parametrize(
    ("cpuinfo", "error", "device", "chosen"),
    [
        (AMD, 1e-6, "cpu", "medium"),  # as exact as float32: the faster way
        (AMD, 3e-3, "cpu", "highest"),  # bfloat16 inside
        (AMD, 1e-6, "cuda", "highest"),  # where "medium" means something else
        (AMD.replace("avx512f", "avx2"), 1e-6, "cpu", "highest"),  # nothing to gain
        (AMD.replace("AuthenticAMD", "GenuineIntel"), 1e-6, "cpu", "highest"),
        (None, 1e-6, "cpu", "highest"),
    ],
)
def test_the_faster_way_is_taken_only_where_it_is_as_exact(tmp_path, monkeypatch, cpuinfo, error, device, chosen):
    monkeypatch.setattr(precision, "matmul_error", lambda: error)
    if cpuinfo is not None:
        (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert precision.fast_matmul(device, tmp_path / "cpuinfo") == torch.get_float32_matmul_precision() == chosen


def test_the_error_tells_float32_from_bfloat16():
    torch.set_float32_matmul_precision("highest")
    assert 1e-7 < precision.matmul_error() < precision.LARGEST_ERROR
    real = torch.Tensor.__matmul__
    rounded = lambda a, b: real(a.bfloat16(), b.bfloat16()).float() if a.dtype == torch.float32 else real(a, b)  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "__matmul__", rounded)
        assert precision.matmul_error() > 100 * precision.LARGEST_ERROR


def test_on_this_machine_the_products_stay_as_exact_as_float32():
    precision.fast_matmul()
    assert precision.matmul_error() < precision.LARGEST_ERROR
