"""Running moments, and the statistics of a report: what many runs on many tasks say together, with bootstrap intervals.

Scores are arrays [runs, tasks]. Definitions follow Agarwal et al. 2021 ("Deep RL at the edge of the statistical
precipice"), so that numbers compare with those made by others.
"""

import math
from collections.abc import Callable, Iterator
from inspect import signature
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

Array = TypeVar("Array", Tensor, NDArray[np.float64])
Axis = int | tuple[int, ...] | None
AT_ONCE = 2**22  # values that a bootstrap holds in memory at a time


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


def interquartile_mean(scores: ArrayLike, axis: Axis = None) -> float | NDArray[np.float64]:
    """Mean of the middle half of the scores: a quarter of them (rounded down) is dropped at either end.

    Over all of them as a float, or over `axis` (one or several, taken together) as an array of the others' shape.
    """
    ordered = np.sort(_together(scores, axis), axis=-1)
    cut = ordered.shape[-1] // 4
    middle = ordered[..., cut : ordered.shape[-1] - cut].mean(-1)
    return float(middle) if axis is None else middle


def optimality_gap(scores: ArrayLike, target: float = 1.0, axis: Axis = None) -> float | NDArray[np.float64]:
    """By how much the scores miss `target` on average, those above it counting as `target`: E[target − min(x, target)].

    Over all scores as a float, or over `axis` as an array, as in `interquartile_mean`.
    """
    gap = target - np.minimum(_together(scores, axis), target).mean(-1)
    return float(gap) if axis is None else gap


def stratified_bootstrap(
    scores: ArrayLike,
    statistic: Callable[..., float | NDArray[np.float64]],
    reps: int = 2000,
    seed: int = 0,
    confidence: float = 0.95,
) -> tuple[float, float]:
    """Percentile interval (low, high) of ``statistic(scores)``, runs redrawn with replacement within every task.

    scores [runs, tasks], or [runs] for one task. A statistic that takes `axis`, as `interquartile_mean`,
    `optimality_gap` and `np.mean` do, is given many redraws at once, ``statistic(draws [draws, runs, tasks],
    axis=(1, 2))``; any other one table [runs, tasks] at a time. Deterministic for a seed, and the same both ways.
    Raises ValueError for other shapes.
    """
    table = _runs_by_tasks(scores)
    at_once = "axis" in signature(statistic).parameters
    values = []
    for index in _redraws(table.shape, reps, np.random.default_rng(seed)):
        draws = np.take_along_axis(table[None], index, axis=1)  # [draws, runs, tasks]
        values.extend(statistic(draws, axis=(1, 2)) if at_once else map(statistic, draws))
    low, high = _interval(np.asarray(values, np.float64), confidence)
    return float(low), float(high)


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
    difference = x[:, None] - y[None]  # [runs, other runs, tasks]
    wins = (difference > 0) + 0.5 * (difference == 0)

    generator, draws = np.random.default_rng(seed), []
    # a redraw takes its runs of x and of y from one stream, in this order
    most = np.concatenate([np.full(x.size, len(x)), np.full(y.size, len(y))])
    for size in _parts(reps, wins.size + most.size):
        index = generator.integers(most, size=(size, most.size))
        times_x = _times_drawn(index[:, : x.size].reshape(size, *x.shape))  # [draws, runs, tasks]
        times_y = _times_drawn(index[:, x.size :].reshape(size, *y.shape))
        won = np.einsum("dit,ijt->djt", times_x, wins)
        draws.append(np.einsum("djt,djt->d", won, times_y) / wins.size)
    low, high = _interval(np.concatenate(draws), confidence)
    return float(wins.mean()), float(low), float(high)


