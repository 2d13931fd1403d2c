"""The estimators as losses on sequences of different lengths; single actions are in test_core_kl."""

import math

import pytest
import torch

from cleanrl_zoo.core.kl import k1, k2, k3
from cleanrl_zoo.core.reduce import aggregate

P, Q = 0.6, 0.5  # probability of going on, of the policy and of the reference; the other token stops


@pytest.mark.parametrize("padding", [0.0, 3.0, -50.0])
@pytest.mark.parametrize(
    ("estimator", "corrected", "expected"),
    [
        # d log P/d theta = 1 - P, d log(1 - P)/d theta = -P for the logit theta of going on; per token
        # grad KL(pi||ref) = P(1 - P)(log P/Q - log (1-P)/(1-Q)) = .24 log 1.5 and grad KL(ref||pi) = P - Q = .1.
        # At most two tokens: stop; go, stop; go, go. The first is always there, the second with probability P.
        (k1, False, 0.0),
        (k2, False, 1.6 * 0.24 * math.log(1.5)),
        (k3, False, 1.6 * 0.1),
        (k3, True, 1.6 * 0.24 * math.log(1.5)),
    ],
)
def test_gradients_by_full_enumeration_of_ragged_sequences(estimator, corrected, expected, padding):
    theta = torch.tensor(math.log(P / (1 - P)), dtype=torch.float64, requires_grad=True)
    go, stop = torch.nn.functional.logsigmoid(theta), torch.nn.functional.logsigmoid(-theta)
    nothing = torch.full_like(theta, padding).detach()
    logprob = torch.stack((stop, nothing, go, stop, go, go)).view(3, 2)
    reference = torch.full((3, 2), math.log(Q), dtype=torch.float64)
    mask = torch.tensor([[1, 0], [1, 1], [1, 1]])
    probability = torch.tensor([[1 - P], [P * (1 - P)], [P * P]], dtype=torch.float64)

    kl = estimator(logprob, reference)
    if corrected:
        kl = torch.exp(logprob - logprob.detach()) * kl
    aggregate(probability * kl, mask, "sum", denominator=1).backward()
    torch.testing.assert_close(theta.grad, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-9)
