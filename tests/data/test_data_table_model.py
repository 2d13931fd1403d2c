"""The model of many small worlds that planning reads."""

import torch

from cleanrl_zoo.data.episodes import Transition
from cleanrl_zoo.data.table_model import TableModel


def seen(obs, action, reward, next_obs, terminated):
    ended = torch.tensor(terminated)
    reward = torch.tensor(reward, dtype=torch.float64)
    return Transition(torch.tensor(obs), torch.tensor(action), reward, torch.tensor(next_obs), ended, ended)


def test_what_was_never_tried_leads_back_to_its_state_for_nothing():
    model = TableModel.empty(2, 3, 2)
    step = model.recall(torch.tensor([2, 1]), torch.tensor([0, 1]))
    assert step.next_obs.tolist() == [2, 1] and step.reward.tolist() == [0.0, 0.0]
    assert not step.terminated.any() and not model.tried.any()


def test_each_world_remembers_what_it_saw_last():
    model = TableModel.empty(2, 3, 2)
    model.remember(seen([0, 1], [1, 0], [5.0, 6.0], [1, 2], [False, True]), 4)
    model.remember(seen([0, 1], [1, 0], [7.0, 6.0], [2, 2], [False, True]), 8)
    step = model.recall(torch.tensor([[0, 1], [1, 0]]), torch.tensor([[1, 0], [0, 1]]))  # two pairs of both
    assert step.reward.tolist() == [[7.0, 6.0], [0.0, 0.0]] and step.next_obs.tolist() == [[2, 2], [1, 0]]
    assert step.terminated.tolist() == step.done.tolist() == [[False, True], [False, False]]
    assert model.tried.nonzero().tolist() == [[0, 0, 1], [1, 1, 0]] and model.when[0, 0, 1] == model.when[1, 1, 0] == 8


def test_an_end_leads_nowhere():
    model = TableModel.empty(2, 3, 2)
    model.remember(seen([0, 0], [1, 1], [1.0, 1.0], [2, 2], [False, True]), 1)
    model.remember(seen([1, 1], [0, 0], [1.0, 1.0], [2, 1], [False, False]), 2)
    assert model.leading_to(torch.tensor([2, 2])).nonzero().tolist() == [[0, 0, 1], [0, 1, 0]]
    assert model.leading_to(torch.tensor([2, 1])).nonzero().tolist() == [[0, 0, 1], [0, 1, 0], [1, 1, 0]]
