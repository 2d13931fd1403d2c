import math

import pytest
import torch

from cleanrl_zoo.core.advantages import (
    agreement_masks,
    anchor_relative,
    conditional_reward,
    gdpo,
    group_relative,
    highest_variance,
    leave_one_out,
    overlong_penalty,
)


def matrix(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def close(actual, expected):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=torch.float64), rtol=0, atol=1e-9)


def test_group_relative_by_hand():
    # row 0: mean 1/2, sample std sqrt(1/3), population std 1/2; row 1: nothing to tell apart
    rewards = matrix((1, 0, 0, 1), (2, 2, 2, 2))
    a = 0.5 / math.sqrt(1 / 3)
    close(group_relative(rewards, eps=0.0), [[a, -a, -a, a], [0, 0, 0, 0]])
    close(group_relative(rewards, eps=0.0, ddof=0), [[1, -1, -1, 1], [0, 0, 0, 0]])
    b = 0.5 / (math.sqrt(1 / 3) + 1e-4)  # eps is added to the std
    close(group_relative(rewards), [[b, -b, -b, b], [0, 0, 0, 0]])
    close(group_relative(rewards, scale="none"), [[0.5, -0.5, -0.5, 0.5], [0, 0, 0, 0]])
    # Batch: the raw rewards have mean 1.25 and squares 2 * .0625 + 2 * 1.5625 + 4 * .5625 = 5.5, over 7. The std of the
    # centred ones would be sqrt(1/7) instead.
    c = 0.5 / (math.sqrt(5.5 / 7) + 1e-4)
    close(group_relative(rewards, scale="batch"), [[c, -c, -c, c], [0, 0, 0, 0]])


def test_an_unscorable_sample_is_left_out():
    # row 0 keeps (1, 3): mean 2, std sqrt 2; row 1 keeps 5 alone; row 2 keeps nothing
    rewards, mask = matrix((1, 7, 3), (5, 7, 7), (7, 7, 7)), matrix((1, 0, 1), (1, 0, 0), (0, 0, 0))
    d = math.sqrt(0.5)
    expected = {
        "group": [[-d, 0, d], [0, 0, 0], [0, 0, 0]],
        "none": [[-1, 0, 1], [0, 0, 0], [0, 0, 0]],
        "batch": [[-0.5, 0, 0.5], [0, 0, 0], [0, 0, 0]],  # 1, 3, 5: std 2
    }
    for content in (7.0, -1e9, torch.nan, torch.inf):
        spoiled = torch.where(mask == 0, content, rewards)
        for flags in (mask, mask.bool()):
            for scale, values in expected.items():
                close(group_relative(spoiled, scale, eps=0.0, mask=flags), values)
            close(leave_one_out(spoiled, flags), [[-2, 0, 2], [0, 0, 0], [0, 0, 0]])
            both = torch.stack((spoiled, 10 * spoiled), 2)
            # (-d, d) from each reward, summed, over what counts (-2d, 2d, 0): std sqrt(8 d^2 / 2) = 2d
            close(gdpo(both, [1.0, 1.0], eps=0.0, mask=flags), [[-1, 0, 1], [0, 0, 0], [0, 0, 0]])


@pytest.mark.parametrize("scale", ["group", "none", "batch"])
def test_groups_without_spread_give_exact_zeros(scale):
    # Seven times .1 in float32 has a mean one rounding off and a std as small.
    flat = torch.full((1, 7), 0.1)
    for eps in (0.0, 1e-4):
        assert torch.equal(group_relative(flat, scale, eps), torch.zeros(1, 7))
        assert torch.equal(group_relative(torch.tensor([[3.0], [5.0]]), scale, eps), torch.zeros(2, 1))
    assert torch.equal(leave_one_out(flat), torch.zeros(1, 7))
    assert torch.equal(leave_one_out(torch.tensor([[3.0], [5.0]])), torch.zeros(2, 1))
    assert torch.equal(gdpo(flat.unsqueeze(2).expand(1, 7, 2), [1.0, 2.0], eps=0.0), torch.zeros(1, 7))
    assert torch.equal(gdpo(torch.tensor([[[3.0]]]), [1.0]), torch.zeros(1, 1))


