import math

import pytest
import torch

from cleanrl_zoo.core.off_policy import decoupled_surrogate
from cleanrl_zoo.core.policy_losses import (
    clipped_surrogate,
    clipped_weight_pg,
    policy_gradient,
    sequence_logratio,
    tapered_pg,
)
from cleanrl_zoo.core.reduce import aggregate


def matrix(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def close(actual, expected):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=torch.float64), rtol=0, atol=1e-9)


def value_and_gradient(function, x, *args, **kwargs):
    x = x.clone().requires_grad_()
    loss = function(x, *args, **kwargs)
    loss.sum().backward()
    return loss.detach(), x.grad


def test_sequence_logratio_is_the_mean_not_the_product():
    # token ratios 2 and 8: log s = (log 2 + log 8)/2 = log 4; one token of ratio 3; no token at all
    old = torch.full((3, 3), -0.5, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [0, 1, 0], [0, 0, 0]])
    logprob = old + matrix((2, 8, 9), (9, 3, 9), (9, 9, 9)).log()
    logratio, gradient = value_and_gradient(sequence_logratio, logprob, old, mask)
    close(logratio, [math.log(4), math.log(3), 0])
    close(gradient, [[0.5, 0.5, 0], [0, 1, 0], [0, 0, 0]])
    # per token: the value of the sequence, the gradient of the token's own log-prob
    logratio, gradient = value_and_gradient(sequence_logratio, logprob, old, mask.bool(), per_token=True)
    close(logratio, [[math.log(4)] * 3, [math.log(3)] * 3, [0] * 3])
    close(gradient, mask)


@pytest.mark.parametrize("per_token", [False, True])
def test_padding_never_matters_for_the_sequence_ratio(per_token):
    mask = torch.tensor([[1, 0], [1, 1]])
    logprob, old = matrix((-1, -2), (-3, -4)), matrix((-1.5, -2), (-3, -3))
    expected = value_and_gradient(sequence_logratio, logprob, old, mask, per_token)
    for content in (5.0, torch.inf, -torch.inf, torch.nan):
        spoiled = torch.where(mask == 0, content, logprob), torch.where(mask == 0, content, old)
        for actual, value in zip(
            value_and_gradient(sequence_logratio, *spoiled, mask, per_token), expected, strict=True
        ):
            close(actual, value)


def test_gspo_by_hand():
    # s = 4, band [.8, 1.2]. A 1: -min(4, 1.2), clipped, no gradient. A -1: 4; d s/d l_t = s/n = 2 each.
    # Clipped by the product 16 or token by token (2 and 8), the numbers would differ.
    old = torch.zeros(2, 3, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [1, 1, 0]])
    logprob = matrix((2, 8, 5), (2, 8, 5)).log()
    advantage = torch.tensor([1.0, -1.0], dtype=torch.float64)

    def gspo(logprob):
        logratio = sequence_logratio(logprob, old, mask)  # [B]
        return clipped_surrogate(logratio, torch.zeros_like(logratio), advantage)

    loss, gradient = value_and_gradient(gspo, logprob)
    close(loss, [-1.2, 4])
    close(gradient, [[0, 0, 0], [2, 2, 0]])

    # With one advantage for a whole sequence, GSPO-token under the sequence mean has the same value and gradient.
    def gspo_token(logprob):
        logratio = sequence_logratio(logprob, old, mask, per_token=True)  # [B, L]
        loss = clipped_surrogate(logratio, torch.zeros_like(logratio), advantage.unsqueeze(1))
        return aggregate(loss, mask, "sequence_mean", denominator=1)

    total, token_gradient = value_and_gradient(gspo_token, logprob)
    close(total, 2.8)
    close(token_gradient, gradient)


def test_gspo_token_takes_an_advantage_for_every_token():
    # s = 4 for both tokens; A (-1, -3): losses 4 and 12, gradients s * -A
    logprob, mask = matrix((2, 8)).log(), torch.ones(1, 2)

    def loss(logprob):
        logratio = sequence_logratio(logprob, torch.zeros_like(logprob), mask, per_token=True)
        return clipped_surrogate(logratio, torch.zeros_like(logratio), matrix((-1, -3)))

    value, gradient = value_and_gradient(loss, logprob)
    close(value, [[4, 12]])
    close(gradient, [[4, 12]])


