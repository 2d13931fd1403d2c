"""Several networks of one shape, evaluated as one batched product per layer; and the ensemble that models a world.

Chua, Calandra, McAllister & Levine (2018), "Deep Reinforcement Learning in a Handful of Trials using Probabilistic
Dynamics Models", arXiv:1805.12114 (PETS), section 4 and appendix A; Janner, Fu, Zhang & Levine (2019), "When to Trust
Your Model", arXiv:1906.08253 (MBPO), section 4.2 and appendix C.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cleanrl_zoo.core.distributions import DiagGaussian
from cleanrl_zoo.nn.mlp import ACTIVATIONS
from cleanrl_zoo.nn.optim import Adam


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
        self.activation_name, self.activation = activation, ACTIVATIONS[activation]()
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
            x = self.activation(x) if index else x
            # One output as a weighted sum: on the CPU a product with a single column takes three times as long, and so
            # does its gradient. Not baddbmm, which copies the biases over the whole result first.
            summed = (x * weight.mT).sum(-1, keepdim=True) if weight.shape[-1] == 1 else torch.bmm(x, weight)
            x = summed + bias  # compiled, this joins what follows
        return x


BOUND_COEF = 0.005  # pulls the two bounds of the log-variances together; 0.01 for a loss of twice the nats
HOLDOUT_CHUNK = 4096  # rows that go through all members at once where no gradient is needed


class GaussianEnsemble(nn.Module):
    """`members` E networks, each of which predicts a diagonal Gaussian over the targets.

    Inputs are normalised by mean and standard deviation of the training inputs (`normalise`), with `scale_targets` the
    targets too: what the networks give is then in deviations of the targets, what is predicted in the targets' unit. A
    log-variance is held between two learned bounds by softplus, so that it stays finite far from the data (PETS,
    appendix A.1).

    Args:
        members: E.
        input_dim, output_dim: widths of a row of inputs and of targets.
        hidden: widths of the hidden layers.
        elites: K, members that are predicted with after `fit`: those of the lowest holdout error; by default all.
        activation: a key of `ACTIVATIONS`.
        generator: the source of the initial weights, normal with deviation 1/(2√fan_in), cut off at two deviations.
        scale_targets: columns of a much smaller scale than 1 are then learned, and count, as much as the others.

    Raises:
        ValueError: as `EnsembleMLP`, and unless 1 ≤ K ≤ E.
    """

    def __init__(
        self,
        members: int,
        input_dim: int,
        output_dim: int,
        hidden: Sequence[int] = (200, 200, 200, 200),
        elites: int | None = None,
        activation: str = "silu",
        generator: torch.Generator | None = None,
        scale_targets: bool = False,
    ) -> None:
        super().__init__()
        elites = members if elites is None else elites
        if not 1 <= elites <= members:
            raise ValueError(f"{elites} elites of {members} members: allowed are 1 to {members}")
        self.members = members
        self.network = EnsembleMLP(members, [input_dim, *hidden, 2 * output_dim], activation, generator)
        for weight, bias in zip(self.network.weights, self.network.biases, strict=True):
            std = 1.0 / (2.0 * math.sqrt(weight.shape[1]))
            nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std, generator=generator)
            nn.init.zeros_(bias)
        self.min_logvar = nn.Parameter(torch.full((output_dim,), -10.0))
        self.max_logvar = nn.Parameter(torch.full((output_dim,), 0.5))
        self.register_buffer("input_mean", torch.zeros(input_dim))
        self.register_buffer("input_std", torch.ones(input_dim))
        self.register_buffer("elites", torch.arange(elites))  # [K], best first
        self.scale_targets = scale_targets
        if scale_targets:
            self.register_buffer("target_mean", torch.zeros(output_dim))
            self.register_buffer("target_std", torch.ones(output_dim))

    def forward(self, inputs: Tensor) -> DiagGaussian:
        """inputs [B, in], shared by all members, or [E, B, in] -> the prediction of each, [E, B, out]."""
        return self._bounded(self.network((inputs - self.input_mean) / self.input_std))

    def predict(self, inputs: Tensor, members: Tensor) -> DiagGaussian:
        """inputs [M, B, in] -> [M, B, out]: the prediction of member `members[m]` (int64 [M]) for the rows of m."""
        x = (inputs - self.input_mean) / self.input_std
        for index, (weight, bias) in enumerate(zip(self.network.weights, self.network.biases, strict=True)):
            x = torch.bmm(self.network.activation(x) if index else x, weight[members]) + bias[members]
        return self._bounded(x)

    def _bounded(self, output: Tensor) -> DiagGaussian:
        mean, logvar = output.chunk(2, -1)
        logvar = self.max_logvar - F.softplus(self.max_logvar - logvar)
        logvar = self.min_logvar + F.softplus(logvar - self.min_logvar)
        if not self.scale_targets:
            return DiagGaussian(mean, 0.5 * logvar)
        return DiagGaussian(self.target_mean + self.target_std * mean, 0.5 * logvar + self.target_std.log())

    @torch.no_grad()
    def normalise(self, inputs: Tensor, targets: Tensor) -> None:
        """Takes mean and deviation of `inputs` [n, in] for those of all inputs, and of `targets` [n, out] with
        `scale_targets`; a constant column is not scaled."""
        scaled = [(inputs, self.input_mean, self.input_std)]
        if self.scale_targets:
            scaled.append((targets, self.target_mean, self.target_std))
        for rows, own_mean, own_std in scaled:
            mean, std = rows.mean(0), rows.std(0, correction=0)
            own_mean.copy_(mean)
            own_std.copy_(torch.where(std < 1e-6 * (1.0 + mean.abs()), torch.ones_like(std), std))

    @torch.no_grad()
    def holdout_error(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean squared error [E] of each member's mean on `inputs` [n, in] and `targets` [n, out]; with
        `scale_targets` in deviations of the targets."""
        total = torch.zeros(self.members, device=inputs.device)
        for x, y in zip(inputs.split(HOLDOUT_CHUNK), targets.split(HOLDOUT_CHUNK), strict=True):
            error = self(x).mean - y
            error = error / self.target_std if self.scale_targets else error
            total += error.square().mean(-1).sum(-1)
        return total / len(inputs)