def test_a_nan_that_counts_shows_in_its_own_group():
    rewards = matrix((torch.nan, 1), (0, 1))
    advantages = group_relative(rewards)
    assert advantages[0].isnan().all() and advantages[1].isfinite().all()
    assert leave_one_out(rewards)[0].isnan().all()


def test_true_and_false_are_rewards_too():
    right = torch.tensor([[True, False]])
    close(group_relative(right, scale="none").double(), [[0.5, -0.5]])
    close(leave_one_out(right.long()).double(), [[1, -1]])


def test_leave_one_out_by_hand():
    # others of 1, 2, 6: means 4, 3.5, 1.5
    close(leave_one_out(matrix((1, 2, 6))), [[-3, -1.5, 4.5]])
    rewards = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    close(leave_one_out(rewards), 4 / 3 * group_relative(rewards, scale="none"))


def test_gdpo_by_hand():
    # prompt 0: both rewards normalise to -+ or +- d, d = sqrt(1/2), whatever their size; with weights 2 and 1 the first
    # wins: (d, -d). prompt 1: equal, zeros. The batch (d, -d, 0, 0) has mean 0 and std sqrt(2 * .5 / 3).
    d = math.sqrt(0.5)
    rewards = torch.stack((matrix((1, 0), (1, 1)), matrix((10, 300), (7, 7))), 2)  # [2, 2, 2]
    e = d / math.sqrt(1 / 3)
    close(gdpo(rewards, torch.tensor([2.0, 1.0]), eps=0.0), [[e, -e], [0, 0]])
    # eps both times: u = .5/(d + eps) - 145/(290 d + eps) ... the rewards' stds are d and 290 d
    u = 2 * 0.5 / (d + 1e-4) - 145 / (290 * d + 1e-4)
    close(gdpo(rewards, [2.0, 1.0]), [[u / (u * math.sqrt(2 / 3) + 1e-4), -u / (u * math.sqrt(2 / 3) + 1e-4)], [0, 0]])


def test_conditional_reward_by_hand():
    easy, hard = torch.tensor([1.0, 1.0, 0.5]), torch.tensor([1.0, 0.9, 2.0])
    assert conditional_reward(easy, hard).tolist() == [1.0, 0.0, 0.5]
    assert conditional_reward(easy, hard, threshold=0.9).tolist() == [1.0, 1.0, 0.5]


def test_overlong_penalty_by_hand():
    lengths = torch.tensor([0, 10, 16, 17, 18, 20, 25])  # free up to 16 = 20 - 4, a quarter for each token from there
    assert overlong_penalty(lengths, max_length=20, cache=4).tolist() == [0, 0, 0, -0.25, -0.5, -1, -1]
    assert overlong_penalty(lengths[-1], 20, 20).item() == -1
    for cache in (0, 21):
        with pytest.raises(ValueError, match=f"cache is {cache}"):
            overlong_penalty(lengths, 20, cache)


def test_anchor_relative_by_hand():
    # row 0: state 4 has returns 1 and 3, state 9 has 5 and 7, state -1 has 2 alone
    # row 1: its state 4 is another prompt's: 0, 0, 3 (mean 1, squares 6, sample std sqrt 3); 9 and 4 alone
    returns = matrix((1, 5, 3, 7, 2), (0, 0, 9, 3, 4))
    anchor = torch.tensor([[4, 9, 4, 9, -1], [4, 4, 9, 4, 2**40]])
    close(anchor_relative(returns, anchor, scale="none"), [[-1, -1, 1, 1, 0], [-1, -1, 0, 2, 0]])
    d, e = math.sqrt(0.5), 1 / math.sqrt(3)
    close(anchor_relative(returns, anchor, eps=0.0), [[-d, -d, d, d, 0], [-e, -e, 0, 2 * e, 0]])
    close(anchor_relative(returns, anchor, eps=1.0)[1, 3], 2 / (math.sqrt(3) + 1))
    # without the 7 in row 0, state 9 is seen once
    mask = torch.tensor([[1, 1, 1, 0, 1], [1, 1, 1, 1, 1]])
    for content in (7.0, torch.nan, -torch.inf):
        masked = anchor_relative(torch.where(mask == 0, content, returns), anchor, scale="none", mask=mask)
        close(masked, [[-1, 0, 1, 0, 0], [-1, -1, 0, 2, 0]])


