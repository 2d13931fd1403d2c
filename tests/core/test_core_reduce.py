import pytest
import torch

from cleanrl_zoo.core.reduce import aggregate, explained_variance, masked_mean, masked_std


def close(actual, expected):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=torch.float64), rtol=0, atol=1e-9)


def two_sequences():
    # One token of loss 1; three tokens of loss 0. The padding holds what must never be seen.
    loss = torch.tensor([[1.0, 50.0, -70.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    return loss, torch.tensor([[1, 0, 0], [1, 1, 1]])


@pytest.mark.parametrize(
    ("mode", "denominator", "expected"),
    [
        ("token_mean", None, 0.25),  # 1/4
        ("sequence_mean", None, 0.5),  # (1/1 + 0/3)/2
        ("constant", 8, 0.125),  # 1/(2 * 4)
        ("sum", None, 0.5),  # (1 + 0)/2
        ("token_mean", 10, 0.1),
        ("sequence_mean", 4, 0.25),
        ("sum", torch.tensor(5.0), 0.2),
    ],
)
def test_aggregate_by_hand(mode, denominator, expected):
    loss, mask = two_sequences()
    for flags in (mask, mask.bool(), mask.float()):
        close(aggregate(loss, flags, mode, denominator), expected)
    close(aggregate(torch.where(mask == 0, torch.nan, loss), mask, mode, denominator), expected)


@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean", "constant", "sum"])
def test_any_split_gives_the_same_loss_and_gradient(mode):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(8, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(8, 5, generator=generator) < 0.5
    mask[2] = False  # a row without tokens
    denominator = {"token_mean": int(mask.sum()), "sequence_mean": 8, "constant": 40, "sum": 8}[mode]
    results = []
    for sizes in ([8], [4, 4], [1] * 8, [5, 2, 1]):
        x = torch.linspace(-1, 1, 40, dtype=torch.float64).view(8, 5).requires_grad_()
        parts = zip((x.square() * weight).split(sizes), mask.split(sizes), strict=True)
        losses = [aggregate(loss, part, mode, denominator) for loss, part in parts]
        torch.stack(losses).sum().backward()
        results.append((sum(losses).detach(), x.grad))
    whole = aggregate(
        torch.linspace(-1, 1, 40, dtype=torch.float64).view(8, 5).square() * weight, mask, mode, denominator
    )
    for loss, gradient in results:
        close(loss, whole)
        close(gradient, results[0][1])
        assert (gradient[~mask] == 0).all()


def test_defaults_equal_the_explicit_denominators():
    loss, mask = two_sequences()
    close(aggregate(loss, mask, "token_mean"), aggregate(loss, mask, "token_mean", 4))
    close(aggregate(loss, mask, "sequence_mean"), aggregate(loss, mask, "sequence_mean", 2))
    # A row without tokens adds 0 and counts in B.
    empty = torch.cat((mask, torch.zeros(1, 3, dtype=mask.dtype)))
    longer = torch.cat((loss, torch.ones(1, 3)))
    close(aggregate(longer, empty, "sequence_mean"), 1 / 3)
    close(aggregate(longer, empty, "sum"), 1 / 3)
    close(aggregate(loss, torch.zeros_like(mask), "token_mean"), 0)


def test_a_control_batch_is_the_case_with_every_mask_one():
    loss = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64)
    for mode in ("token_mean", "sequence_mean", "sum"):
        close(aggregate(loss, mode=mode), 3)


def test_aggregate_refuses_bad_requests():
    loss, mask = two_sequences()
    with pytest.raises(ValueError, match="'mean' is unknown; choose one of token_mean"):
        aggregate(loss, mask, "mean")
    with pytest.raises(ValueError, match="needs a denominator"):
        aggregate(loss, mask, "constant")
    with pytest.raises(ValueError, match="denominator is 0"):
        aggregate(loss, mask, "sum", 0)
    with pytest.raises(ValueError, match="different numbers of dimensions"):
        aggregate(loss, torch.ones(3))


def test_aggregate_refuses_a_denominator_of_nan():
    with pytest.raises(ValueError, match="denominator is nan"):
        aggregate(torch.ones(2), denominator=float("nan"))


def test_masked_mean_and_std_by_hand():
    # row 0: 1 and 3 -> mean 2, sample std sqrt 2, population std 1; row 1: 4 alone; row 2: nothing
    x = torch.tensor([[1.0, 99.0, 3.0], [4.0, 99.0, 99.0], [99.0, 99.0, 99.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 0, 1], [1, 0, 0], [0, 0, 0]])
    close(masked_mean(x, mask), 8 / 3)
    close(masked_mean(x, mask, dim=1), [2, 4, 0])
    close(masked_std(x, mask, dim=1), [2**0.5, 0, 0])
    close(masked_std(x, mask, dim=1, ddof=0), [1, 0, 0])
    # all kept (1, 3, 4): mean 8/3, squares 25/9 + 1/9 + 16/9 = 42/9, over 2
    close(masked_std(x, mask), (42 / 18) ** 0.5)
    spoiled = torch.where(mask == 0, torch.nan, x)
    close(masked_mean(spoiled, mask, dim=1), [2, 4, 0])
    close(masked_std(spoiled, mask), (42 / 18) ** 0.5)
    # without a mask, over several dimensions, and of flags
    close(masked_mean(x[:, 0]), 104 / 3)
    close(masked_mean(x.expand(2, 3, 3), dim=(1, 2)), x.mean().repeat(2))
    assert masked_mean(torch.tensor([True, False, False, False])).item() == 0.25
    # a mask of size 1 broadcasts
    close(masked_mean(x, torch.tensor([[1], [0], [0]])), (1 + 99 + 3) / 3)


def test_the_slope_of_no_spread_is_zero():
    """Where all numbers are equal the root of the variance has no finite slope."""
    x = torch.tensor([[1.0, 1.0, 1.0], [1.0, 3.0, 2.0]], dtype=torch.float64, requires_grad=True)
    spread = masked_std(x, dim=1)
    close(spread, [0, 1])
    (slope,) = torch.autograd.grad(spread.sum(), x)
    close(slope, [[0, 0, 0], [-0.5, 0.5, 0]])  # (x − mean) / (2 std)


def test_parts_without_rows_add_nothing():
    none = torch.zeros(0, 4)
    for mode in ("token_mean", "sequence_mean", "constant", "sum"):
        assert aggregate(none, none, mode, 8).item() == 0
    assert explained_variance(none, none).item() == 0


def test_explained_variance():
    # target (0, 2, 4), variance 8/3; prediction (0, 2, 1): residual (0, 0, 3), mean 1, variance (1 + 1 + 4)/3 = 2
    target = torch.tensor([0.0, 2.0, 4.0], dtype=torch.float64)
    close(explained_variance(torch.tensor([0.0, 2.0, 1.0], dtype=torch.float64), target), 0.25)
    close(explained_variance(target + 5, target), 1)
    close(explained_variance(torch.zeros(3, dtype=torch.float64), target), 0)
    assert explained_variance(torch.tensor([1.0, 2.0]), torch.full((2,), 0.1)).item() == 0
    with pytest.raises(ValueError, match="shapes differ"):
        explained_variance(target.unsqueeze(1), target)
