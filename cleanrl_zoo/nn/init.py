"""Initial weights drawn from a generator of the caller's."""

import math

import torch
from torch import nn


def orthogonal(layer: nn.Module, gain: float, generator: torch.Generator | None = None) -> nn.Module:
    """Draws the weights of a linear or convolutional layer orthogonal (Saxe et al., 2014) times `gain`; biases zero.

    Returns `layer`.
    """
    nn.init.orthogonal_(layer.weight, gain, generator=generator)
    nn.init.zeros_(layer.bias)
    return layer


@torch.no_grad()
def uniform_fan_in(network: nn.Module, generator: torch.Generator | None = None) -> nn.Module:
    """Draws the weights and biases of all linear layers anew, uniform in ±1/√fan_in: torch's own default.

    Returns `network`.
    """
    for layer in network.modules():
        if isinstance(layer, nn.Linear):
            bound = 1.0 / math.sqrt(layer.in_features)
            for tensor in layer.parameters(recurse=False):
                tensor.uniform_(-bound, bound, generator=generator)
    return network
