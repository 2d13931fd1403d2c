"""Networks, their initialisers, and the optimiser written as tensor code."""

from cleanrl_zoo.nn.mlp import ACTIVATIONS, mlp
from cleanrl_zoo.nn.optim import Adam, clip_grad_norm

__all__ = ["ACTIVATIONS", "Adam", "clip_grad_norm", "mlp"]
