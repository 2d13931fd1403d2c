"""Several networks of one shape, evaluated as one batched product per layer."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cleanrl_zoo.nn.mlp import ACTIVATIONS


class EnsembleMLP(nn.Module):
    """`members` independent multilayer perceptrons E whose layers are one batched matrix product each.

    Weights and biases begin uniform in ±1/√fan_in, as torch's linear layers do, every member from draws of its own.

    Args:
        members: number of networks E.
        sizes: widths from input to output, for example `[14, 256, 256, 1]`.
        activation: a key of `ACTIVATIONS`; stands between the layers, not after the last.
        generator: the source of the initial weights; torch's global one by default.

    Raises:
        ValueError: for no member, fewer than two sizes, or an unknown activation.
    """

    def __init__(
        self, members: int, sizes: Sequence[int], activation: str = "relu", generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        if members < 1 or len(sizes) < 2:
            raise ValueError(f"{members} members of sizes {list(sizes)}: at least one member and two widths are needed")
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation {activation!r}: allowed are {', '.join(ACTIVATIONS)}")
        self.activation = ACTIVATIONS[activation]()
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for fan_in, fan_out in zip(sizes[:-1], sizes[1:], strict=True):
            bound = 1.0 / math.sqrt(fan_in)
            weight, bias = torch.empty(members, fan_in, fan_out), torch.empty(members, 1, fan_out)
            self.weights.append(nn.Parameter(weight.uniform_(-bound, bound, generator=generator)))
            self.biases.append(nn.Parameter(bias.uniform_(-bound, bound, generator=generator)))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, in], shared by all members, or [E, B, in], one batch each -> [E, B, out]."""
        if x.dim() == 2:
            x = x.expand(len(self.weights[0]), *x.shape)
        for index, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            # not baddbmm, which copies the biases over the whole result first; compiled, the sum joins what follows
            x = torch.bmm(self.activation(x) if index else x, weight) + bias
        return x
