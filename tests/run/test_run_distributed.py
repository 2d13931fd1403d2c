"""Ranks share rows, gather them in order and sum; one process is a world of one."""

import os
import socket
import subprocess
import sys

import pytest
import torch

from cleanrl_zoo.run.distributed import World, join_world


@pytest.mark.parametrize("rows, size", [(8, 2), (7, 2), (5, 3), (2, 3), (0, 2)])
def test_slices_cover_every_row_once(rows, size):
    taken = [list(range(rows))[World(rank, size).slice(rows)] for rank in range(size)]
    assert sum(taken, []) == list(range(rows))
    assert max(map(len, taken)) - min(map(len, taken)) <= 1


def test_parts_are_the_ranks_share_in_pieces():
    index = torch.tensor([7, 3, 5, 1, 0])
    assert [part.tolist() for part in World(0, 2).parts(index, 2)] == [[7, 3], [5]]
    assert [part.tolist() for part in World(1, 2).parts(index, 2)] == [[1, 0]]
    assert World(2, 3).parts(index[:2], 4) == []  # fewer rows than ranks


def test_a_world_of_one_changes_nothing(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    world = join_world()
    x = torch.arange(3.0)
    assert world == World(0, 1) and world.is_main
    assert world.gather(x) is x and world.sum([x])[0] is x and world.slice(5) == slice(0, 5)


RANK = """
import torch
from cleanrl_zoo.run.distributed import join_world, leave_world
world = join_world()
rows = torch.arange(6)
mine = rows[world.slice(6)]
assert world.gather(mine).tolist() == [0, 1, 2, 3, 4, 5]
flags = world.gather(mine % 2 == 0)
assert flags.dtype == torch.bool and flags.tolist() == [True, False] * 3
a, b = world.sum([torch.full((2, 2), world.rank + 1.0), torch.tensor(10.0 * world.rank)])
assert a.tolist() == [[3.0, 3.0], [3.0, 3.0]] and b.item() == 10.0 and b.shape == ()
leave_world()
"""


def test_two_ranks_gather_in_order_and_sum():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK], env={**os.environ, **place, "RANK": str(rank)}, stderr=-1)
        for rank in range(2)
    ]
    for rank in ranks:
        _, err = rank.communicate(timeout=120)
        assert rank.returncode == 0, err.decode()
