import time

import numpy as np
import pytest
import torch
from test_data_replay import KINDS, Step, random_world, stored_rows

from cleanrl_zoo.data.prioritized import PrioritizedReplay, ProportionalReplay, RankReplay, SumTree
from cleanrl_zoo.data.replay import Replay
from cleanrl_zoo.run.checkpoint import capture, load_checkpoint, restore, save_checkpoint

both = pytest.mark.parametrize("kind", [ProportionalReplay, RankReplay])


def make_tree(size):
    return SumTree([np.zeros(n) for n in SumTree.lengths(size)])


def filled(kind, capacity=30, steps=47, num_envs=2, **kwargs):
    """A replay whose ring has gone round, and a generator."""
    shape, dtype, stack = KINDS["vector"]
    replay = kind(capacity, num_envs, shape, (), 0.9, dtype, torch.int64, **kwargs)
    for _ in zip(range(steps), random_world(replay, stack, shape, dtype, seed=0), strict=False):
        pass
    return replay, torch.Generator().manual_seed(0)


def counts_of(replay, generator, draws=200, batch_size=500):
    """How often each row of the store was drawn."""
    drawn = [replay.indices(batch_size, generator) for _ in range(draws)]
    return np.bincount(np.concatenate(drawn), minlength=len(replay.tree.leaves))


def chi_squared(counts, probabilities):
    expected = counts.sum() * probabilities
    assert counts[expected == 0].sum() == 0
    return ((counts - expected)[expected > 0] ** 2 / expected[expected > 0]).sum()


# The sum tree


@pytest.mark.parametrize("size", [1, 15, 16, 17, 5000, 70_000])
def test_the_tree_finds_what_a_cumulative_sum_finds(size):
    """Weights are small integers, so that all sums are exact."""
    rng, tree = np.random.default_rng(size), make_tree(size)
    weights = rng.integers(0, 4, size).astype(float)
    weights[0] = 1
    for part in np.array_split(rng.permutation(size), 7):
        tree.set(part, weights[part])
    assert tree.total == weights.sum()
    mass = rng.integers(0, int(weights.sum()), 300) + 0.5
    expected = np.searchsorted(weights.cumsum(), mass, side="right")
    assert np.array_equal(tree.find(mass / weights.sum()), expected)
    other = make_tree(size)
    other.set_all(weights)
    assert all(np.array_equal(a, b) for a, b in zip(tree.levels, other.levels, strict=True))


