import math

import numpy as np
import pytest
import torch

from cleanrl_zoo.nn import Adam, RMSprop, clip_grad_norm, mlp, mlp_on_arrays
from cleanrl_zoo.nn.mlp import _called_on


def test_first_adam_step_by_hand():
    # m = .1·g, v = .001·g², corrected: m̂ = g, v̂ = g²; step = lr·g/(|g| + eps) = .1·2/(2 + 1e-8)
    parameter = torch.tensor([1.0], dtype=torch.float64)
    optimizer = Adam([parameter], eps=1e-8)
    optimizer.step([torch.tensor([2.0], dtype=torch.float64)], torch.tensor(0.1, dtype=torch.float64))
    assert parameter.item() == pytest.approx(1 - 0.2 / (2 + 1e-8), abs=1e-12)


@pytest.mark.parametrize("eps", [1e-8, 1e-5])
def test_adam_equals_torch_over_500_steps(eps):
    torch.manual_seed(0)
    ours = torch.nn.Parameter(torch.randn(5, 3, dtype=torch.float64))
    theirs = torch.nn.Parameter(ours.detach().clone())
    optimizer, reference = Adam([ours], eps=eps), torch.optim.Adam([theirs], lr=0.01, eps=eps)
    for step in range(500):
        grad = torch.randn(5, 3, dtype=torch.float64)
        reference.param_groups[0]["lr"] = 0.01 * (1 - step / 500)
        theirs.grad = grad.clone()
        reference.step()
        optimizer.step([grad], torch.tensor(0.01 * (1 - step / 500), dtype=torch.float64))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_adam_resumes_bit_equal():
    torch.manual_seed(0)
    first = torch.randn(4)
    second = first.clone()
    one, two = Adam([first]), Adam([second])
    grads, rate = [torch.randn(4) for _ in range(6)], torch.tensor(0.01)
    for grad in grads[:3]:
        one.step([grad], rate)
    saved = {"steps": one.steps.clone(), "exp_avg": [one.exp_avg[0].clone()], "exp_avg_sq": [one.exp_avg_sq[0].clone()]}
    second.copy_(first)
    two.load_state_dict(saved)
    for grad in grads[3:]:
        one.step([grad], rate)
        two.step([grad], rate)
    assert torch.equal(first, second) and torch.equal(one.exp_avg_sq[0], two.exp_avg_sq[0])


def test_two_rmsprop_steps_by_hand():
    """α = 3/4, ε = 1, η = 1/2, gradients 4 and 0, θ = 1, v = 0. Step 1: v = ¼·16 = 4, step 2: v = ¾·4 = 3, no move.

    Inside the root: θ = 1 − ½·4/√(4 + 1) = 1 − 2/√5. Outside: θ = 1 − ½·4/(2 + 1) = 1/3.
    """
    for inside, expected in ((True, 1 - 2 / math.sqrt(5)), (False, 1 / 3)):
        parameter = torch.tensor([1.0], dtype=torch.float64)
        optimizer = RMSprop([parameter], alpha=0.75, eps=1.0, eps_inside_root=inside)
        for grad in (4.0, 0.0):
            optimizer.step([torch.tensor([grad], dtype=torch.float64)], torch.tensor(0.5, dtype=torch.float64))
        assert parameter.item() == pytest.approx(expected, abs=1e-12)
        assert optimizer.square_avg[0].item() == pytest.approx(3.0, abs=1e-12)


def test_rmsprop_equals_torch_over_500_steps():
    """torch's ε stands outside the root; inside it, ε² does nearly the same and ε does not."""
    torch.manual_seed(0)
    start, grads = torch.randn(5, 3, dtype=torch.float64), torch.randn(500, 5, 3, dtype=torch.float64) * 1e-2
    theirs = torch.nn.Parameter(start.clone())
    reference = torch.optim.RMSprop([theirs], lr=0.01, alpha=0.99, eps=1e-2)
    options = ({"eps_inside_root": False}, {}, {"eps": 1e-4})
    ours = [torch.nn.Parameter(start.clone()) for _ in options]
    optimizers = [RMSprop([p], **{"eps": 1e-2, **o}) for p, o in zip(ours, options, strict=True)]
    for step, grad in enumerate(grads):
        reference.param_groups[0]["lr"] = 0.01 * (1 - step / 500)
        theirs.grad = grad.clone()
        reference.step()
        for optimizer in optimizers:
            optimizer.step([grad], torch.tensor(0.01 * (1 - step / 500), dtype=torch.float64))
    torch.testing.assert_close(ours[0], theirs, rtol=1e-9, atol=1e-12)
    distance = [(p - theirs).norm() / (theirs - start).norm() for p in ours]
    assert distance[1] > 0.5 > distance[2] > 1e-3


