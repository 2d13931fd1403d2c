import math

import pytest
import torch

from cleanrl_zoo.core.kl import AdaptiveKL, categorical_kl, k1, k2, k3

P, Q = 0.6, 0.5  # two actions, pi = (P, 1 - P), ref = (Q, 1 - Q)


def policy():
    """theta, log pi and log ref, with pi = softmax(theta, 0)."""
    theta = torch.tensor(math.log(P / (1 - P)), dtype=torch.float64, requires_grad=True)
    logp = torch.stack((theta, torch.zeros_like(theta))).log_softmax(0)
    return theta, logp, torch.tensor([Q, 1 - Q], dtype=torch.float64).log()


def close(actual, expected):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=torch.float64), rtol=0, atol=1e-9)


def test_estimators_by_hand():
    # p = 2q: log p - log q = log 2
    sampled, other = torch.tensor([0.5, 0.25], dtype=torch.float64).log()
    close(k1(sampled, other), math.log(2))
    close(k2(sampled, other), math.log(2) ** 2 / 2)
    close(k3(sampled, other), 0.5 - 1 + math.log(2))
    # k3 keeps its digits near zero in float32: d^2/2 for d = 1e-4, where e^d - 1 would be off by 1e-7
    tiny = torch.tensor(1e-4)
    torch.testing.assert_close(k3(tiny * 0, tiny), torch.tensor(0.5e-8), rtol=0.01, atol=0)
    for estimator in (k1, k2, k3):
        with pytest.raises(ValueError, match="different numbers of dimensions"):
            estimator(torch.zeros(2), torch.zeros(2, 1))


def test_means_by_full_enumeration():
    _, logp, logq = policy()
    exact = P * math.log(P / Q) + (1 - P) * math.log((1 - P) / (1 - Q))
    for estimator in (k1, k3):
        close((logp.exp() * estimator(logp, logq)).sum().detach(), exact)
    assert (k3(logp, logq) >= 0).all()


def test_gradients_by_full_enumeration():
    # d log pi_1 / d theta = 1 - P, d log pi_2 / d theta = -P, so d pi_1 = P(1 - P) = .24 = -d pi_2.
    # grad KL(pi||ref) = sum d pi * log(pi/ref) = .24 (log .6/.5 - log .4/.5) = .24 log 1.5
    # grad KL(ref||pi) = -sum ref * d log pi = -Q(1 - P) + (1 - Q)P = P - Q = .1
    reverse, forward = 0.24 * math.log(1.5), 0.1
    for estimator, expected in ((k1, 0.0), (k2, reverse), (k3, forward)):
        theta, logp, logq = policy()
        (logp.exp().detach() * estimator(logp, logq)).sum().backward()  # the mean over samples, as a loss sees it
        close(theta.grad, expected)
    # the ratio to the sampling policy, left differentiable, restores the gradient of KL(pi||ref)
    for estimator in (k1, k3):
        theta, logp, logq = policy()
        ratio = torch.exp(logp - logp.detach())
        (logp.exp().detach() * ratio * estimator(logp, logq)).sum().backward()
        close(theta.grad, reverse)
    theta, logp, logq = policy()
    categorical_kl(logp, logq).backward()
    close(theta.grad, reverse)
    theta, logp, logq = policy()
    categorical_kl(logq, logp).backward()
    close(theta.grad, forward)


def test_categorical_kl():
    logits = torch.tensor([[0.3, -1.0, 2.0], [0.0, 0.0, 5.0]], dtype=torch.float64)
    close(categorical_kl(logits, logits + 3), [0, 0])  # logits need no normalisation
    # (1/2, 1/2, 0) against (1/4, 1/4, 1/2): log 2; the excluded action adds nothing, gradient included
    p = torch.tensor([0.0, 0.0, -torch.inf], dtype=torch.float64, requires_grad=True)
    kl = categorical_kl(p, torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64).log())
    close(kl.detach(), math.log(2))
    kl.backward()
    assert p.grad.isfinite().all()
    both = categorical_kl(p.detach(), torch.tensor([1.0, 1.0, -torch.inf], dtype=torch.float64))
    close(both, 0)
    with pytest.raises(ValueError, match="different numbers of dimensions"):
        categorical_kl(logits, logits[0])


def test_adaptive_coefficient_double_halve():
    adaptive = AdaptiveKL(target=0.01, coef=1.0)
    assert adaptive.update(0.0151) == 2.0
    assert adaptive.update(0.0149) == 2.0  # inside the band: unchanged
    assert adaptive.update(0.0068) == 2.0
    assert adaptive.update(torch.tensor(0.0066)) == 1.0
    assert adaptive.coef == 1.0


def test_adaptive_coefficient_proportional():
    adaptive = AdaptiveKL(target=6.0, coef=0.2, rule="proportional", horizon=10_000)
    # KL 6.6: error .1, n 256: .2 * (1 + .1 * .0256)
    assert adaptive.update(6.6, 256) == pytest.approx(0.2 * 1.00256, abs=1e-12)
    # KL 60 and 0: error clipped to +-.2
    adaptive.coef = 0.2
    assert adaptive.update(60.0, 256) == pytest.approx(0.2 * 1.00512, abs=1e-12)
    adaptive.coef = 0.2
    assert adaptive.update(0.0, 256) == pytest.approx(0.2 * 0.99488, abs=1e-12)


def test_adaptive_coefficient_stays_positive():
    """Of a horizon of 10 at a KL of 0, 49 samples leave 1 − 0.2 · 4.9 = 0.02 of the coefficient; 50 would leave 0."""
    adaptive = AdaptiveKL(target=1.0, coef=1.0, rule="proportional", horizon=10)
    assert adaptive.update(0.0, 49) == pytest.approx(0.02)
    with pytest.raises(ValueError, match="50 samples against a horizon of 10"):
        adaptive.update(0.0, 50)


def test_a_kl_of_nan_leaves_the_coefficient_and_is_refused_as_a_setting():
    for rule in ("double_halve", "proportional"):
        adaptive = AdaptiveKL(target=1.0, coef=0.5, rule=rule, horizon=10)
        assert adaptive.update(math.nan) == 0.5
    for settings in ({"target": math.nan, "coef": 1.0}, {"target": 1.0, "coef": math.nan}):
        with pytest.raises(ValueError, match="nan"):
            AdaptiveKL(**settings)


def test_adaptive_coefficient_resumes():
    first = AdaptiveKL(target=0.01, coef=1.0)
    first.update(1.0)
    second = AdaptiveKL(target=0.01, coef=1.0)
    second.load_state_dict(first.state_dict())
    assert second.update(1.0) == first.update(1.0) == 4.0


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"target": 1.0, "coef": 1.0, "rule": "triple"}, "'triple' is unknown; choose one of double_halve"),
        ({"target": 0.0, "coef": 1.0}, "target 0.0"),
        ({"target": 1.0, "coef": -1.0}, "coef -1.0"),
        ({"target": 1.0, "coef": 1.0, "rule": "proportional"}, "horizon None"),
    ],
)
def test_adaptive_coefficient_refuses(kwargs, message):
    with pytest.raises(ValueError, match=message):
        AdaptiveKL(**kwargs)
