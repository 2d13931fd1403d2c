import math

import pytest
import torch
from torch import nn

from cleanrl_zoo.core.distributions import Categorical, DiagGaussian
from cleanrl_zoo.core.trust_region import conjugate_gradient, fisher_factors, fisher_vector_product, line_search


def close(actual, expected):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=torch.float64), rtol=0, atol=1e-9)


def test_conjugate_gradient_solves_in_as_many_steps_as_dimensions():
    # H = [[4, 1], [1, 3]], b = (1, 2): x = (1/11, 7/11)
    matrix = torch.tensor([[4.0, 1.0], [1.0, 3.0]], dtype=torch.float64)
    b = torch.tensor([1.0, 2.0], dtype=torch.float64)
    close(conjugate_gradient(lambda v: matrix @ v, b, 2), [1 / 11, 7 / 11])
    # one step is steepest descent: (b.b / b.Hb) b = 5/20 b
    close(conjugate_gradient(lambda v: matrix @ v, b, 1), [0.25, 0.5])
    assert torch.equal(b, torch.tensor([1.0, 2.0], dtype=torch.float64))


def test_conjugate_gradient_stops_when_done():
    calls = []

    def identity(v):
        calls.append(v)
        return v

    b = torch.tensor([3.0, 4.0], dtype=torch.float64) * 1e-12  # small is not the same as solved
    close(conjugate_gradient(identity, b, 50) / 1e-12, [3, 4])
    assert len(calls) == 1
    assert torch.equal(conjugate_gradient(identity, torch.zeros(2), 10), torch.zeros(2))
    for sign in (-1, 0):  # not positive definite: no step along such a direction
        assert torch.equal(conjugate_gradient(lambda v, sign=sign: sign * v, torch.ones(2), 10), torch.zeros(2))


def gaussian_policy():
    """mean = weight * 2, one free-standing log_std; std 1/2."""
    weight = torch.tensor([0.3], dtype=torch.float64, requires_grad=True)
    log_std = torch.tensor([math.log(0.5)], dtype=torch.float64, requires_grad=True)
    old = DiagGaussian((weight * 2).detach(), log_std.detach().clone())
    return (weight, log_std), lambda: old.kl(DiagGaussian(weight * 2, log_std))


def test_fisher_vector_product_by_hand():
    # Fisher of N(m, s): 1/s^2 = 4 for m, 2 for log s. m = 2w, so 2^2 * 4 = 16 for w. Damping .1 is added to both.
    parameters, kl = gaussian_policy()
    vector = torch.tensor([1.0, 10.0], dtype=torch.float64)
    close(fisher_vector_product(kl, parameters, vector, 0.1), [16.1, 21])
    value = kl()
    for _ in range(2):  # the graph is kept for the next product
        close(fisher_vector_product(value, parameters, vector, 0.0), [16, 20])
    # a tensor the KL does not depend on gets damping alone
    unused = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    vector = torch.tensor([1.0, 10.0, 5.0], dtype=torch.float64)
    close(fisher_vector_product(value, (*parameters, unused), vector, 0.1), [16.1, 21, 0.5])


def test_fisher_factors_by_hand():
    # the same numbers as above: J = (2, 1), M = (4, 2); a parameter that no output depends on gets damping alone
    (weight, log_std), _ = gaussian_policy()
    unused = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    mean, shared = weight * 2, log_std * 1
    kl = DiagGaussian(mean.detach(), shared.detach()).kl(DiagGaussian(mean, shared))
    factors = fisher_factors(kl, (mean, shared), (weight, log_std, unused))
    for _ in range(2):  # the graph is kept for the next product
        vector = torch.tensor([1.0, 10.0, 5.0], dtype=torch.float64)
        close(fisher_vector_product(factors, (weight, log_std, unused), vector, 0.1), [16.1, 21, 0.5])
    with pytest.raises(ValueError, match="one flat vector of 3"):
        fisher_vector_product(factors, (weight, log_std, unused), vector[:2], 0.1)


def test_fisher_of_two_actions_is_the_enumerated_one():
    # logits (0, θ): p = σ(θ). Fisher = E[(∂ log p(a)/∂θ)²] = (1 − p)p² + p(1 − p)² = p(1 − p); p = 1/4: 3/16.
    theta = torch.tensor([-math.log(3)], dtype=torch.float64, requires_grad=True)
    policy = Categorical(torch.cat([torch.zeros(1, dtype=torch.float64), theta]))
    kl = Categorical(policy.logits.detach()).kl(policy)
    vector = torch.tensor([2.0], dtype=torch.float64)
    close(fisher_vector_product(kl, (theta,), vector, 0.0), [3 / 8])
    close(fisher_vector_product(fisher_factors(kl, (policy.logits,), (theta,)), (theta,), vector, 0.0), [3 / 8])


