"""The convolutional network of Mnih et al. (2015)."""

import numpy as np
import pytest
import torch
from torch import nn

from cleanrl_zoo.nn import nature_cnn


def test_shapes_and_number_of_weights():
    """84 → (84 − 8)/4 + 1 = 20 → (20 − 4)/2 + 1 = 9 → (9 − 3)/1 + 1 = 7, and 7 · 7 · 64 = 3136 features to 512.

    Weights and biases: (4·8·8 + 1)·32 + (32·4·4 + 1)·64 + (64·3·3 + 1)·64 + (3136 + 1)·512 = 1,684,128.
    """
    network = nature_cnn((4, 84, 84))
    assert sum(p.numel() for p in network.parameters()) == 8224 + 32832 + 36928 + 1606144 == 1684128
    frames = torch.randint(0, 256, (3, 4, 84, 84), dtype=torch.uint8)
    features = network(frames)
    assert features.shape == (3, 512) and features.dtype == torch.float32 and (features >= 0).all()
    assert nature_cnn((4, 36, 36), (2, 3, 5), 7)(frames[..., :36, :36]).shape == (3, 7)


def test_the_same_numbers_as_torchs_functions_written_out():
    network, frames = nature_cnn((4, 84, 84)), torch.randint(0, 256, (2, 4, 84, 84), dtype=torch.uint8)
    (w1, b1), (w2, b2), (w3, b3), (w4, b4) = zip(*[iter(network.parameters())] * 2, strict=True)
    x = frames.float() / 255
    for weight, bias, stride in ((w1, b1, 4), (w2, b2, 2), (w3, b3, 1)):
        x = torch.relu(nn.functional.conv2d(x, weight, bias, stride))
    expected = torch.relu(x.reshape(2, 3136) @ w4.T + b4)
    torch.testing.assert_close(network(frames), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(network(frames.float()), network(frames))  # bytes, or the same numbers as floats


def test_weights_are_orthogonal_and_come_from_the_generator():
    one, two, other = (nature_cnn((4, 84, 84), generator=torch.Generator().manual_seed(k)) for k in (0, 0, 1))
    for a, b, c in zip(one.parameters(), two.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        if a.dim() == 1:
            assert not a.any()  # biases
            continue
        assert not torch.equal(a, c)
        rows = a.flatten(1)  # fewer rows than columns: W Wᵀ = 2 I for a gain of √2
        torch.testing.assert_close(rows @ rows.T, 2 * torch.eye(len(rows)), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            dict(obs_shape=(4, 35, 84)),
            "obs_shape (4, 35, 84): must be (channels, height, width), each side at least 36",
        ),
        (dict(obs_shape=(84, 84)), "obs_shape (84, 84): must be"),
        (dict(obs_shape=(4, 84, 84), channels=(32, 64)), "channels (32, 64): the network has 3 convolutions"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError) as caught:
        nature_cnn(**arguments)
    assert message in str(caught.value)


def test_gradients_do_not_depend_on_the_memory_format_of_the_frames():
    network, frames = nature_cnn((4, 36, 36), (4, 4, 4), 8), torch.randint(0, 256, (8, 4, 36, 36), dtype=torch.uint8)
    other = frames.contiguous(memory_format=torch.channels_last)
    for a, b in zip(
        *(torch.autograd.grad(network(x).sum(), list(network.parameters())) for x in (frames, other)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