def performance_profile(
    scores: ArrayLike, thresholds: ArrayLike, reps: int = 2000, seed: int = 0, confidence: float = 0.95
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Share of runs above each threshold (the run-score distribution), and its interval at each: value, low, high.

    scores [runs, tasks], or [runs] for one task, all tasks together; thresholds [K]; the three results [K]. A score
    that equals a threshold is not above it. Runs are redrawn within every task; each threshold has its own interval.
    """
    table, levels = _runs_by_tasks(scores), np.asarray(thresholds, np.float64)
    above = (table[..., None] > levels).astype(np.float64)  # [runs, tasks, K]
    draws = [
        np.einsum("drt,rtk->dk", _times_drawn(index), above) / table.size
        for index in _redraws(table.shape, reps, np.random.default_rng(seed))
    ]
    low, high = _interval(np.concatenate(draws), confidence)
    return above.mean((0, 1)), low, high


def interquartile_curve(
    curves: ArrayLike, reps: int = 2000, seed: int = 0, confidence: float = 0.95
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Interquartile mean over runs at each point of curves on one grid, and its interval there: value, low, high.

    curves [runs, points]; the three results [points]. Whole runs are redrawn. NaN where any run is NaN: a run that has
    ended is not carried on, and the others do not stand for it.
    """
    table = np.asarray(curves, np.float64)
    if table.ndim != 2 or table.shape[0] == 0:
        raise ValueError(f"curves have shape {list(table.shape)}; give [runs, points] with at least one run")
    there = ~np.isnan(table).any(0)
    value, low, high = (np.full(table.shape[1], np.nan) for _ in range(3))
    if there.any():
        known, generator, draws = table[:, there], np.random.default_rng(seed), []
        for size in _parts(reps, known.size):
            index = generator.integers(len(known), size=(size, len(known)))
            draws.append(interquartile_mean(known[index], axis=1))  # [draws, points]
        value[there] = interquartile_mean(known, axis=0)
        low[there], high[there] = _interval(np.concatenate(draws), confidence)
    return value, low, high


def resample(x: ArrayLike, y: ArrayLike, grid: ArrayLike) -> NDArray[np.float64]:
    """A curve on another grid: the points (x, y) joined by straight lines, averaged around each point of the grid.

    x [P] and grid [G] in strictly increasing order, y [P]; the result [G]. A grid point's stretch reaches half way to
    its neighbours, as far as the curve does; a curve with fewer points than the grid is read off almost exactly, one
    with more is smoothed. NaN at grid points outside [x[0], x[-1]]: nothing is extrapolated. Raises ValueError for
    other shapes or orders.
    """
    x, y, grid = (np.asarray(values, np.float64) for values in (x, y, grid))
    if x.shape != y.shape or x.ndim != 1 or len(x) == 0 or not np.all(np.diff(x) > 0):
        raise ValueError(f"x {list(x.shape)} must increase strictly and have a y {list(y.shape)} for each point")
    if grid.ndim != 1 or len(grid) == 0 or not np.all(np.diff(grid) > 0):
        raise ValueError(f"grid {list(grid.shape)} must increase strictly")
    area = np.concatenate([[0.0], np.cumsum(np.diff(x) * (y[1:] + y[:-1]) / 2)])  # under the curve up to each point

    def area_to(end: NDArray[np.float64]) -> NDArray[np.float64]:
        before = np.clip(np.searchsorted(x, end, side="right") - 1, 0, len(x) - 1)
        return area[before] + (end - x[before]) * (y[before] + np.interp(end, x, y)) / 2

    edges = np.concatenate([grid[:1], (grid[1:] + grid[:-1]) / 2, grid[-1:]]).clip(x[0], x[-1])
    low, high = edges[:-1], edges[1:]
    wide = high > low
    mean = (area_to(high) - area_to(low)) / np.where(wide, high - low, 1.0)
    return np.where((grid < x[0]) | (grid > x[-1]), np.nan, np.where(wide, mean, np.interp(grid, x, y)))


def _together(scores: ArrayLike, axis: Axis) -> NDArray[np.float64]:
    """The scores with `axis` (all for None) taken together as the last one."""
    table = np.asarray(scores, np.float64)
    if axis is None:
        return table.reshape(-1)
    axes = (axis,) if isinstance(axis, int) else axis
    last = np.moveaxis(table, axes, range(-len(axes), 0))
    return last.reshape(*last.shape[: -len(axes)], -1)


def _runs_by_tasks(scores: ArrayLike) -> NDArray[np.float64]:
    table = np.asarray(scores, np.float64)
    table = table[:, None] if table.ndim == 1 else table
    if table.ndim != 2 or table.shape[0] == 0:
        raise ValueError(f"scores have shape {list(table.shape)}; give [runs, tasks] with at least one run")
    return table


def _parts(reps: int, size: int) -> Iterator[int]:
    """Numbers that add up to `reps`, so that so many redraws of `size` values each fit into memory at once."""
    most = max(1, AT_ONCE // max(1, size))
    for done in range(0, reps, most):
        yield min(most, reps - done)


def _redraws(shape: tuple[int, ...], reps: int, generator: np.random.Generator) -> Iterator[NDArray[np.int64]]:
    """Indices of redrawn runs, [draws, runs, tasks] at a time, every task by itself, `reps` in all."""
    for size in _parts(reps, math.prod(shape)):
        yield generator.integers(shape[0], size=(size, *shape))


def _times_drawn(index: NDArray[np.int64]) -> NDArray[np.float64]:
    """How often each run was drawn: index [draws, runs, tasks] -> [draws, runs, tasks]."""
    draws, runs, tasks = index.shape
    place = (np.arange(draws)[:, None, None] * runs + index) * tasks + np.arange(tasks)
    return np.bincount(place.ravel(), minlength=index.size).reshape(index.shape).astype(np.float64)


def _interval(draws: NDArray[np.float64], confidence: float) -> NDArray[np.float64]:
    """Percentile interval [2, ...] over the first axis."""
    return np.quantile(draws, [(1 - confidence) / 2, (1 + confidence) / 2], axis=0)