@pytest.mark.parametrize("kind", [DiagGaussian, Categorical])
def test_fisher_products_agree_and_are_the_mean_outer_product_of_scores(kind):
    """Both ways against E_s E_a[∇log π ∇log πᵀ], the expectation over actions exact: by enumeration, or as
    Σ_A (∇μ ∇μᵀ / σ² + 2 ∇log σ ∇log σᵀ), the integral of the Gaussian's."""
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    parameters = list(network.parameters())
    log_std = nn.Parameter(torch.tensor([0.3, -0.7], dtype=torch.float64))
    obs = torch.randn(5, 3).double()
    gaussian = kind is DiagGaussian
    parameters += [log_std] if gaussian else []

    def scores(scalar):
        parts = torch.autograd.grad(scalar, parameters, retain_graph=True, materialize_grads=True)
        return torch.cat([part.reshape(-1) for part in parts])

    fisher = 0.0
    for row in obs:
        if gaussian:
            mean, variance = network(row), (2 * log_std).exp()
            terms = [(scores(m), 1 / v) for m, v in zip(mean, variance, strict=True)]
            terms += [(scores(s), 2.0) for s in log_std]
        else:
            logp = network(row).log_softmax(-1)
            terms = [(scores(value), value.exp()) for value in logp]
        fisher = fisher + sum(weight * torch.outer(score, score) for score, weight in terms).detach() / len(obs)

    policy = kind(network(obs), log_std) if gaussian else kind(network(obs))
    outputs = (policy.mean, policy.log_std) if gaussian else (policy.logits,)
    kl = kind(*(output.detach().clone() for output in outputs)).kl(policy).mean()
    factors = fisher_factors(kl, outputs, parameters)
    for vector in torch.randn(3, len(fisher)).double():
        expected = fisher @ vector + 0.1 * vector
        close(fisher_vector_product(kl, parameters, vector, 0.1), expected)
        close(fisher_vector_product(factors, parameters, vector, 0.1), expected)


def natural_step():
    """A policy, its surrogate and the full TRPO step with KL bound delta."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    log_std = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    parameters = [*network.parameters(), log_std]
    obs, advantage = torch.randn(64, 3).double(), torch.randn(64).double()
    with torch.no_grad():
        old = DiagGaussian(network(obs), log_std.clone())
        action = old.sample()
        old_logprob = old.log_prob(action)

    def evaluate():
        new = DiagGaussian(network(obs), log_std)
        return -(torch.exp(new.log_prob(action) - old_logprob) * advantage).mean(), old.kl(new).mean()

    loss, kl = evaluate()
    gradient = torch.cat([part.reshape(-1) for part in torch.autograd.grad(loss, parameters, retain_graph=True)])

    def matvec(vector):
        return fisher_vector_product(kl, parameters, vector, 0.1)

    direction = -conjugate_gradient(matvec, gradient, 10)
    return parameters, evaluate, direction, direction @ matvec(direction)


def test_a_trust_region_step_improves_within_the_bound_and_moves_log_std():
    max_kl = 0.01
    parameters, evaluate, direction, curvature = natural_step()
    assert curvature > 0
    before = [parameter.clone() for parameter in parameters]
    loss_before, kl_before = evaluate()
    assert kl_before == 0
    result = line_search(evaluate, direction * (2 * max_kl / curvature).sqrt(), parameters, max_kl)
    loss, kl = evaluate()
    assert result.accepted and result.loss == loss.item() < loss_before.item()
    assert 0 < result.kl == kl.item() <= max_kl
    assert all(not torch.equal(parameter, start) for parameter, start in zip(parameters, before, strict=True))


def test_a_forced_failure_leaves_the_parameters_bit_equal():
    parameters, evaluate, direction, curvature = natural_step()
    with torch.no_grad():
        parameters[0][0, 0] = -0.0
        parameters[0][0, 1] = 5e-324
    before = [parameter.detach().clone() for parameter in parameters]
    failures = {
        "uphill": (evaluate, -direction * (0.02 / curvature).sqrt(), 0.01),
        "kl never small enough": (evaluate, direction * (0.02 / curvature).sqrt(), -1.0),
        "nan": (lambda: (torch.tensor(torch.nan), torch.tensor(0.0)), direction, 0.01),
    }
    for evaluate_, step, max_kl in failures.values():
        result = line_search(evaluate_, step, parameters, max_kl)
        assert not result.accepted and result.fraction == 0
        for parameter, start in zip(parameters, before, strict=True):
            assert torch.equal(parameter.detach().view(torch.int64), start.view(torch.int64))


def test_an_error_while_searching_leaves_the_parameters_bit_equal():
    parameter = torch.tensor([1.0, 2.0])
    answers = iter([(1.0, 0.0)])
    with pytest.raises(StopIteration):
        line_search(lambda: next(answers), torch.ones(2), [parameter], 0.1)
    assert torch.equal(parameter, torch.tensor([1.0, 2.0]))


def test_backtracking_by_hand():
    # loss (x - 1)^2 from 0, kl x^2/2 <= .02 so x <= .2; steps 1, 1/2, 1/4, 1/8: 1/8 passes
    x = torch.zeros(1, dtype=torch.float64)

    def evaluate():
        return (x - 1).square().sum(), x.square().sum() / 2

    result = line_search(evaluate, torch.ones(1, dtype=torch.float64), [x], 0.02)
    assert result == (True, 0.125, 0.765625, 0.0078125)  # (7/8)^2, 1/128
    assert x.item() == 0.125
    with pytest.raises(ValueError, match="one flat vector of 1"):
        line_search(evaluate, torch.ones(2), [x], 0.02)
