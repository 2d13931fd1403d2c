"""The report's statistics are rliable's: numbers that rliable 1.2.0 (arch 7.2.0) gave for one fixed pair of matrices.

Point estimates are equal. Bootstrap intervals are of other random draws: rliable's were made with 200,000 redraws
(20,000 of the probability of improvement), ours here with 40,000; both are quantiles of the same distribution.
"""

import numpy as np
import pytest

from cleanrl_zoo.core.statistics import (
    interquartile_mean,
    optimality_gap,
    performance_profile,
    probability_of_improvement,
    stratified_bootstrap,
)

# runs × tasks; scores on both sides of 1, and ties between X and Y in every task
X = np.array([[0.10, 1.20, 0.50], [0.35, 0.90, 0.55], [0.20, 1.50, 0.45], [0.80, 0.40, 0.70], [0.55, 1.10, 0.60]])
Y = np.array([[0.05, 1.00, 0.50], [0.30, 0.95, 0.65], [0.25, 0.70, 0.40], [0.60, 0.40, 0.75]])

STEP = 0.01  # above the Monte Carlo error, and about the distance between two values that a redraw can have


@pytest.mark.parametrize(
    ("statistic", "table", "value", "low", "high"),
    [
        (interquartile_mean, X, 0.6055555555555556, 0.4666666666666667, 0.7444444444444446),
        (np.mean, X, 0.66, 0.5266666666666667, 0.79),
        (optimality_gap, X, 0.3933333333333333, 0.29333333333333333, 0.4999999999999999),
        (interquartile_mean, Y, 0.5416666666666666, 0.39999999999999997, 0.6749999999999999),
        (np.mean, Y, 0.5458333333333333, 0.43333333333333335, 0.6541666666666667),
        (optimality_gap, Y, 0.4541666666666666, 0.3458333333333333, 0.5666666666666667),
    ],
)
def test_aggregates_are_rliables(statistic, table, value, low, high):
    assert statistic(table) == pytest.approx(value, abs=1e-9)
    assert stratified_bootstrap(table, statistic, reps=40_000) == pytest.approx((low, high), abs=STEP)


def test_probability_of_improvement_is_rliables():
    value, low, high = probability_of_improvement(X, Y, reps=40_000)
    assert value == pytest.approx(0.6, abs=1e-9)
    assert (low, high) == pytest.approx((0.3666666666666667, 0.8166666666666667), abs=STEP)


def test_performance_profiles_are_rliables():
    # the thresholds 0.45, 0.55, 0.9 and 1.2 are scores of X: rliable's profile is of scores strictly above
    value, low, high = performance_profile(X, [0.0, 0.3, 0.45, 0.55, 0.9, 1.2], reps=40_000)
    # shares of 15 scores: an end of an interval is one of the numbers k/15, and here none is near two of them
    np.testing.assert_allclose(value, np.array([15, 13, 10, 7, 3, 1]) / 15, atol=1e-9)
    np.testing.assert_allclose(low, np.array([15, 11, 7, 4, 1, 0]) / 15, atol=1e-9)
    np.testing.assert_allclose(high, np.array([15, 15, 13, 10, 5, 3]) / 15, atol=1e-9)
