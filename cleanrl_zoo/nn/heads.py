"""From a network's last layer to an action distribution."""

import torch
from torch import Tensor, nn

from cleanrl_zoo.core.distributions import SquashedGaussian


def squashed_gaussian(
    output: Tensor, low: Tensor, high: Tensor, log_std_low: float, log_std_high: float
) -> SquashedGaussian:
    """The policy of a network with two outputs per action: the means, then the log standard deviations.

    output [..., 2A]; low, high [A]: the box of actions. With y the output, no gradient is cut off at a bound:
    log σ = log_std_low + (log_std_high − log_std_low)(1 + tanh y)/2.
    """
    mean, log_std = output.chunk(2, -1)
    log_std = log_std_low + 0.5 * (log_std_high - log_std_low) * (1.0 + torch.tanh(log_std))
    return SquashedGaussian(mean, log_std, low, high)


def dueling_as_linear(advantage: nn.Linear, value: nn.Linear) -> tuple[Tensor, Tensor]:
    """Weight [A, 2W] and bias [A] of the one layer that gives V + A − mean A (Wang et al. 2016, equation 9).

    advantage: W features to A actions; value: W other features to 1; the layer reads both, the advantage's first.
    """
    weight = torch.cat([advantage.weight - advantage.weight.mean(0), value.weight.expand_as(advantage.weight)], 1)
    return weight, advantage.bias - advantage.bias.mean() + value.bias