def test_clipped_weight_pg_by_hand():
    # ratios 1.5, .5, 1.1, weights clip(r, off, 1.2) = 1.2, .5, 1.1; loss -w A l, gradient -w A: none is lost
    logprob, advantage = matrix((-1, -2, -0.5)), matrix((2, -1, 1))
    old = logprob - matrix((1.5, 0.5, 1.1)).log()
    loss, gradient = value_and_gradient(clipped_weight_pg, logprob, old, advantage, None, 0.2)
    close(loss, [[2.4, -1, 0.55]])
    close(gradient, [[-2.4, 0.5, -1.1]])
    # with the lower bound on: weight .8; with both off: the ratio itself
    _, gradient = value_and_gradient(clipped_weight_pg, logprob, old, advantage, 0.2, 0.2)
    close(gradient, [[-2.4, 0.8, -1.1]])
    _, gradient = value_and_gradient(clipped_weight_pg, logprob, old, advantage, None, None)
    close(gradient, [[-3, 0.5, -1.1]])
    # inside the band the gradient is that of PPO; at ratio 1 that of REINFORCE
    _, gradient = value_and_gradient(clipped_weight_pg, logprob, logprob, advantage, 0.2, 0.28)
    close(gradient, -advantage)


def test_clipped_weight_pg_survives_a_huge_ratio():
    logprob, old = torch.tensor([[0.0, 0.0, -200.0]]), torch.tensor([[-200.0, -200.0, 0.0]])
    for clip_high in (0.2, None):
        loss, gradient = value_and_gradient(
            clipped_weight_pg, logprob, old, torch.tensor([[1.0, 0.0, 1.0]]), None, clip_high
        )
        assert loss.isfinite().all() and gradient.isfinite().all()


def test_tapered_pg_by_hand():
    # sequence ratios: row 0: .5 * .5 = .25; row 1 the same; row 2: 3 * 1 = 3, over the cap; row 3: .25
    # advantages -2, 2, -1, 0: weights .25, 1 (A >= 0), 1 (capped), 1
    logprob = matrix((-1, -2, -9), (-1, -2, -9), (-3, -1, -9), (-1, -2, -9))
    logratio = matrix((0.5, 0.5, 7), (0.5, 0.5, 7), (3, 1, 7), (0.5, 0.5, 7)).log()
    mask = torch.tensor([[1, 1, 0]]).expand(4, 3)
    advantage = matrix((-2,), (2,), (-1,), (0,))
    loss, gradient = value_and_gradient(tapered_pg, logprob, logprob - logratio, advantage, mask)
    close(loss, [[-0.5, -1, 0], [2, 4, 0], [-3, -1, 0], [0, 0, 0]])  # -w A l
    close(gradient, [[0.5, 0.5, 0], [-2, -2, 0], [1, 1, 0], [0, 0, 0]])  # -w A
    close(loss.sum(1), [0.25 * 2 * -3, -2 * -3, -4, 0])  # -w A sum of l
    _, gradient = value_and_gradient(tapered_pg, logprob, logprob - logratio, advantage, mask, cap=0.1)
    close(gradient, [[0.2, 0.2, 0], [-2, -2, 0], [0.1, 0.1, 0], [0, 0, 0]])
    # an advantage for every token: the sign is tested token by token, the ratio stays the sequence's
    _, gradient = value_and_gradient(
        tapered_pg, logprob[:1], (logprob - logratio)[:1], matrix((-1, 1, -1)), torch.tensor([[1, 1, 0]])
    )
    close(gradient, [[0.25, -1, 0]])
    with pytest.raises(ValueError, match="cap is 0"):
        tapered_pg(logprob, logprob, advantage, mask, cap=0)


