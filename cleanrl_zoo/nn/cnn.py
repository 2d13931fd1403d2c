"""The convolutional network of Mnih et al. (2015, "Human-level control through deep reinforcement learning")."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cleanrl_zoo.nn.init import orthogonal

LAYERS = ((8, 4), (4, 2), (3, 1))  # kernel and stride of the three convolutions
SMALLEST = 36  # pixels a side that leave one at the end: ((36 − 8)/4 + 1 − 4)/2 + 1 = 3


class Scale(nn.Module):
    """Bytes as numbers from 0 to 1."""

    def forward(self, frames: Tensor) -> Tensor:
        # channels last in memory: the convolutions' gradients take two thirds of the time so
        return frames.to(torch.float32, memory_format=torch.channels_last) / 255.0


def nature_cnn(
    obs_shape: Sequence[int],
    channels: Sequence[int] = (32, 64, 64),
    hidden: int = 512,
    generator: torch.Generator | None = None,
) -> nn.Sequential:
    """Frames [N, C, H, W], bytes of 0 to 255 (or floats of that range), to features [N, hidden] after a last ReLU.

    Three convolutions (8×8 stride 4, 4×4 stride 2, 3×3 stride 1, without padding) and a dense layer, each with a ReLU.
    Weights are orthogonal with gain √2, biases zero.

    Args:
        obs_shape: (C, H, W).
        channels: filters of the three convolutions.
        hidden: width of the dense layer.
        generator: the source of the initial weights; torch's global one by default.

    Raises:
        ValueError: for frames smaller than 36 × 36 or another number of filters than three.
    """
    if len(obs_shape) != 3 or min(obs_shape[1:]) < SMALLEST:
        raise ValueError(
            f"obs_shape {tuple(obs_shape)}: must be (channels, height, width), each side at least {SMALLEST}"
        )
    if len(channels) != len(LAYERS):
        raise ValueError(f"channels {tuple(channels)}: the network has {len(LAYERS)} convolutions, give one each")
    modules: list[nn.Module] = [Scale()]
    gain = math.sqrt(2.0)
    depth, height, width = obs_shape
    for filters, (kernel, stride) in zip(channels, LAYERS, strict=True):
        # skip_init: the default initialiser would draw from the global generator first
        modules += [
            orthogonal(nn.utils.skip_init(nn.Conv2d, depth, filters, kernel, stride), gain, generator),
            nn.ReLU(),
        ]
        depth, height, width = filters, (height - kernel) // stride + 1, (width - kernel) // stride + 1
    dense = nn.utils.skip_init(nn.Linear, depth * height * width, hidden)
    return nn.Sequential(*modules, nn.Flatten(), orthogonal(dense, gain, generator), nn.ReLU())
