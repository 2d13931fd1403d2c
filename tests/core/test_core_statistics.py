import numpy as np
import pytest
import torch

from cleanrl_zoo.core.statistics import (
    interquartile_mean,
    probability_of_improvement,
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
