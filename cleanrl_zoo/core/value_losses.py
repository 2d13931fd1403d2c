"""Value losses: ½ included, unreduced, and only for equal shapes, since [B, 1] against [B] would compare all pairs."""

import torch
from torch import Tensor

from cleanrl_zoo.core.shapes import check_equal


def squared_value_loss(value: Tensor, returns: Tensor) -> Tensor:
    """½ (V − R)². Raises ValueError for unequal shapes."""
    check_equal(value=value, returns=returns)
    return 0.5 * (value - returns).square()


def clipped_value_loss(value: Tensor, old_value: Tensor, returns: Tensor, clip: float) -> Tensor:
    """½ max((V − R)², (V_old + clip(V − V_old, ±clip) − R)²): no reward for moving beyond ``clip`` of the old value.

    OpenAI baselines' PPO2 (Engstrom et al. 2020, section 3); ``clip`` is in units of the value. Raises ValueError for
    unequal shapes.
    """
    check_equal(value=value, old_value=old_value, returns=returns)
    clipped = old_value + (value - old_value).clamp(-clip, clip)
    return 0.5 * torch.maximum((value - returns).square(), (clipped - returns).square())
