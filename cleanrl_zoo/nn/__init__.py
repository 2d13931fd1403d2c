"""Networks, their initialisers, and the optimisers written as tensor code."""

from cleanrl_zoo.nn.cnn import nature_cnn
from cleanrl_zoo.nn.ensemble import EnsembleMLP, Fit, GaussianEnsemble, fit, fit_step, negative_log_likelihood
from cleanrl_zoo.nn.heads import dueling_as_linear, squashed_gaussian
from cleanrl_zoo.nn.init import uniform_fan_in
from cleanrl_zoo.nn.mlp import ACTIVATIONS, mlp, mlp_on_arrays
from cleanrl_zoo.nn.model_files import load_model, save_model
from cleanrl_zoo.nn.optim import Adam, RMSprop, clip_grad_norm, grad_norm
from cleanrl_zoo.nn.table import Table, epsilon_greedy_probs, greedy_probs, mean_error, new_table, sample_action

__all__ = [
    "ACTIVATIONS",
    "Adam",
    "EnsembleMLP",
    "Fit",
    "GaussianEnsemble",
    "RMSprop",
    "Table",
    "clip_grad_norm",
    "dueling_as_linear",
    "epsilon_greedy_probs",
    "fit",
    "fit_step",
    "grad_norm",
    "greedy_probs",
    "load_model",
    "mean_error",
    "mlp",
    "mlp_on_arrays",
    "nature_cnn",
    "negative_log_likelihood",
    "new_table",
    "sample_action",
    "save_model",
    "squashed_gaussian",
    "uniform_fan_in",
]
