"""Running moments, and the statistics of a report: interquartile mean and bootstrap intervals over seeds.

Scores are arrays [runs, tasks]. Definitions follow Agarwal et al. 2021 ("Deep RL at the edge of the statistical
precipice"), so that numbers compare with those made by others.
"""

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

Array = TypeVar("Array", Tensor, NDArray[np.float64])


def update_moments(mean: Array, var: Array, count: Array, batch: Array) -> tuple[Array, Array, Array]:
    """Merge a batch into a running mean and variance (Chan et al. 1979); returns the new mean, var and count.

    batch [B, ...]; mean, var [...] float64; count [1] float64 or a float. var is the population variance (ddof 0). The
    result is the mean and variance of all samples seen, however they were split. All four are torch tensors or all are
    NumPy arrays; nothing is changed in place. Raises ValueError if the batch's shape is not [B, *mean.shape].
    """
    if tuple(batch.shape[1:]) != tuple(mean.shape):
        raise ValueError(f"batch has shape {list(batch.shape)}; the running mean needs [B, *{list(mean.shape)}]")
    size = batch.shape[0]
    if size == 0:
        return mean, var, count
    batch = batch.to(torch.float64) if isinstance(batch, Tensor) else np.asarray(batch, np.float64)
    batch_mean = batch.mean(0)
    batch_var = ((batch - batch_mean) ** 2).mean(0)
    total = count + size
    share = size / total  # [1] the batch's part of all samples
    shift = batch_mean - mean
    new_var = (1 - share) * var + share * batch_var + shift**2 * share * (1 - share)
    return (mean + shift * share).reshape(mean.shape), new_var.reshape(mean.shape), total


def interquartile_mean(scores: ArrayLike) -> float:
    """Mean of the middle half of all scores: a quarter of them (rounded down) is dropped at either end."""
    ordered = np.sort(np.asarray(scores, np.float64), axis=None)
    cut = len(ordered) // 4
    return float(ordered[cut : len(ordered) - cut].mean())


def stratified_bootstrap(
    scores: ArrayLike,
    statistic: Callable[[NDArray[np.float64]], float],
    reps: int = 2000,
    seed: int = 0,
    confidence: float = 0.95,
) -> tuple[float, float]:
    """Percentile interval (low, high) of ``statistic(scores)``, runs redrawn with replacement within every task.

    scores [runs, tasks], or [runs] for one task. Deterministic for a seed. Raises ValueError for other shapes.
    """
    table = _runs_by_tasks(scores)
    generator = np.random.default_rng(seed)
    return _interval([statistic(_redraw(table, generator)) for _ in range(reps)], confidence)


def probability_of_improvement(
    x: ArrayLike, y: ArrayLike, reps: int = 2000, seed: int = 0, confidence: float = 0.95
) -> tuple[float, float, float]:
    """P(a run of x scores above a run of y), ties counting half, averaged over tasks; and its interval (low, high).

    x [runs, tasks], y [other runs, tasks], or [runs] for one task. Runs of both are redrawn within every task. Raises
    ValueError where the numbers of tasks differ.
    """
    x, y = _runs_by_tasks(x), _runs_by_tasks(y)
    if x.shape[1] != y.shape[1]:
        raise ValueError(f"x has {x.shape[1]} tasks and y has {y.shape[1]}; both need the same tasks in the same order")

    def probability(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
        difference = x[:, None] - y[None]  # [runs, other runs, tasks]
        return float(np.mean((difference > 0) + 0.5 * (difference == 0)))

    generator = np.random.default_rng(seed)
    draws = [probability(_redraw(x, generator), _redraw(y, generator)) for _ in range(reps)]
    return probability(x, y), *_interval(draws, confidence)


def _runs_by_tasks(scores: ArrayLike) -> NDArray[np.float64]:
    table = np.asarray(scores, np.float64)
    table = table[:, None] if table.ndim == 1 else table
    if table.ndim != 2 or table.shape[0] == 0:
        raise ValueError(f"scores have shape {list(table.shape)}; give [runs, tasks] with at least one run")
    return table


def _redraw(table: NDArray[np.float64], generator: np.random.Generator) -> NDArray[np.float64]:
    return np.take_along_axis(table, generator.integers(len(table), size=table.shape), axis=0)


def _interval(draws: list[float], confidence: float) -> tuple[float, float]:
    low, high = np.quantile(draws, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)