def test_sums_do_not_depend_on_what_else_is_set():
    """Bit for bit, whatever the size of a batch: a resumed run sets all leaves at once."""
    rng, size = np.random.default_rng(0), 5000
    weights, order = rng.random(size) * 10.0 ** rng.integers(-6, 3, size), rng.permutation(size)
    whole = make_tree(size)
    whole.set_all(weights)
    for batch in (1, 2, 7, 256):
        tree = make_tree(size)
        for part in np.array_split(order, size // batch):
            tree.set(part, weights[part])
        assert all(np.array_equal(a, b) for a, b in zip(tree.levels, whole.levels, strict=True))


def test_a_leaf_without_weight_is_never_found():
    """Not at the borders either, where rounding decides: 0.1 + 0.2 + ... has no exact sum."""
    tree = make_tree(40_000)
    rng = np.random.default_rng(0)
    index = rng.choice(40_000, 900, replace=False)
    tree.set(index, rng.random(900) * 10.0 ** rng.integers(-12, 3, 900))
    sums = tree.leaves.cumsum() / tree.total
    border = np.concatenate([sums, np.nextafter(sums, 0), np.nextafter(sums, 1), [0.0, 1 - 2**-53]])
    found = tree.find(np.clip(border, 0, 1 - 2**-53))
    assert tree.leaves[found].min() > 0 and set(found) <= set(index)


def test_the_last_fraction_finds_the_last_leaf_with_a_weight():
    """Whatever the order of summation: a sum of 16 in pairs is often some last bits above the same one in sequence."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        tree = make_tree(8192)
        tree.set(np.arange(17, 31), rng.random(14))
        assert tree.find(np.array([0.0, 1 - 2**-53])).tolist() == [17, 30]


def test_sums_do_not_drift():
    tree, rng = make_tree(6000), np.random.default_rng(0)
    for _ in range(2000):
        tree.set(rng.integers(0, 6000, 64), 10.0 ** rng.integers(-9, 9, 64))
    assert tree.total == pytest.approx(tree.leaves.sum(), rel=1e-14)
    tree.set(np.arange(6000), 0.0)
    assert tree.total == 0.0


def test_of_equal_indices_the_last_weight_stays():
    tree = make_tree(10)
    tree.set(np.array([3, 3, 5]), np.array([1.0, 2.0, 4.0]))
    assert tree.leaves[3] == 2.0 and tree.total == 6.0


# Probabilities


def test_proportional_frequencies_pass_a_chi_squared_test():
    """P(i) ∝ (|δ| + ε)^α, equation 1, on each of 30 rows; 29 degrees of freedom have a deviation of √58 = 7.6.
    Rows outside are never drawn, and P(i) from an exponent 0.05 off fails by far."""
    replay, generator = filled(ProportionalReplay, alpha=0.7, epsilon=0.01)
    index, _, _ = stored_rows(replay)
    replay.indices(1, generator)
    errors = np.random.default_rng(1).normal(size=30) * 3
    replay.update_priorities(index, torch.from_numpy(errors))
    expected = np.zeros(len(replay.tree.leaves))
    counts = counts_of(replay, generator)
    for alpha, passes in ((0.7, True), (0.65, False)):
        expected[index] = (np.abs(errors) + 0.01) ** alpha
        assert (chi_squared(counts, expected / expected.sum()) < 29 + 4 * 7.6) == passes
    assert replay.probabilities(index) == pytest.approx(
        (np.abs(errors) + 0.01) ** 0.7 / ((np.abs(errors) + 0.01) ** 0.7).sum()
    )


def test_rank_based_frequencies_pass_a_chi_squared_test():
    """P(i) ∝ rank(i)^−α: the largest error has rank 1, whatever its size."""
    replay, generator = filled(RankReplay, alpha=0.7)
    index, _, _ = stored_rows(replay)
    errors = np.random.default_rng(1).normal(size=30) ** 5
    replay.update_priorities(index, errors)  # as many as there are rows: sorted now
    rank = np.empty(30)
    rank[np.argsort(-np.abs(errors))] = np.arange(1, 31)
    counts, expected = counts_of(replay, generator), np.zeros(len(replay.tree.leaves))
    for alpha, passes in ((0.7, True), (0.65, False)):
        expected[index] = rank**-alpha
        assert (chi_squared(counts, expected / expected.sum()) < 29 + 4 * 7.6) == passes


def test_half_way_to_the_next_sort_the_frequencies_are_near_those_of_the_true_ranks():
    """Before the first sort: uniform. Then 15 of 30 rows get new errors from the same distribution, counted among the
    sorted: 15 % of the draws at most would be others with the ranks among all that are stored now."""
    replay, generator = filled(RankReplay, alpha=1.0)
    index, _, _ = stored_rows(replay)
    rng = np.random.default_rng(1)
    errors = np.abs(rng.normal(size=30))
    replay.update_priorities(index[:10], errors[:10])
    assert np.ptp(replay.probabilities(index)) == 0.0
    replay.update_priorities(index, errors)
    errors[:15] = np.abs(rng.normal(size=15))
    replay.update_priorities(index[:15], errors[:15])
    rank = np.empty(30)
    rank[np.argsort(-errors)] = np.arange(1, 31)
    true = (1 / rank) / (1 / rank).sum()
    counts, expected = counts_of(replay, generator), np.zeros(len(replay.tree.leaves))
    expected[index] = replay.probabilities(index)
    assert chi_squared(counts, expected) < 29 + 4 * 7.6
    found = replay.probabilities(index)
    assert np.abs(found - true).sum() / 2 < 0.15
    assert np.abs(1 / 30 - true).sum() / 2 > 0.3  # a uniform draw is farther off


def test_between_two_sorts_a_rank_is_counted_among_the_sorted():
    """Errors 1 ... 30 were sorted; 10.5 is then below 20 of them: rank 21; 99 has rank 1, as a new transition has."""
    replay, generator = filled(RankReplay, alpha=1.0, epsilon=0.0)
    index, _, _ = stored_rows(replay)
    replay.update_priorities(index, np.arange(1.0, 31.0))
    replay.update_priorities(index[:2], np.array([10.5, 99.0]))
    assert replay.tree.leaves[index[:2]].tolist() == pytest.approx([1 / 21, 1.0])
    assert replay.tree.leaves[index[2:4]].tolist() == pytest.approx([1 / 28, 1 / 27])
    replay.update_priorities(index[10:11], np.array([11.0]))  # the same again: the same rank
    assert replay.tree.leaves[index[10]] == pytest.approx(1 / 20)
    replay.sort()
    assert replay.tree.leaves[index[:4]].tolist() == pytest.approx(
        [1 / 22, 1.0, 1 / 30, 1 / 29]
    )  # 99 is above them now


@both
def test_alpha_zero_is_uniform(kind):
    replay, generator = filled(kind, alpha=0.0)
    index, _, _ = stored_rows(replay)
    replay.update_priorities(index, np.arange(30.0))
    assert replay.probabilities(index) == pytest.approx(np.full(30, 1 / 30))
    assert replay.weights(index, 0.4).tolist() == [1.0] * 30


def test_weights_are_those_of_the_paper():
    """p = 1, 2, 4 with α = 1: P ∝ p, so w = (N P)^−β / max = (p / 1)^−β, for β = 1: 1, 1/2, 1/4; the largest is 1."""
    replay, generator = filled(ProportionalReplay, alpha=1.0, epsilon=0.0)
    index, _, _ = stored_rows(replay)
    replay.update_priorities(index[:3], np.array([1.0, -2.0, 4.0]))
    assert replay.weights(index[:3], 1.0).tolist() == [1.0, 0.5, 0.25]
    assert replay.weights(index[:3], 0.5).tolist() == pytest.approx([1.0, 0.5**0.5, 0.5])
    assert replay.weights(index[1:3], 1.0).tolist() == [1.0, 0.5]  # of this batch, not of all
    assert replay.weights(index[:3], 0.0).dtype == torch.float32


# What is in, and what is not any more


@both
@pytest.mark.parametrize("every", [1, 4, 100])
def test_exactly_the_stored_rows_can_be_drawn(kind, every):
    """From the first step until the ring has gone round: new rows come in at once, lost ones are out, however many
    were added between two draws; the slot that is written next is never drawn."""
    shape, dtype, stack = KINDS["stack"]
    replay = kind(24, 3, shape, (), 0.9, dtype, torch.int64, frame_stack=stack)
    generator = torch.Generator().manual_seed(0)
    for step, _ in zip(range(110), random_world(replay, stack, shape, dtype, seed=1), strict=False):
        if step % every == every - 1:
            index = replay.indices(64, generator)
            stored, _, _ = stored_rows(replay)
            assert set(index) <= set(stored)
            assert set(np.flatnonzero(replay.tree.leaves)) == set(stored)
            replay.update_priorities(index, np.random.default_rng(step).normal(size=64))


def test_new_transitions_have_the_largest_priority_so_far():
    replay, generator = filled(ProportionalReplay, alpha=1.0, epsilon=0.0, steps=5)
    index, _, age = stored_rows(replay)
    assert (replay.probabilities(index) == 0.1).all()  # nothing given yet: all 1
    replay.update_priorities(index, np.linspace(0.1, 7.0, 10))
    replay.update_priorities(index, np.full(10, 0.5))  # 7 was the largest ever
    no, obs = np.zeros(2, bool), np.zeros((2, 2))
    replay.add(np.zeros(2), Step(obs, obs, np.zeros(2), no, no))
    index, _, age = stored_rows(replay)
    assert replay.probabilities(index[age == 0]) == pytest.approx(7 / (2 * 7 + 10 * 0.5))


@both
def test_priorities_of_lost_rows_are_left_out(kind):
    replay, generator = filled(kind)
    index, _, age = stored_rows(replay)
    no, obs = np.zeros(2, bool), np.zeros((2, 2))
    replay.add(np.zeros(2), Step(obs, obs, np.zeros(2), no, no))
    replay.update_priorities(index, np.full(30, 0.5))
    assert replay.tree.leaves[index[age == age.max()]].tolist() == [0.0, 0.0]
    assert np.count_nonzero(replay.tree.leaves) == 30


@both
def test_bad_errors_are_refused(kind):
    replay, _ = filled(kind)
    before = replay.tree.leaves.copy()
    for bad in (np.nan, np.inf):
        with pytest.raises(ValueError, match="NaN or Inf"):
            replay.update_priorities(stored_rows(replay)[0][:2], np.array([1.0, bad]))
    assert np.array_equal(before, replay.tree.leaves)
    empty = kind(5, 1, (1,), (), 0.9)
    with pytest.raises(ValueError, match="empty"):
        empty.indices(1, torch.Generator())


@both
def test_batches_of_drawn_rows_are_those_of_a_uniform_replay(kind):
    """The same store: `gather` of equal rows is equal."""
    replay, generator = filled(kind)
    plain, _ = filled(Replay)
    index = replay.indices(16, generator)
    assert all(torch.equal(a, b) for a, b in zip(replay.gather(index), plain.gather(index), strict=True))


@both
def test_priorities_go_through_the_disk(tmp_path, kind):
    """Interrupted between draws, between sorts and after steps that the tree has not seen: the same draws follow."""
    first, generator = filled(kind)
    rng = np.random.default_rng(0)
    for size in (20, 13, 9):
        first.update_priorities(first.indices(size, generator), rng.normal(size=size))
    no, obs = np.zeros(2, bool), np.zeros((2, 2))
    for _ in range(3):
        first.add(np.zeros(2), Step(obs, obs, np.zeros(2), no, no))
    save_checkpoint(tmp_path / "step_1", capture(first))
    second = kind(30, 2, (2,), (), 0.9, action_dtype=torch.int64)
    restore(second, load_checkpoint(tmp_path / "step_1"))
    for size in (8, 16, 24):
        state = generator.get_state()
        one, two = first.indices(size, generator), second.indices(size, generator.set_state(state) or generator)
        assert np.array_equal(one, two) and torch.equal(first.weights(one, 0.4), second.weights(two, 0.4))
        errors = rng.normal(size=size)
        first.update_priorities(one, errors)
        second.update_priorities(two, errors)
        assert all(np.array_equal(a, b) for a, b in zip(first.tree.levels, second.tree.levels, strict=True))


@both
def test_memory_taken_is_the_memory_predicted(kind):
    layout = kind._layout(5000, 2, (3,), (), torch.float32, False)
    replay = kind(5000, 2, (3,), (), 0.9)
    assert replay.nbytes == sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in layout.values())
    assert issubclass(kind, PrioritizedReplay) and "GB" in kind.plan(5000, 2, (3,))


# Speed


class PythonTree:
    """A binary sum tree, one item at a time."""

    def __init__(self, size):
        self.size, self.sums = size, [0.0] * (2 * size)

    def set(self, index, weight):
        node = index + self.size
        self.sums[node] = weight
        while node > 1:
            node //= 2
            self.sums[node] = self.sums[2 * node] + self.sums[2 * node + 1]

    def find(self, mass):
        node = 1
        while node < self.size:
            node *= 2
            if mass >= self.sums[node]:
                mass -= self.sums[node]
                node += 1
        return node - self.size


def test_a_batch_is_much_faster_than_item_by_item():
    """About 20 times for a batch of 256; benchmarks/replay_speed.py measures it at 10⁶ entries. Loose, because other
    processes run beside tests."""
    size, rng = 2**16, np.random.default_rng(0)
    weights = rng.random(size)
    slow, fast = PythonTree(size), make_tree(size)
    slow.sums[size:] = weights.tolist()
    for node in range(size - 1, 0, -1):
        slow.sums[node] = slow.sums[2 * node] + slow.sums[2 * node + 1]
    fast.set_all(weights)

    def item_by_item():
        for fraction, weight in zip(draws, new, strict=True):
            slow.set(slow.find(fraction * slow.sums[1]), weight)

    def together():
        fast.set(fast.find(draws), new)

    seconds = {item_by_item: [], together: []}
    for _ in range(15):
        draws, new = rng.random(256), rng.random(256)
        for way, times in seconds.items():
            started = time.perf_counter()
            way()
            times.append(time.perf_counter() - started)
    assert min(seconds[item_by_item]) > 5 * min(seconds[together])
