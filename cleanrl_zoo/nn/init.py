"""Initial weights drawn from a generator of the caller's."""

import math

import torch
from torch import nn


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
