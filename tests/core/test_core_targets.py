import pytest
import torch
from torch import nn

from cleanrl_zoo.core.targets import (
    double_q_target,
    expected_sarsa_target,
    polyak_update,
    q_target,
    sarsa_target,
    soft_q_target,
)


def tensor(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def close(actual, expected):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=torch.float64), rtol=0, atol=1e-9)


REWARD = tensor(1, 1)
NEXT_Q = tensor([5, 2], [5, 2])
TERMINATED = torch.tensor([False, True])  # the first was truncated, or went on: it bootstraps


def test_q_target():
    close(q_target(REWARD, NEXT_Q, TERMINATED, 0.99), [5.95, 1])  # 1 + .99 * 5
    close(q_target(REWARD, NEXT_Q, TERMINATED.float(), 0.99), [5.95, 1])
    # n-step: gamma to the number of real steps, .5^1 and .5^2: 1 + .5 * 5, 1 + .25 * 5
    close(q_target(REWARD, NEXT_Q, tensor(0, 0), tensor(0.5, 0.25)), [3.5, 2.25])


def test_size_1_dimensions_broadcast_where_an_action_chooses():
    """One next action for all rows, and one row of values for all actions: r + ½ Q(a')."""
    going = torch.tensor([False, False])
    next_q = tensor([5, 2], [7, 3])
    close(sarsa_target(REWARD, next_q, torch.tensor([1]), going, 0.5), [2, 2.5])
    close(sarsa_target(REWARD, next_q[:1], torch.tensor([0, 1]), going, 0.5), [3.5, 2])
    close(double_q_target(REWARD, tensor([9, 0]), next_q, going, 0.5), [3.5, 4.5])


def test_double_q_target_selects_online_and_evaluates_with_the_target():
    online = tensor([0, 9], [0, 9])
    close(double_q_target(REWARD, online, NEXT_Q, TERMINATED, 0.5), [2, 1])  # action 1: 1 + .5 * 2
    close(double_q_target(REWARD, NEXT_Q, NEXT_Q, TERMINATED, 0.99), q_target(REWARD, NEXT_Q, TERMINATED, 0.99))


def test_sarsa_targets():
    close(sarsa_target(REWARD, NEXT_Q, torch.tensor([1, 0]), TERMINATED, 0.5), [2, 1])
    # expectation under (1/4, 3/4): 5/4 + 6/4 = 2.75, 1 + .5 * 2.75
    probs = tensor([0.25, 0.75], [0.25, 0.75])
    close(expected_sarsa_target(REWARD, NEXT_Q, probs, TERMINATED, 0.5), [2.375, 1])
    greedy = tensor([1, 0], [1, 0])
    close(expected_sarsa_target(REWARD, NEXT_Q, greedy, TERMINATED, 0.9), q_target(REWARD, NEXT_Q, TERMINATED, 0.9))


def test_soft_q_target():
    # 1 + .5 * (4 - .2 * (-5)) = 3.5
    close(soft_q_target(REWARD, tensor(4, 4), tensor(-5, -5), 0.2, TERMINATED, 0.5), [3.5, 1])
    close(soft_q_target(REWARD, tensor(4, 4), tensor(-5, -5), tensor(0.2), TERMINATED, 0.5), [3.5, 1])


def test_targets_refuse_a_column_against_a_row():
    column = REWARD.unsqueeze(1)
    for call in (
        lambda: q_target(column, NEXT_Q, TERMINATED, 0.9),
        lambda: q_target(REWARD, NEXT_Q, TERMINATED.unsqueeze(1), 0.9),
        lambda: q_target(REWARD, NEXT_Q, TERMINATED, column),
        lambda: sarsa_target(REWARD, NEXT_Q, torch.zeros(2, 1), TERMINATED, 0.9),
        lambda: soft_q_target(REWARD, column, REWARD, 0.2, TERMINATED, 0.9),
        lambda: double_q_target(REWARD, NEXT_Q, NEXT_Q[0], TERMINATED, 0.9),
        lambda: expected_sarsa_target(REWARD, NEXT_Q, NEXT_Q[0], TERMINATED, 0.9),
    ):
        with pytest.raises(ValueError, match="different numbers of dimensions") as caught:
            call()
        assert "\n" not in str(caught.value)


def test_polyak_update_refuses_another_network_before_it_changes_anything():
    for online in (nn.Linear(2, 2, bias=False), nn.Linear(1, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))):
        target = nn.Linear(2, 2)
        before = target.weight.clone()
        with pytest.raises(ValueError, match="have shapes"):
            polyak_update(target, online, 0.5)
        assert torch.equal(target.weight, before)


def test_polyak_update():
    target, online = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    nn.init.constant_(target.weight, 1.0)
    nn.init.constant_(online.weight, 3.0)
    online.running_mean += 7
    online.num_batches_tracked += 4
    polyak_update(target, online, 0.25)  # 1 + .25 * (3 - 1)
    assert torch.equal(target.weight, torch.full((2,), 1.5))
    assert torch.equal(target.running_mean, online.running_mean)  # buffers are copied
    assert target.num_batches_tracked == 4
    assert torch.equal(online.weight, torch.full((2,), 3.0))
    assert target.weight.requires_grad and target.weight.grad_fn is None

    target, online = nn.Linear(3, 3), nn.Linear(3, 3)
    before = target.weight.clone()
    polyak_update(target, online, 0.0)
    assert torch.equal(target.weight, before)
    polyak_update(target, online, 1.0)
    assert torch.equal(target.weight, online.weight)
    with pytest.raises(ValueError, match="tau is 1.5"):
        polyak_update(target, online, 1.5)
    with pytest.raises(ValueError):
        polyak_update(target, nn.Linear(3, 3, bias=False), 0.5)