def test_padding_and_huge_ratios_leave_tapered_pg_finite():
    mask = torch.tensor([[1, 0], [1, 1]])
    logprob, behavior = torch.tensor([[-1.0, 0.0], [-500.0, -1.0]]), torch.tensor([[-1.0, 0.0], [-1.0, -500.0]])
    advantage = torch.tensor([[-1.0], [-1.0]])
    expected = value_and_gradient(tapered_pg, logprob, behavior, advantage, mask)
    assert all(part.isfinite().all() for part in expected)
    for content in (-torch.inf, torch.nan):
        spoiled = (torch.where(mask == 0, content, x) for x in (logprob, behavior, advantage.expand(2, 2)))
        for actual, value in zip(value_and_gradient(tapered_pg, *spoiled, mask), expected, strict=True):
            assert torch.equal(actual, value)
    _, gradient = value_and_gradient(tapered_pg, behavior, behavior - 1e4, advantage, mask)  # overflows to the cap
    assert torch.equal(gradient, mask.float())


def test_on_policy_they_all_have_the_gradient_of_reinforce():
    generator = torch.Generator().manual_seed(0)
    logprob = -torch.rand(4, 3, generator=generator, dtype=torch.float64)
    advantage = torch.randn(4, 1, generator=generator, dtype=torch.float64)
    mask = torch.ones(4, 3)
    _, expected = value_and_gradient(policy_gradient, logprob, advantage)

    def gspo_token(x):
        logratio = sequence_logratio(x, logprob, mask, per_token=True)
        return clipped_surrogate(logratio, torch.zeros_like(logratio), advantage)

    for loss in (
        lambda x: clipped_weight_pg(x, logprob, advantage, 0.2, 0.2),
        lambda x: tapered_pg(x, logprob, advantage, mask),
        lambda x: decoupled_surrogate(x, logprob, logprob, advantage),
        gspo_token,
    ):
        _, gradient = value_and_gradient(loss, logprob)
        close(gradient, expected)


@pytest.mark.parametrize("name", ["gspo", "gspo_token", "cispo", "topr", "decoupled"])
def test_any_split_of_the_batch_gives_the_same_gradient(name):
    generator = torch.Generator().manual_seed(0)
    base, old, behavior = -torch.rand(3, 6, 5, generator=generator, dtype=torch.float64)
    advantage = torch.randn(6, 1, generator=generator, dtype=torch.float64)
    mask = torch.arange(5) < torch.tensor([[5], [1], [3], [0], [2], [4]])  # ragged, one without tokens

    def micro_batch(x, rows):
        o, b, a, m = old[rows], behavior[rows], advantage[rows], mask[rows]
        if name == "gspo":
            logratio = sequence_logratio(x, o, m)
            return aggregate(clipped_surrogate(logratio, logratio * 0, a.squeeze(1)), mode="sum", denominator=6)
        if name == "gspo_token":
            logratio = sequence_logratio(x, o, m, per_token=True)
            return aggregate(clipped_surrogate(logratio, logratio * 0, a), m, "sequence_mean", denominator=6)
        if name == "cispo":
            return aggregate(clipped_weight_pg(x, o, a, None, 0.28), m, "token_mean", denominator=15)
        if name == "topr":
            return aggregate(tapered_pg(x, b, a, m), m, "sum", denominator=6)
        return aggregate(decoupled_surrogate(x, o, b, a), m, "constant", denominator=30)

    gradients = []
    for size in (6, 3, 2, 1):
        x = base.clone().requires_grad_()
        for start in range(0, 6, size):
            rows = slice(start, start + size)
            micro_batch(x[rows], rows).backward()
        gradients.append(x.grad)
    assert gradients[0].abs().max() > 0.01
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0], rtol=0, atol=1e-14)


def test_different_ranks_are_refused():
    row, column, square = torch.zeros(2), torch.zeros(2, 1), torch.zeros(2, 2)
    for call in (
        lambda: sequence_logratio(square, square, row),
        lambda: clipped_weight_pg(square, square, row, None, 0.2),
        lambda: tapered_pg(square, square, row, square),
        lambda: tapered_pg(square, square, column, row),
    ):
        with pytest.raises(ValueError, match="different numbers of dimensions"):
            call()
