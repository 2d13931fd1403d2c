"""Multilayer perceptrons with orthogonal initialisation."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from cleanrl_zoo.nn.init import orthogonal

ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU, "silu": nn.SiLU}


def mlp(
    sizes: Sequence[int],
    activation: str = "tanh",
    gains: Sequence[float] | None = None,
    generator: torch.Generator | None = None,
) -> nn.Sequential:
    """A chain of linear layers with `activation` between them and none after the last.

    Weights are orthogonal (Saxe et al., 2014) scaled by `gains`, biases zero.

    Args:
        sizes: widths from input to output, for example `[11, 64, 64, 3]`.
        activation: a key of `ACTIVATIONS`.
        gains: one per layer; by default √2 for hidden layers and 1 for the last.
        generator: the source of the initial weights; torch's global one by default.

    Raises:
        ValueError: for fewer than two sizes, an unknown activation, or a wrong number of gains.
    """
    layers = len(sizes) - 1
    if layers < 1:
        raise ValueError(f"sizes {list(sizes)}: at least an input and an output width are needed")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r}: allowed are {', '.join(ACTIVATIONS)}")
    gains = [math.sqrt(2.0)] * (layers - 1) + [1.0] if gains is None else list(gains)
    if len(gains) != layers:
        raise ValueError(f"{len(gains)} gains for {layers} layers: give one per layer")
    modules: list[nn.Module] = []
    for index, (fan_in, fan_out, gain) in enumerate(zip(sizes[:-1], sizes[1:], gains, strict=True)):
        # skip_init: the default initialiser would draw from the global generator first
        linear = orthogonal(nn.utils.skip_init(nn.Linear, fan_in, fan_out), gain, generator)
        modules += [linear] if index == layers - 1 else [linear, ACTIVATIONS[activation]()]
    return nn.Sequential(*modules)


def mlp_on_arrays(
    network: nn.Sequential, before: Callable[[np.ndarray], np.ndarray] | None = None
) -> Callable[[np.ndarray], np.ndarray]:
    """The function of a chain of float32 linear layers, relu and tanh, from arrays [B, D] to [B, out], by NumPy.

    It reads the network's own memory, so that later changes of the parameters in place are seen. For the few
    observations that one step acts on: a call of torch takes several times as long before it computes, and drives what
    the rest of the step needs out of the processor's caches. A network on another device is called there.

    Args:
        before: what happens to the arrays first, such as `ObsNormalizer.on_arrays()`.

    Raises:
        ValueError: where a layer is something else, or has no bias.
    """
    device = next(network.parameters()).device
    if device.type != "cpu":
        return _called_on(network, before, device)
    layers: list[Callable[[np.ndarray], np.ndarray]] = []
    for layer in network:
        if isinstance(layer, nn.ReLU):
            layers.append(lambda x: np.maximum(x, 0.0))
        elif isinstance(layer, nn.Tanh):
            layers.append(np.tanh)
        elif isinstance(layer, nn.Linear) and layer.bias is not None:
            weight, bias = layer.weight.detach().numpy().T, layer.bias.detach().numpy()
            layers.append(lambda x, weight=weight, bias=bias: x @ weight + bias)
        else:
            raise ValueError(f"a layer {layer}: allowed are Linear with a bias, ReLU and Tanh")

    def function(obs: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):  # what has diverged is told where the losses are checked
            features = (obs if before is None else before(obs)).astype(np.float32, copy=False)
            for layer in layers:
                features = layer(features)
        return features

    return function


def _called_on(
    network: nn.Sequential, before: Callable[[np.ndarray], np.ndarray] | None, device: torch.device
) -> Callable[[np.ndarray], np.ndarray]:
    @torch.no_grad()
    def function(obs: np.ndarray) -> np.ndarray:
        features = obs if before is None else before(obs)
        return network(torch.as_tensor(features, dtype=torch.float32, device=device)).cpu().numpy()

    return function