def negative_log_likelihood(prediction: DiagGaussian, targets: Tensor) -> Tensor:
    """Exact −log p(targets) in nats, [..., out] -> [...], summed over the columns."""
    return -prediction.log_prob(targets)


def fit_step(
    model: GaussianEnsemble, optimizer: Adam, inputs: Tensor, targets: Tensor, decay: Tensor, learning_rate: Tensor
) -> Tensor:
    """One Adam step of all members on a minibatch of their own each; returns its likelihood loss [E].

    inputs [E, B, in], targets [E, B, out]. The loss is the sum over members of −log p per column and row in nats and of
    decay_l · ½|W_l|² for each layer l, and, once for all, BOUND_COEF · Σ(max_logvar − min_logvar).
    """
    nll = negative_log_likelihood(model(inputs), targets).mean(-1) / targets.shape[-1]  # [E]
    bounds = BOUND_COEF * (model.max_logvar - model.min_logvar).sum()
    weights = sum(rate * 0.5 * weight.square().sum() for rate, weight in zip(decay, model.network.weights, strict=True))
    loss = nll.sum() + bounds + weights
    optimizer.step(torch.autograd.grad(loss, optimizer.parameters), learning_rate)
    return nll.detach()


class Fit(NamedTuple):
    """What a call of `fit` came to."""

    epochs: int  # passes over the bootstrap samples
    train_nll: Tensor  # [E] nats per column, mean over the last epoch
    holdout_error: Tensor  # [E] mean squared error with the weights that were kept; NaN or Inf ends a fit at once


def fit(
    model: GaussianEnsemble,
    optimizer: Adam,
    inputs: Tensor,
    targets: Tensor,
    bootstrap: Tensor,
    holdout: Tensor,
    generator: torch.Generator,
    learning_rate: float = 1e-3,
    decay: Sequence[float] = (),
    batch_size: int = 256,
    patience: int = 5,
    max_epochs: int = 1000,
    step: Callable = fit_step,
) -> Fit:
    """Trains all members at once until none has got better on the holdout for `patience` epochs.

    Every member keeps the weights of its own best epoch (better: by more than 1 % of its best error), and the elites
    are chosen by these errors (MBPO, appendix C; the authors' code).

    Args:
        inputs, targets: [n, in], [n, out], all the data.
        bootstrap: int64 [E, m], the rows that each member learns from; the caller keeps them fixed.
        holdout: int64 [h], rows that no member learns from.
        generator: the source of each epoch's order.
        decay: weight decay of each layer, none by default.
        batch_size: B rows per member and step; the last batch of an epoch is filled up from its beginning.
        step: `fit_step` or its compiled form.

    Raises:
        ValueError: without rows to learn from or to hold out, or with another number of decays than layers.
    """
    layers = len(model.network.weights)
    if bootstrap.shape[-1] == 0 or len(holdout) == 0:
        raise ValueError(f"{bootstrap.shape[-1]} rows to learn from and {len(holdout)} held out: both are needed")
    if decay and len(decay) != layers:
        raise ValueError(f"{len(decay)} weight decays for {layers} layers: give one per layer")
    device = inputs.device
    rate = torch.tensor(learning_rate, device=device)
    decays = torch.tensor(list(decay) or [0.0] * layers, device=device)
    held_inputs, held_targets = inputs[holdout], targets[holdout]
    members, rows = bootstrap.shape
    steps = -(-rows // batch_size)
    fill = torch.arange(steps * batch_size) % rows

    model.normalise(inputs, targets)
    best_error = model.holdout_error(held_inputs, held_targets)
    best = [parameter.detach().clone() for parameter in model.network.parameters()]
    waited = epochs = 0
    nll = torch.zeros(members, device=device)
    while waited < patience and epochs < max_epochs:
        order = torch.rand(members, rows, generator=generator).argsort(-1)[:, fill]  # [E, steps · B]
        index = bootstrap.gather(1, order.to(bootstrap.device))
        losses = []
        for columns in index.split(batch_size, 1):
            losses.append(step(model, optimizer, inputs[columns], targets[columns], decays, rate).clone())
        nll, epochs = torch.stack(losses).mean(0), epochs + 1
        error = model.holdout_error(held_inputs, held_targets)
        if not torch.isfinite(error).all():
            best_error = error
            break
        better = error < 0.99 * best_error  # [E]
        with torch.no_grad():
            for kept, parameter in zip(best, model.network.parameters(), strict=True):
                kept.copy_(torch.where(better[:, None, None], parameter, kept))
        best_error = torch.where(better, error, best_error)
        waited = 0 if better.any() else waited + 1
    with torch.no_grad():
        for kept, parameter in zip(best, model.network.parameters(), strict=True):
            parameter.copy_(kept)
        model.elites.copy_(best_error.argsort(stable=True)[: len(model.elites)])
    return Fit(epochs, nll, best_error)
