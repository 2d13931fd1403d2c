import math

import pytest
import torch

from cleanrl_zoo.core.off_policy import (
    banded_weight,
    decoupled_surrogate,
    sequence_weight,
    token_veto,
    truncated_weight,
)
from cleanrl_zoo.core.policy_losses import clipped_surrogate


def matrix(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def close(actual, expected):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=torch.float64), rtol=0, atol=1e-9)


def policies(*ratios):
    """proximal and behavior log-probs with the ratios proximal/behavior that are given, [B, L]."""
    return matrix(*ratios).log(), torch.zeros(len(ratios), len(ratios[0]), dtype=torch.float64)


def test_truncated_weight_cuts_from_above_only():
    close(truncated_weight(*policies((0.5, 2, 4, 1e-6)), cap=2.0), [[0.5, 2, 2, 1e-6]])
    close(truncated_weight(*policies((0.5, 4)), cap=math.inf), [[0.5, 4]])
    # the ratio is proximal over behavior
    close(truncated_weight(matrix((-1,)), matrix((-3,)), cap=10.0), [[math.e**2]])


def test_banded_weight_keeps_the_weight_inside_the_band():
    # bounds belong to the band; 3 as exp(log 3) is one rounding above 3
    close(banded_weight(*policies((0.5, 0.49, 1.5, 3, 3.01)), 0.5, 3.0), [[0.5, 0, 1.5, 3, 0]])
    close(banded_weight(*policies((0.01, 9)), 0.0, math.inf), [[0.01, 9]])


def test_sequence_weight_is_the_product_up_to_the_cap():
    # products .5 * 4 = 2; 3 * 3 = 9; 3 (its second token is padding); nothing: the empty product 1
    mask = torch.tensor([[1, 1], [1, 1], [1, 0], [0, 0]])
    weight = sequence_weight(*policies((0.5, 4), (3, 3), (3, 9), (9, 9)), mask, cap=3.0)
    close(weight, [[2], [0], [3], [1]])


def test_token_veto_drops_the_sequence():
    # the mean and the product of row 0 are harmless, its second token is not; in row 1 that one is padding
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 1]])
    proximal, behavior = policies((1, 9e-5, 1e5), (1, 9e-5, 1), (1, 1e-4, 1))
    close(token_veto(proximal, behavior, mask, threshold=1e-4), [[0], [1], [1]])
    close(token_veto(proximal, behavior, mask, threshold=1e-5), [[1], [1], [1]])


def test_decoupled_surrogate_by_hand():
    # rho 2, 2, .5; r 1.5, 1.1, .5; A 1, -1, -1; band [.8, 1.2] around the proximal policy
    # -2 min(1.5, 1.2) = -2.4, clipped; 2 * 1.1 = 2.2, gradient rho * r; -.5 min(-.5, -.8) = .4, clipped
    proximal, behavior = policies((2, 2, 0.5))
    logprob = (proximal + matrix((1.5, 1.1, 0.5)).log()).requires_grad_()
    proximal.requires_grad_()
    behavior.requires_grad_()
    advantage = matrix((1, -1, -1))
    loss = decoupled_surrogate(logprob, proximal.detach(), behavior, advantage)
    close(loss.detach(), [[-2.4, 2.2, 0.4]])
    loss.sum().backward()
    close(logprob.grad, [[0, 2.2, 0]])
    assert behavior.grad is None  # the weight carries no gradient
    # PPO-IS is another loss: ratios 3, 2.2, .25 to the behavior -> -1.2, clipped; 2.2; .8, clipped
    close(clipped_surrogate(logprob, behavior, advantage).detach(), [[-1.2, 2.2, 0.8]])
    # equal proximal and behavior: PPO
    close(
        decoupled_surrogate(logprob, proximal, proximal, advantage, 0.1, 0.3).detach(),
        clipped_surrogate(logprob, proximal, advantage, 0.1, 0.3).detach(),
    )


def weights(proximal, behavior, mask):
    return (
        truncated_weight(proximal, behavior, cap=2.0),
        truncated_weight(proximal, behavior, cap=math.inf),
        banded_weight(proximal, behavior, 0.5, 5.0),
        sequence_weight(proximal, behavior, mask, cap=2.0),
        token_veto(proximal, behavior, mask, threshold=1e-4),
    )


def test_weights_are_detached():
    proximal, behavior = (x.requires_grad_() for x in policies((1, 1.5)))
    assert not any(weight.requires_grad for weight in weights(proximal, behavior, torch.ones(1, 2)))


def test_huge_differences_stay_finite():
    proximal, behavior = torch.tensor([[0.0, -1e5, 0.0]]), torch.tensor([[-1e5, 0.0, -torch.inf]])
    truncated, untruncated, banded, sequence, veto = weights(proximal, behavior, torch.ones(1, 3))
    assert truncated.tolist() == [[2, 0, 2]]
    assert (untruncated * torch.zeros(3)).tolist() == [[0, 0, 0]]  # no inf * 0
    assert banded.tolist() == [[0, 0, 0]]
    assert sequence.tolist() == [[0]] and veto.tolist() == [[0]]
    for sign in (-1, 0, 1):
        loss = decoupled_surrogate(proximal, proximal, behavior, torch.full((1, 3), 0.1 * sign))
        assert loss.isfinite().all()


def test_padding_never_matters_for_a_sequence():
    mask = torch.tensor([[1, 0], [0, 1]])
    proximal, behavior = policies((1.5, 1), (1, 0.7))
    expected = weights(proximal, behavior, mask)[3:]
    for content in (-1e9, torch.inf, torch.nan):
        spoiled = torch.where(mask == 0, content, proximal)
        for actual, value in zip(weights(spoiled, behavior, mask)[3:], expected, strict=True):
            assert torch.equal(actual, value)


def test_bad_requests_say_what_is_allowed():
    square, row = torch.zeros(2, 2), torch.zeros(2)
    for call in (
        lambda: truncated_weight(square, row, 1.0),
        lambda: banded_weight(square, row, 0.5, 2.0),
        lambda: sequence_weight(square, square, row, 1.0),
        lambda: token_veto(square, square, row, 1e-4),
        lambda: decoupled_surrogate(square, square, square, row),
    ):
        with pytest.raises(ValueError, match="different numbers of dimensions"):
            call()
    with pytest.raises(ValueError, match="cap is 0"):
        truncated_weight(square, square, 0)
    with pytest.raises(ValueError, match="cap is -1"):
        sequence_weight(square, square, square, -1)
    for threshold in (0, 1.5):
        with pytest.raises(ValueError, match=f"threshold is {threshold}"):
            token_veto(square, square, square, threshold)
    with pytest.raises(ValueError, match="band is 2.0 … 1.0"):
        banded_weight(square, square, 2.0, 1.0)
