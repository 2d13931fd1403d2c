"""The batched networks, their initial weights, and the head of a squashed Gaussian policy."""

import math

import pytest
import torch
import torch.nn.functional as F

from cleanrl_zoo.nn import EnsembleMLP, mlp, squashed_gaussian, uniform_fan_in


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def alone(ensemble, member, x):
    """The same network by torch's own linear layers."""
    layers = list(zip(ensemble.weights, ensemble.biases, strict=True))
    for index, (weight, bias) in enumerate(layers):
        x = F.linear(x, weight[member].T, bias[member, 0])
        x = torch.relu(x) if index < len(layers) - 1 else x
    return x


@pytest.mark.parametrize("outputs", [1, 2])
def test_every_member_is_a_network_of_its_own(outputs):
    ensemble = EnsembleMLP(3, [4, 16, 8, outputs], generator=generator()).double()
    shared, own = torch.randn(5, 4, dtype=torch.float64), torch.randn(3, 5, 4, dtype=torch.float64)
    assert ensemble(shared).shape == ensemble(own).shape == (3, 5, outputs)
    for member in range(3):
        torch.testing.assert_close(ensemble(shared)[member], alone(ensemble, member, shared))
        torch.testing.assert_close(ensemble(own)[member], alone(ensemble, member, own[member]))


def test_a_members_loss_moves_that_member_only():
    ensemble = EnsembleMLP(2, [3, 8, 1], generator=generator())
    grads = torch.autograd.grad(ensemble(torch.randn(6, 3))[0].sum(), list(ensemble.parameters()))
    assert all(grad[0].abs().sum() > 0 and grad[1].abs().sum() == 0 for grad in grads)


def test_members_begin_apart_uniform_in_one_over_root_fan_in():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    ensemble = EnsembleMLP(2, [100, 400, 1], generator=generator(1))
    assert torch.equal(before, torch.get_rng_state())
    for tensor, fan_in in ((ensemble.weights[0], 100), (ensemble.weights[1], 400), (ensemble.biases[0], 100)):
        bound = 1 / math.sqrt(fan_in)
        assert 0.98 * bound < tensor.abs().max() <= bound
        assert tensor.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)  # of a uniform one
        assert not torch.equal(tensor[0], tensor[1])
    again = EnsembleMLP(2, [100, 400, 1], generator=generator(1))
    assert all(torch.equal(a, b) for a, b in zip(ensemble.parameters(), again.parameters(), strict=True))


def test_uniform_fan_in_draws_every_layer_anew():
    torch.manual_seed(0)
    network = mlp([100, 400, 3], "relu", generator=generator(0))
    before = torch.get_rng_state()
    assert uniform_fan_in(network, generator(1)) is network
    assert torch.equal(before, torch.get_rng_state())
    for layer, fan_in in ((network[0], 100), (network[2], 400)):
        bound = 1 / math.sqrt(fan_in)
        assert 0.98 * bound < layer.weight.abs().max() <= bound and 0 < layer.bias.abs().max() <= bound
        assert layer.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)


@pytest.mark.parametrize("arguments", [(0, [3, 2]), (2, [3]), (2, [3, 2], "sine")])
def test_ensemble_refuses_in_one_line(arguments):
    with pytest.raises(ValueError) as error:
        EnsembleMLP(*arguments)
    assert "\n" not in str(error.value)


def test_squashed_head_by_hand():
    """Two outputs per action, means first. y = 0: log σ in the middle of [−5, 2], −1.5; y = ±∞: at the ends. The box
    [0, 4] has its middle 2 at mean 0, and atanh(½) lands on 2 + 2·½ = 3."""
    output = torch.tensor([[0.0, math.atanh(0.5), 0.0, 100.0], [0.0, 0.0, -100.0, math.atanh(0.5)]])
    policy = squashed_gaussian(output, torch.zeros(2), torch.full((2,), 4.0), -5.0, 2.0)
    torch.testing.assert_close(policy.mode(), torch.tensor([[2.0, 3.0], [2.0, 2.0]]))
    expected = torch.tensor([[-1.5, 2.0], [-5.0, -1.5 + 3.5 * 0.5]])
    torch.testing.assert_close(policy.base.log_std, expected)
