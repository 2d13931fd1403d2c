import math

import pytest
import torch

from cleanrl_zoo.core.advantages import normalize
from cleanrl_zoo.core.policy_losses import clipped_surrogate, kl_penalized_surrogate, policy_gradient
from cleanrl_zoo.core.value_losses import clipped_value_loss, squared_value_loss


def vector(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def close(actual, expected):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=torch.float64), rtol=0, atol=1e-9)


def value_and_gradient(function, x, *args, **kwargs):
    x = x.clone().requires_grad_()
    loss = function(x, *args, **kwargs)
    loss.sum().backward()
    return loss.detach(), x.grad


def test_policy_gradient():
    loss, gradient = value_and_gradient(policy_gradient, vector(-0.5, -2), vector(3, -1))
    close(loss, [1.5, -2])
    close(gradient, [-3, 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_ratio_that_overflows_leaves_no_nan(dtype):
    """e^1000 at A = 1 is clipped: loss −1.2, gradient 0. At A = 0 the loss is 0. With a dual clip of 3 at A = −1: 3."""
    logprob, old = torch.full((3,), 1000.0, dtype=dtype), torch.zeros(3, dtype=dtype)
    advantage = torch.tensor([1.0, 0.0, -1.0], dtype=dtype)
    loss, gradient = value_and_gradient(clipped_surrogate, logprob, old, advantage, dual_clip=3.0)
    torch.testing.assert_close(loss, torch.tensor([-1.2, 0.0, 3.0], dtype=dtype))
    assert gradient.tolist() == [0.0, 0.0, 0.0]
    loss, _ = value_and_gradient(clipped_surrogate, logprob, old, torch.full_like(old, -3.0))
    assert loss.isfinite().all() and (loss > 1e28).all()
    loss, gradient = value_and_gradient(kl_penalized_surrogate, logprob, old, 0 * advantage, old, 1.0)
    assert loss.tolist() == gradient.tolist() == [0.0, 0.0, 0.0]


def test_clipped_surrogate_by_hand():
    # ratio r and advantage A, band [.8, 1.2]; the loss is -min(rA, clip(r)A), its gradient in log-prob -rA or 0
    # r 1.5, A  1: min(1.5, 1.2) -> -1.2, clipped     r 1.5, A -1: min(-1.5, -1.2) -> 1.5, gradient  1.5
    # r  .5, A  1: min(.5, .8)   ->  -.5, gradient -.5   r  .5, A -1: min(-.5, -.8) -> .8, clipped
    # r 1.1, A  2: inside        -> -2.2, gradient -2.2
    logprob = vector(1.5, 1.5, 0.5, 0.5, 1.1).log() + 0.3
    old, advantage = torch.full((5,), 0.3, dtype=torch.float64), vector(1, -1, 1, -1, 2)
    loss, gradient = value_and_gradient(clipped_surrogate, logprob, old, advantage)
    close(loss, [-1.2, 1.5, -0.5, 0.8, -2.2])
    close(gradient, [0, 1.5, -0.5, 0, -2.2])
    # band [.9, 1.3]: r 1.5 A 1 -> -1.3; r .5 A -1 -> .9
    loss, _ = value_and_gradient(clipped_surrogate, logprob, old, advantage, clip_low=0.1, clip_high=0.3)
    close(loss, [-1.3, 1.5, -0.5, 0.9, -2.2])


def test_dual_clip_bounds_the_loss_of_negative_advantages_only():
    # c 3, A -2: at most 6. r 10: 20 -> 6, no gradient. r 2: 4 stays, gradient 4. A 2, r 10: -1.2 * 2 as without it.
    logprob = vector(10, 2, 10).log()
    loss, gradient = value_and_gradient(clipped_surrogate, logprob, vector(0, 0, 0), vector(-2, -2, 2), dual_clip=3.0)
    close(loss, [6, 4, -2.4])
    close(gradient, [0, 4, 0])
    with pytest.raises(ValueError, match="dual_clip is 1.0"):
        clipped_surrogate(logprob, logprob, logprob, dual_clip=1.0)


def test_gradient_at_ratio_one_is_the_policy_gradient():
    logprob, advantage = vector(-0.1, -3, -1.5), vector(2, -0.7, 0)
    _, expected = value_and_gradient(policy_gradient, logprob, advantage)
    for dual_clip in (None, 2.0):
        loss, gradient = value_and_gradient(clipped_surrogate, logprob, logprob, advantage, dual_clip=dual_clip)
        close(gradient, expected)
        close(loss, -advantage)
    _, gradient = value_and_gradient(kl_penalized_surrogate, logprob, logprob, advantage, torch.zeros(3), 0.5)
    close(gradient, expected)


def test_kl_penalized_surrogate():
    # r 2, A 3, KL .5, coefficient .2: -6 + .1, gradient -rA = -6; the gradient in the KL is the coefficient
    kl = vector(0.5).requires_grad_()
    loss, gradient = value_and_gradient(kl_penalized_surrogate, vector(math.log(2)), vector(0), vector(3), kl, 0.2)
    close(loss, [-5.9])
    close(gradient, [-6])
    close(kl.grad, [0.2])


def test_squared_value_loss():
    loss, gradient = value_and_gradient(squared_value_loss, vector(1, 2), vector(3, 2))
    close(loss, [2, 0])  # (1 - 3)^2 / 2
    close(gradient, [-2, 0])


def test_clipped_value_loss_by_hand():
    # old 1, clip 1/2. V 3, R 4: max(1, (1.5 - 4)^2 = 6.25)/2, the clipped branch, no gradient.
    # V 1.2, R 4: inside, 2.8^2/2 = 3.92, gradient 1.2 - 4. V 5, R 0: max(25, 2.25)/2, gradient 5.
    old = vector(1, 1, 1)
    loss, gradient = value_and_gradient(clipped_value_loss, vector(3, 1.2, 5), old, vector(4, 4, 0), 0.5)
    close(loss, [3.125, 3.92, 12.5])
    close(gradient, [0, -2.8, 5])


def test_value_losses_refuse_a_column_against_a_row():
    # V = R = (1, 2): the right loss is 0. Broadcast to all pairs it would be (0 + 1/2 + 1/2 + 0)/4 = .25.
    row, column = vector(1, 2), vector(1, 2).unsqueeze(1)
    close(squared_value_loss(row, row).mean(), 0)
    for value, returns in ((column, row), (row, column), (column, row.unsqueeze(0))):
        with pytest.raises(ValueError, match="shapes differ") as caught:
            squared_value_loss(value, returns)
        assert "\n" not in str(caught.value)
        with pytest.raises(ValueError, match="shapes differ"):
            clipped_value_loss(value, value, returns, 0.2)
    with pytest.raises(ValueError, match="shapes differ"):
        clipped_value_loss(row, column, row, 0.2)


def test_policy_losses_refuse_a_column_against_a_row():
    row, column = torch.zeros(2), torch.zeros(2, 1)
    with pytest.raises(ValueError, match=r"logprob \[2\], advantage \[2, 1\]"):
        policy_gradient(row, column)
    with pytest.raises(ValueError, match="different numbers of dimensions"):
        clipped_surrogate(row, column, row)
    with pytest.raises(ValueError, match="different numbers of dimensions"):
        kl_penalized_surrogate(row, row, row, column, 0.1)


def test_normalize_by_hand():
    # (1, 2, 3): mean 2, sample std 1, population std sqrt(2/3)
    close(normalize(vector(1, 2, 3), eps=0.0), [-1, 0, 1])
    close(normalize(vector(1, 2, 3), eps=1.0), [-0.5, 0, 0.5])
    close(normalize(vector(1, 2, 3), eps=0.0, ddof=0), [-math.sqrt(1.5), 0, math.sqrt(1.5)])
    # (1, 3) under the mask: mean 2, sample std sqrt 2
    masked = normalize(vector(1, torch.nan, 3), mask=vector(1, 0, 1), eps=0.0)
    close(masked, [-math.sqrt(0.5), 0, math.sqrt(0.5)])
    assert torch.equal(normalize(vector(1, 9, 3), torch.tensor([True, False, True]), eps=0.0), masked)


def test_normalize_one_element_equal_elements_and_none():
    assert torch.equal(normalize(torch.tensor([7.0])), torch.tensor([0.0]))
    assert torch.equal(normalize(torch.tensor([7.0, 5.0]), torch.tensor([1, 0])), torch.zeros(2))
    assert torch.equal(normalize(torch.tensor([7.0, 5.0]), torch.tensor([0, 0])), torch.zeros(2))
    # Seven times .1 in float32: a mean one rounding off, over a std as small, must not become a push.
    assert torch.equal(normalize(torch.full((7,), 0.1)), torch.zeros(7))
    assert torch.equal(normalize(torch.full((7,), 0.1), eps=0.0), torch.zeros(7))
    assert normalize(torch.tensor([1.0, torch.nan])).isnan().any()  # a NaN is not hidden
    with pytest.raises(ValueError, match="different numbers of dimensions"):
        normalize(torch.zeros(2, 1), torch.ones(2))
