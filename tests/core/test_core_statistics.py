import numpy as np
import pytest
import torch

from cleanrl_zoo.core.statistics import (
    interquartile_curve,
    interquartile_mean,
    optimality_gap,
    performance_profile,
    probability_of_improvement,
    resample,
    stratified_bootstrap,
    update_moments,
)


def test_update_moments_by_hand():
    # (1, 2, 3) then (4, 8): mean 18/5 = 3.6, variance (1 + 4 + 9 + 16 + 64)/5 - 3.6^2 = 5.84
    for make in (torch.tensor, np.array):
        state = make([0.0] * 1), make([1.0] * 1), make([0.0])
        if make is torch.tensor:
            state = tuple(x.double() for x in state)
        state = update_moments(*state, make([[1.0], [2.0], [3.0]]))
        assert [x.item() for x in state] == pytest.approx([2, 2 / 3, 3], abs=1e-9)
        before = state[0].item()
        new = update_moments(*state, make([[4.0], [8.0]]))
        assert [x.item() for x in new] == pytest.approx([3.6, 5.84, 5], abs=1e-9)
        assert state[0].item() == before  # nothing in place
        assert new[0].dtype in (torch.float64, np.float64)


def test_moments_do_not_depend_on_the_split():
    data = torch.randn(100, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 5 + 1e4
    for sizes in ([100], [1] * 100, [7, 0, 60, 33]):
        state = torch.zeros(3).double(), torch.ones(3).double(), torch.zeros(1).double()
        for part in data.split(sizes):
            state = update_moments(*state, part)
        torch.testing.assert_close(state[0], data.mean(0), rtol=0, atol=1e-9)
        torch.testing.assert_close(state[1], data.var(0, correction=0), rtol=0, atol=1e-9)
        assert state[2].tolist() == [100]


def test_moments_of_scalars_and_bad_shapes():
    mean, var, count = update_moments(np.float64(0), np.float64(1), np.zeros(1), np.array([1.0, 3.0]))
    assert (mean.shape, var.shape, count.shape) == ((), (), (1,))
    assert (mean, var) == (2, 1)
    with pytest.raises(ValueError, match=r"batch has shape \[4, 2\]"):
        update_moments(np.zeros(3), np.ones(3), np.zeros(1), np.zeros((4, 2)))
    with pytest.raises(ValueError, match="running mean needs"):
        update_moments(np.zeros(3), np.ones(3), np.zeros(1), np.zeros(3))


def test_interquartile_mean():
    assert interquartile_mean([7, 6, 5, 4, 3, 2, 1, 0]) == 3.5  # 0, 1 and 6, 7 are dropped
    assert interquartile_mean([[0, 100], [1, 2], [3, -50]]) == 1.5  # six scores, one dropped at either end
    assert interquartile_mean([1, 2, 6]) == 3  # a quarter of three rounds down to none


def test_bootstrap_redraws_within_tasks():
    # Every run scores 0 in one task and 10 in the other: the mean is 5 in every redraw.
    scores = np.tile([0.0, 10.0], (5, 1))
    assert stratified_bootstrap(scores, np.mean, reps=50) == (5.0, 5.0)
    # Runs are redrawn for each task on its own: were they redrawn as rows, every mean would be 1/2.
    low, high = stratified_bootstrap([[0, 1], [1, 0]], np.mean, reps=200)
    assert (low, high) == (0.0, 1.0)


def test_bootstrap_interval_of_a_mean():
    # The bootstrap's standard error of a mean is std (ddof 0) / sqrt(runs): the interval is close to +-1.96 of it.
    scores = np.random.default_rng(0).normal(3.0, 2.0, size=50)
    low, high = stratified_bootstrap(scores, np.mean, reps=4000, seed=1)
    error = scores.std() / np.sqrt(50)
    assert low == pytest.approx(scores.mean() - 1.96 * error, abs=0.1 * error * 1.96)
    assert high == pytest.approx(scores.mean() + 1.96 * error, abs=0.1 * error * 1.96)
    assert stratified_bootstrap(scores, np.mean, reps=4000, seed=1) == (low, high)
    assert stratified_bootstrap(scores, np.mean, reps=4000, seed=2) != (low, high)
    narrow = stratified_bootstrap(scores, np.mean, reps=4000, seed=1, confidence=0.5)
    assert low < narrow[0] < narrow[1] < high


def test_probability_of_improvement():
    # x (1, 3), y (2, 3): 1 loses twice, 3 wins once and ties once: (1 + 1/2)/4
    probability, low, high = probability_of_improvement([1, 3], [2, 3])
    assert probability == 0.375
    assert 0 <= low <= probability <= high <= 1
    assert probability_of_improvement([2, 3], [1, 3])[0] == 0.625
    assert probability_of_improvement([5, 6], [1, 2, 3]) == (1.0, 1.0, 1.0)
    # averaged over tasks: 1 in the first, 0 in the second; runs are never compared across tasks
    assert probability_of_improvement([[1, 10], [1, 10]], [[0, 20], [0, 20]]) == (0.5, 0.5, 0.5)
    with pytest.raises(ValueError, match="x has 2 tasks and y has 1"):
        probability_of_improvement([[1, 2]], [1])
    with pytest.raises(ValueError, match="at least one run"):
        probability_of_improvement([], [1])


def test_over_axes():
    tables = np.array([[[7.0, 6], [5, 4], [3, 2], [1, 0]], [[0, 0], [0, 0], [8, 8], [8, 8]]])  # [2, runs, tasks]
    # the first as above, the second 0, 0 | 0, 0, 8, 8 | 8, 8
    assert interquartile_mean(tables, axis=(1, 2)).tolist() == [3.5, 4.0]
    # one task at a time, a run dropped at either end: (5 + 3)/2 and (4 + 2)/2
    assert interquartile_mean(tables[0], axis=0).tolist() == [4.0, 3.0]
    assert optimality_gap(tables, target=8.0, axis=(1, 2)).tolist() == [4.5, 4.0]


def test_optimality_gap():
    # what lies above the target counts as the target: 1 - (0.5 + 1 + 1 + 0)/4
    assert optimality_gap([[0.5, 2.0], [1.0, 0.0]]) == 0.375
    assert optimality_gap([1.0, 5.0], target=4.0) == 1.5


def test_a_statistic_gives_the_same_interval_one_table_at_a_time():
    """In few parts and in many: the redraws are those of one stream."""
    scores = np.random.default_rng(0).normal(size=(5, 3))
    whole = stratified_bootstrap(scores, interquartile_mean, reps=300)
    assert stratified_bootstrap(scores, lambda table: interquartile_mean(table), reps=300) == whole


def test_little_memory_changes_nothing(monkeypatch):
    scores, others = np.random.default_rng(0).normal(size=(2, 5, 3))
    curves = np.random.default_rng(1).normal(size=(4, 6))
    whole = (
        stratified_bootstrap(scores, optimality_gap, reps=50),
        probability_of_improvement(scores, others[:4], reps=50),
        performance_profile(scores, [-1.0, 0.0, 1.0], reps=50),
        interquartile_curve(curves, reps=50),
    )
    monkeypatch.setattr("cleanrl_zoo.core.statistics.AT_ONCE", 100)
    parts = (
        stratified_bootstrap(scores, optimality_gap, reps=50),
        probability_of_improvement(scores, others[:4], reps=50),
        performance_profile(scores, [-1.0, 0.0, 1.0], reps=50),
        interquartile_curve(curves, reps=50),
    )
    for a, b in zip(whole, parts, strict=True):
        np.testing.assert_array_equal(a, b)


def test_performance_profile():
    # of 1, 2, 3, 4 three are above 1, none above 4; a score that equals the threshold is not above it
    value, low, high = performance_profile([[1, 2], [3, 4]], [0, 1, 3, 4], reps=200)
    assert value.tolist() == [1.0, 0.75, 0.25, 0.0]
    # within a task both redraws may be the same run: at 1 the first task is all above or none, the second always is
    assert low.tolist() == [1.0, 0.5, 0.0, 0.0] and high.tolist() == [1.0, 1.0, 0.5, 0.0]


def test_interquartile_curve_ends_with_the_shortest_run():
    nan = np.nan
    curves = [[1, 2, 3], [5, 2, nan], [3, 2, 9], [7, 2, 9]]  # one of four is dropped at either end: (3 + 5)/2; 2
    value, low, high = interquartile_curve(curves, reps=200)
    np.testing.assert_array_equal(value, [4, 2, nan])
    assert 1 <= low[0] < 4 < high[0] <= 7 and (low[1], high[1]) == (2, 2) and np.isnan(low[2]) and np.isnan(high[2])
    assert all(np.isnan(part).all() for part in interquartile_curve([[nan, nan]]))
    with pytest.raises(ValueError, match=r"curves have shape \[2\]"):
        interquartile_curve([1.0, 2.0])


def test_resample_averages_around_each_point_of_the_grid():
    # the lines 0-10-0: over [0, 5] from 0 to 5, mean 2.5; over [5, 15] 5 up to 10 and down to 5, mean 7.5; and 2.5
    np.testing.assert_allclose(resample([0, 10, 20], [0, 10, 0], [0, 10, 20]), [2.5, 7.5, 2.5])
    # the line from (10, 1) to (30, 3): around 20 from 15 to 25, mean 2; around 10 from 10 to 15, since nothing is there
    # before, mean 1.25; around 30 from 25 to 30, mean 2.75; 5 and 35 are outside
    grid = [5, 10, 20, 30, 35]
    np.testing.assert_allclose(resample([10, 30], [1, 3], grid), [np.nan, 1.25, 2, 2.75, np.nan])
    np.testing.assert_allclose(resample([10], [7], grid), [np.nan, 7, np.nan, np.nan, np.nan])
    for x, y in (([1, 1], [0, 0]), ([2, 1], [0, 0]), ([1, 2], [0]), ([], [])):
        with pytest.raises(ValueError, match="must increase strictly and have a y"):
            resample(x, y, [1])
    with pytest.raises(ValueError, match=r"grid \[2\] must increase"):
        resample([1, 2], [0, 0], [2, 2])


def test_resampling_keeps_the_area():
    """Whole stretches partition the range: the mean over them, weighted by width, is that of the curve."""
    generator = np.random.default_rng(0)
    x, y = np.sort(generator.uniform(0, 1, 200)), generator.normal(size=200)
    grid = np.linspace(x[0], x[-1], 11)
    width = np.full(11, (x[-1] - x[0]) / 10)
    width[[0, -1]] /= 2
    assert (resample(x, y, grid) * width).sum() == pytest.approx(np.trapezoid(y, x), abs=1e-9)
