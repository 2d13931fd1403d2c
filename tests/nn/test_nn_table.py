"""Choices from tables, and a policy that is one."""

import numpy as np
import pytest
import torch

from cleanrl_zoo import zoo
from cleanrl_zoo.nn import epsilon_greedy_probs, greedy_probs, mean_error, new_table, sample_action
from cleanrl_zoo.nn.table import LARGEST, RULED_OUT


def test_epsilon_greedy_probabilities_by_hand():
    # ε = 0.2 over four actions: 0.05 each, the best 0.8 more; two best share it
    q = torch.tensor([[0.0, 3.0, 1.0, 2.0], [5.0, 1.0, 5.0, 0.0]], dtype=torch.float64)
    expected = [[0.05, 0.85, 0.05, 0.05], [0.45, 0.05, 0.45, 0.05]]
    assert torch.allclose(epsilon_greedy_probs(q, 0.2), torch.tensor(expected, dtype=torch.float64))
    assert greedy_probs(q).tolist() == [[0, 1, 0, 0], [0.5, 0, 0.5, 0]]


def test_an_action_that_is_ruled_out_is_never_taken():
    q = new_table(2, torch.tensor([[True, False, True], [True, True, True]]))
    assert q.shape == (2, 2, 3) and q[0, 0].tolist() == [0.0, RULED_OUT, 0.0]
    q[0, 0] = torch.tensor([-9.0, RULED_OUT, -10.0])
    assert epsilon_greedy_probs(q[0, 0], 0.5).tolist() == [0.75, 0.0, 0.25]
    probs = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0], dtype=torch.float64).expand(4, 5)
    uniform = torch.tensor([0.0, 0.2499, 0.25, 1 - 2**-53], dtype=torch.float64)
    assert sample_action(probs, uniform).tolist() == [1, 1, 3, 3]
    third = torch.full((1, 3), 1 / 3, dtype=torch.float64) * 0.999  # sums that rounding left below 1
    assert sample_action(third, torch.tensor([1 - 2**-53], dtype=torch.float64)).tolist() == [2]


def test_a_table_is_a_policy_that_can_be_saved(tmp_path):
    rows = torch.tensor([[1.0, 2.0], [3.0, 0.0], [0.0, 1e-12]], dtype=torch.float64)
    policy = zoo.table_policy(rows)
    zoo.save(tmp_path, policy=policy, card={"env": "textbook/RandomWalk5-v0", "policy": policy.spec})
    loaded = zoo.load(tmp_path)
    assert loaded.network.rows.dtype == torch.float64 and torch.equal(loaded.network.rows, rows)
    assert loaded.act(np.array([0, 1, 2, 0])).tolist() == [1, 0, 1, 1]
    with pytest.raises(ValueError, match="has 7 states and 2 actions, the policy 3 and 2: it was trained on another"):
        zoo.evaluate(loaded, 1)


def test_the_mean_error_is_infinite_long_before_a_value_looks_ruled_out():
    assert mean_error(torch.tensor([1.0, -3.0])) == 2.0
    assert mean_error(torch.tensor([[1.0, -3.0], [0.0, 0.0]]), 2) == 2.0  # padding does not count
    assert mean_error(torch.tensor([1.0, -2 * LARGEST])) == torch.inf and LARGEST < 1e-10 * -RULED_OUT
