"""What a model is fitted to: draws that stay as they are, rows held out for good; and what it imagined."""

import pytest
import torch

from cleanrl_zoo.data.model_data import ModelData, RecentBlocks


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def rows(first, count):
    """Rows that hold their own number."""
    numbers = torch.arange(first, first + count, dtype=torch.float32)
    return numbers.view(-1, 1).expand(-1, 2), -numbers.view(-1, 1)


def filled(blocks, capacity=200, members=3, holdout=0.2, seed=0):
    data, source = ModelData(capacity, 2, 1, members, holdout), generator(seed)
    for size in blocks:
        data.add(*rows(len(data), size))
        data.commit(source)
    return data


def test_rows_are_stored_in_order_and_seen_once_committed():
    data = ModelData(10, 2, 1, 2)
    data.add(*rows(0, 3))
    data.add(*rows(3, 1))
    assert len(data) == 4 and len(data.inputs) == 0
    data.commit(generator())
    assert data.inputs[:, 1].tolist() == [0, 1, 2, 3] and data.targets[:, 0].tolist() == [0, -1, -2, -3]
    with pytest.raises(ValueError, match="11 rows of model data: there is room for 10"):
        data.add(*rows(4, 7))


def test_a_fifth_is_held_out_and_never_learned_from():
    data = filled([50, 30, 20])
    assert data.holdout.shape == (20,) and data.bootstrap.shape == (3, 80)
    held = set(data.holdout.tolist())
    assert len(held) == 20 and not held & set(data.bootstrap.flatten().tolist())
    assert all(len(held & set(range(a, b))) == (b - a) // 5 for a, b in ((0, 50), (50, 80), (80, 100)))
    assert data.bootstrap.max() < 100


def test_members_draw_differently_with_replacement_from_each_block():
    """Of n rows a member that draws n times with replacement sees 1 − 1/e = 63 % on average."""
    data = filled([2500, 1500], capacity=4000)
    for member in data.bootstrap:
        assert len(set(member.tolist())) / 3200 == pytest.approx(0.632, abs=0.03)
        assert (member[:2000] < 2500).all() and (member[2000:] >= 2500).all()
    assert not torch.equal(data.bootstrap[0], data.bootstrap[1])


def test_what_was_drawn_stays_drawn():
    """A fit between two blocks, and after any number of later ones, sees the same rows for each member."""
    early, late = filled([40, 25]), filled([40, 25, 30, 1, 7])
    assert torch.equal(late.bootstrap[:, : early.bootstrap.shape[1]], early.bootstrap)
    assert torch.equal(late.holdout[: len(early.holdout)], early.holdout)
    source = generator(9)
    before, state = early.bootstrap.clone(), source.get_state()
    early.commit(source)  # nothing new
    assert torch.equal(early.bootstrap, before) and torch.equal(source.get_state(), state)


def test_the_share_is_kept_over_blocks_of_one_row_too():
    data = filled([1] * 50)
    assert len(data.holdout) == 10 and data.bootstrap.shape == (3, 40)


def test_a_holdout_of_nothing_or_everything_is_refused():
    for share in (0.0, 1.0):
        with pytest.raises(ValueError, match="must be above 0 and below 1"):
            ModelData(10, 2, 1, 2, share)


def test_restored_data_goes_on_alike():
    whole, half = filled([40, 25, 10], seed=3), ModelData(200, 2, 1, 3)
    source = generator(3)
    first = ModelData(200, 2, 1, 3)
    first.add(*rows(0, 40)), first.commit(source)
    first.add(*rows(40, 12))  # the second block is open
    half.load_state_dict(first.state_dict())
    half.add(*rows(52, 13)), half.commit(source)
    half.add(*rows(65, 10)), half.commit(source)
    for name in ("inputs", "targets", "bootstrap", "holdout"):
        assert torch.equal(getattr(half, name), getattr(whole, name)), name


# What the model imagined


def test_the_last_blocks_are_kept_and_sampled_evenly():
    blocks = RecentBlocks(2, 1)
    for value, size in ((1.0, 100), (2.0, 10), (3.0, 30)):
        blocks.push(torch.full((size, 1), value))
    assert len(blocks) == 40 and blocks.sizes == [10, 30]
    sample = blocks.sample((100, 20), generator())
    assert sample.shape == (100, 20, 1) and set(sample.flatten().tolist()) == {2.0, 3.0}
    assert (sample == 3.0).float().mean().item() == pytest.approx(0.75, abs=0.03)  # by rows, not by blocks


def test_recent_blocks_restore_and_refuse():
    blocks, other = RecentBlocks(2, 3), RecentBlocks(2, 3)
    with pytest.raises(ValueError, match="push a block"):
        blocks.sample((1,), generator())
    with pytest.raises(ValueError, match="at least 1"):
        RecentBlocks(0, 3)
    blocks.push(torch.randn(4, 3)), blocks.push(torch.randn(5, 3))
    other.load_state_dict(blocks.state_dict())
    for each in (blocks, other):
        each.push(torch.ones(1, 3))
    assert torch.equal(blocks.rows, other.rows) and other.sizes == [5, 1]