def test_one_anchor_for_all_is_the_group_relative_advantage():
    rewards = torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    same = torch.full((1, 1), 6)
    close(anchor_relative(rewards, same), group_relative(rewards))
    close(anchor_relative(rewards, same, ddof=0, eps=0.1), group_relative(rewards, ddof=0, eps=0.1))
    flat = torch.full((1, 7), 0.1)
    assert torch.equal(anchor_relative(flat, same, eps=0.0), torch.zeros(1, 7))
    assert anchor_relative(matrix((torch.nan, 1)), same).isnan().all()  # a NaN is not hidden


def test_highest_variance_by_hand():
    rewards = matrix((1, 1), (0, 1), (0, 4), (1, 0))  # stds 0, d, 4d, d; the tie goes to the earlier
    assert highest_variance(rewards, 1).tolist() == [2]
    assert highest_variance(rewards, 2).tolist() == [1, 2]
    assert highest_variance(rewards, 4).tolist() == [0, 1, 2, 3]
    mask = torch.tensor([[1, 1], [1, 1], [1, 0], [1, 1]])  # prompt 2 keeps one sample
    assert highest_variance(rewards, 2, mask).tolist() == [1, 3]
    with pytest.raises(ValueError, match="count is 5 of 4 prompts"):
        highest_variance(rewards, 5)


def test_agreement_masks_by_hand():
    # stds over two critics 0, 3d, d, 2d; the masked tokens would come first and last
    values = torch.tensor([[[0.0, 0, 0], [0, 0, 0]], [[0, 0, 3], [1, 2, 100]]])  # [2, 2, 3]
    mask = torch.tensor([[0, 1, 1], [1, 1, 0]])
    learn, explore = agreement_masks(values, agree=0.25, disagree=0.5, mask=mask)
    assert learn.int().tolist() == [[0, 0, 1], [1, 1, 0]]
    assert explore.int().tolist() == [[0, 1, 0], [1, 0, 0]]
    for masks in (agreement_masks(values, 0.2, 0.2, mask), agreement_masks(values, 0.0, 0.0, mask)):  # < 1 token: none
        assert all(torch.equal(part, mask.bool()) for part in masks)
    assert agreement_masks(values, 1.0, 0.0)[0].sum() == 0 and agreement_masks(values, 1.0, 0.0)[1].all()


def test_agreement_masks_round_exact_shares_to_themselves():
    """0.53 · 100 is 53.000000000000004 in one precision and 52.999999 in another: 53 tokens are meant."""
    values = torch.stack([torch.zeros(1, 100), torch.arange(100.0).unsqueeze(0)])
    for share in (0.29, 0.53, 0.57, 0.58, 0.59):
        learn, explore = agreement_masks(values, share, share)
        assert (~learn).sum() == (~explore).sum() == round(100 * share)


def test_bad_requests_say_what_is_allowed():
    square = torch.zeros(2, 2)
    with pytest.raises(ValueError, match="'std' is unknown; choose one of group, none, batch"):
        group_relative(square, scale="std")
    with pytest.raises(ValueError, match="'batch' is unknown; choose one of group, none"):
        anchor_relative(square, square.long(), scale="batch")
    for function in (group_relative, leave_one_out):
        with pytest.raises(ValueError, match=r"rewards have shape \[4\]; give \[prompts"):
            function(torch.zeros(4))
        with pytest.raises(ValueError, match="different numbers of dimensions"):
            function(square, mask=torch.ones(2))
    with pytest.raises(ValueError, match=r"weights \[3\]"):
        gdpo(torch.zeros(2, 2, 2), [1.0, 1.0, 1.0])
    with pytest.raises(ValueError, match="agree 2"):
        agreement_masks(torch.zeros(2, 1, 1), 2, 0)
    with pytest.raises(ValueError, match="at least two critics"):
        agreement_masks(torch.zeros(1, 1, 1), 0, 0)
