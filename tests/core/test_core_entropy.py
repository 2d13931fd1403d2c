import math

import pytest
import torch

from cleanrl_zoo.core import EntropyBand, clamped_entropy, linear_clamped_entropy
from cleanrl_zoo.core import entropy as module


def close(actual, expected, atol=1e-12):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=torch.float64), rtol=0, atol=atol)


def random_head(rows, width, vocabulary):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator, dtype=torch.float64).requires_grad_()
    return hidden, torch.randn(vocabulary, width, generator=generator, dtype=torch.float64).requires_grad_()


def test_clamped_entropy_by_hand():
    # probabilities 1/10, 3/10, 1/10, 5/10: the likelier half is 3/8 and 5/8. H = -sum p log p, and its gradient in a
    # logit of that half is -p(log p + H); the others have none.
    logits = torch.tensor([1.0, 3.0, 1.0, 5.0], dtype=torch.float64).log().requires_grad_()
    expected = -3 / 8 * math.log(3 / 8) - 5 / 8 * math.log(5 / 8)
    entropy = clamped_entropy(logits, 0.5)
    close(entropy.detach(), expected)
    entropy.backward()
    slope = [-p * (math.log(p) + expected) for p in (3 / 8, 5 / 8)]
    close(logits.grad, [0, slope[0], 0, slope[1]])


@pytest.mark.parametrize("share, count", [(0.01, 1), (0.25, 1), (0.26, 2), (0.75, 3), (1.0, 4)])
def test_the_share_is_rounded_up_to_tokens(share, count):
    close(clamped_entropy(torch.zeros(3, 4, dtype=torch.float64), share), [math.log(count)] * 3)


@pytest.mark.parametrize("share, tokens, count", [(0.07, 100, 7), (0.55, 100, 55), (0.28, 25, 7), (0.14, 50, 7)])
def test_a_share_that_is_a_whole_number_of_tokens_is_that_number(share, tokens, count):
    assert math.ceil(share * tokens) == count + 1  # what rounding in the product would make of it
    close(clamped_entropy(torch.zeros(tokens, dtype=torch.float64), share), math.log(count))


def test_temperature_divides_the_logits():
    logits = torch.tensor([0.3, -2.0, 1.1, 0.9], dtype=torch.float64)
    close(clamped_entropy(logits, 0.7, 2.5), clamped_entropy(logits / 2.5, 0.7))
    assert clamped_entropy(logits, 0.7, 2.5) > clamped_entropy(logits, 0.7)


def test_an_excluded_token_adds_nothing_and_has_no_gradient():
    logits = torch.tensor([0.0, -torch.inf, 0.0], dtype=torch.float64, requires_grad=True)
    entropy = clamped_entropy(logits, 1.0)
    close(entropy.detach(), math.log(2))
    entropy.backward()
    close(logits.grad, [0, 0, 0])


@pytest.mark.parametrize("share", [0.2, 1.0])
def test_from_hidden_rows_as_from_logits_in_pieces_too(monkeypatch, share):
    hidden, weight = random_head(7, 3, 11)
    slopes = torch.linspace(-1, 2, 7, dtype=torch.float64)
    expected = clamped_entropy(hidden @ weight.t(), share, 0.7)
    wanted = torch.autograd.grad((expected * slopes).sum(), (hidden, weight))
    for size in (module.PIECE_BYTES, 2 * 11 * 8, 1):  # all rows, two rows, one row at a time
        monkeypatch.setattr(module, "PIECE_BYTES", size)
        found = linear_clamped_entropy(hidden, weight, share, 0.7)
        close(found.detach(), expected.detach())
        for actual, gradient in zip(torch.autograd.grad((found * slopes).sum(), (hidden, weight)), wanted, strict=True):
            close(actual, gradient)


def test_half_precision_is_computed_in_single():
    logits = torch.tensor([0.0, 0.5, 1.0], dtype=torch.bfloat16)
    assert clamped_entropy(logits, 1.0).dtype == torch.float32
    torch.testing.assert_close(clamped_entropy(logits, 1.0), clamped_entropy(logits.float(), 1.0))


@pytest.mark.parametrize("share, temperature", [(0.0, 1.0), (1.1, 1.0), (math.nan, 1.0), (0.5, 0.0), (0.5, math.inf)])
def test_a_share_outside_0_1_and_a_temperature_of_0_are_refused(share, temperature):
    with pytest.raises(ValueError, match=r"share in \(0, 1\]"):
        clamped_entropy(torch.zeros(3), share, temperature)
    with pytest.raises(ValueError, match=r"give \[R, H\] and \[V, H\]"):
        linear_clamped_entropy(torch.zeros(2, 3), torch.zeros(4, 2), 0.5)


def test_the_band_moves_the_weight_by_hand():
    band = EntropyBand(0.5, 0.8, coef=0.1, rate=0.2)
    assert band.update(0.6) == 0.1  # inside
    assert band.update(0.5) == band.update(0.8) == 0.1  # its ends belong to it
    assert band.update(torch.tensor(1.0)) == pytest.approx(0.1 - 0.2 * 0.2)
    assert band.update(0.3) == pytest.approx(0.06 + 0.2 * 0.2)
    assert band.update(9.0) == 0.0  # never a punishment
    other = EntropyBand(0.5, 0.8, coef=0.0, rate=0.2)
    band.update(0.3)
    other.load_state_dict(band.state_dict())
    assert other.coef == band.coef == pytest.approx(0.04)


def test_the_band_holds_a_policys_entropy():
    """Ten tokens, of which a reward of 1 prefers the first: without the bonus entropy falls to 0, with it it stays."""
    entropies = {}
    for rate in (0.0, 0.05):
        band, logits = EntropyBand(0.5, 0.7, coef=0.0, rate=rate), torch.zeros(10, requires_grad=True)
        for _ in range(2000):
            entropy = clamped_entropy(logits, 0.5)
            objective = logits.softmax(0)[0] + band.coef * entropy
            with torch.no_grad():
                logits += 0.5 * torch.autograd.grad(objective, logits)[0]
            band.update(entropy.detach())
        entropies[rate] = float(entropy.detach())
    assert entropies[0.0] < 0.1 and 0.45 < entropies[0.05] < 0.75


@pytest.mark.parametrize(
    "settings",
    [
        (-0.1, 1.0, 0.1, 0.1), (1.0, 0.5, 0.1, 0.1), (math.nan, 1.0, 0.1, 0.1), (0.0, 1.0, -1.0, 0.1),
        (0.0, 1.0, math.nan, 0.1), (0.0, 1.0, 0.1, math.nan), (0.0, 1.0, 0.1, -1.0),
    ],
)  # fmt: skip
def test_a_band_that_is_none_is_refused(settings):
    with pytest.raises(ValueError, match="entropy band"):
        EntropyBand(*settings)