def test_rmsprop_resumes_bit_equal():
    torch.manual_seed(0)
    first = torch.randn(4)
    one, grads, rate = RMSprop([first]), [torch.randn(4) for _ in range(6)], torch.tensor(0.01)
    for grad in grads[:3]:
        one.step([grad], rate)
    second = first.clone()
    two = RMSprop([second])
    held = two.square_avg[0]
    two.load_state_dict({"square_avg": [one.state_dict()["square_avg"][0].clone()]})
    assert two.square_avg[0] is held  # in place: compiled code holds the tensor
    for grad in grads[3:]:
        one.step([grad], rate)
        two.step([grad], rate)
    assert torch.equal(first, second) and torch.equal(one.square_avg[0], two.square_avg[0])


def test_clip_by_hand():
    # norm of (3, 4) over two tensors is 5; clipped to 1: divided by 5 (+1e-6)
    grads, norm = clip_grad_norm([torch.tensor([3.0]), torch.tensor([4.0])], 1.0)
    assert norm.item() == 5.0
    torch.testing.assert_close(torch.cat(grads), torch.tensor([0.6, 0.8]), atol=1e-6, rtol=0)
    grads, _ = clip_grad_norm([torch.tensor([0.3]), torch.tensor([0.4])], 1.0)
    assert torch.cat(grads).tolist() == pytest.approx([0.3, 0.4])  # a short gradient is left alone


def test_mlp_is_orthogonal_and_leaves_the_global_generator_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    net = mlp([4, 8, 3], "relu", generator=torch.Generator().manual_seed(1))
    assert torch.equal(before, torch.get_rng_state())
    w = net[0].weight
    torch.testing.assert_close(w.T @ w, 2 * torch.eye(4), atol=1e-5, rtol=0)  # gain √2
    w = net[2].weight
    torch.testing.assert_close(w @ w.T, torch.eye(3), atol=1e-5, rtol=0)  # gain 1
    assert net[0].bias.abs().sum() == 0 and isinstance(net[1], torch.nn.ReLU)
    assert torch.equal(w, mlp([4, 8, 3], "relu", generator=torch.Generator().manual_seed(1))[2].weight)


@pytest.mark.parametrize(
    "kwargs", [{"sizes": [3]}, {"sizes": [3, 2], "activation": "sine"}, {"sizes": [3, 2], "gains": [1.0, math.e]}]
)
def test_mlp_refuses_in_one_line(kwargs):
    with pytest.raises(ValueError) as error:
        mlp(**kwargs)
    assert "\n" not in str(error.value)


def test_mlp_on_arrays_reads_the_networks_own_memory():
    """2·relu(x₁ − x₂ + 1) − 3 by hand, then with the last weight changed in place."""
    net = mlp([2, 1, 1], "relu")
    for parameter, value in zip(net.parameters(), ([[1.0, -1.0]], [1.0], [[2.0]], [-3.0]), strict=True):
        parameter.data.copy_(torch.tensor(value))
    function, obs = mlp_on_arrays(net), np.array([[1.0, 0.5], [0.0, 4.0]])
    assert function(obs).tolist() == [[0.0], [-3.0]] and function(obs).dtype == np.float32
    net[2].weight.data.fill_(4.0)
    assert function(obs).tolist() == [[3.0], [-3.0]]
    with pytest.raises(ValueError, match="SiLU"):
        mlp_on_arrays(mlp([2, 1, 1], "silu"))


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_mlp_on_arrays_is_the_network(activation):
    """With what comes before it, and float64 in: the network gets float32, as torch's gets."""
    net, obs = mlp([5, 16, 16, 2], activation), np.random.default_rng(0).normal(size=(7, 5))
    with torch.no_grad():
        expected = net(torch.as_tensor(2 * obs + 1, dtype=torch.float32))
    function = mlp_on_arrays(net, lambda x: 2 * x + 1)
    torch.testing.assert_close(torch.from_numpy(function(obs)), expected, rtol=1e-5, atol=1e-6)
    elsewhere = _called_on(net, lambda x: 2 * x + 1, torch.device("cpu"))  # as on a device that NumPy cannot read
    assert np.array_equal(elsewhere(obs), expected.numpy())
