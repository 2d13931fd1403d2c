"""Microseconds of the replay store's calls, on one thread.

    python benchmarks/replay_speed.py

10⁶ transitions of 11 observations and 3 actions, batches of 256, uniform and prioritised; a prioritised call draws,
weighs and gives new priorities, `gather` not included. A sum tree of plain Python lists does the same item by item.
Then 84 × 84 × 4 frames: a whole batch each time, with `gather`. Then a checkpoint of the small store every 100,000
transitions. Ways alternate in rounds; the median of the rounds' means is shown, and the fastest round beside it.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch

from cleanrl_zoo.data.prioritized import PrioritizedReplay, ProportionalReplay, RankReplay
from cleanrl_zoo.data.replay import Replay
from cleanrl_zoo.envs import VecStep
from cleanrl_zoo.run.checkpoint import capture, load_checkpoint, restore, save_checkpoint

SIZE, BATCH, ROUNDS, FRAMES = 10**6, 256, 40, 50_000


class PythonTree:
    """A binary sum tree in a list, one item at a time."""

    def __init__(self, weights: list[float]) -> None:
        self.size = len(weights)
        self.sums = [0.0] * self.size + weights
        for node in range(self.size - 1, 0, -1):
            self.sums[node] = self.sums[2 * node] + self.sums[2 * node + 1]

    def set(self, index: int, weight: float) -> None:
        """Gives one leaf its weight."""
        node = index + self.size
        self.sums[node] = weight
        while node > 1:
            node //= 2
            self.sums[node] = self.sums[2 * node] + self.sums[2 * node + 1]

    def find(self, mass: float) -> int:
        """The leaf at which the cumulative sum passes `mass`."""
        node = 1
        while node < self.size:
            node *= 2
            if mass >= self.sums[node]:
                mass -= self.sums[node]
                node += 1
        return node - self.size


def step_of(obs: np.ndarray, done: bool) -> VecStep:
    """One environment's step to `obs` [1, ...], with reward 1."""
    one, flag = np.ones(1), np.full(1, done)
    return VecStep(obs, obs, one, np.zeros(1, bool), flag, one, one)


def fill(replay: Replay, count: int) -> None:
    """Adds `count` transitions of random observations; an episode ends every 500."""
    rng = np.random.default_rng(0)
    many = rng.integers(0, 255, (100, 1, *replay.obs_shape), dtype=np.uint8)
    action = np.zeros((1, *replay.action_shape))
    if replay._total == 1:
        replay.begin(many[0])
    for t in range(count):
        replay.add(action, step_of(many[t % 100], t % 500 == 499))


def prioritise(replay: PrioritizedReplay) -> None:
    """Gives every transition a random priority."""
    replay._sync()
    rows = np.flatnonzero(replay.tree.leaves)
    replay.update_priorities(rows, np.random.default_rng(0).random(len(rows)))


def alternate(ways: dict[str, Callable[[], object]], calls: int) -> dict[str, float]:
    """Prints and returns the microseconds of a call of each way."""
    means: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            started = time.perf_counter()
            for _ in range(calls):
                way()
            means[name].append(1e6 * (time.perf_counter() - started) / calls)
    for name, values in means.items():
        print(f"  {name:48s} {median(values):9.1f} µs   fastest {min(values):9.1f}")
    return {name: median(values) for name, values in means.items()}


def small_observations() -> Replay:
    """Times the store of 10⁶ small transitions, and gives it."""
    generator, errors = torch.Generator().manual_seed(0), torch.rand(BATCH)
    stores = {kind: kind(SIZE, 1, (11,), (3,), 0.99) for kind in (Replay, ProportionalReplay, RankReplay)}
    for replay in stores.values():
        fill(replay, SIZE)
        if isinstance(replay, PrioritizedReplay):
            prioritise(replay)
    uniform, draws = stores[Replay], np.random.default_rng(0)
    tree = PythonTree([1.0] * SIZE)

    def prioritised(replay: PrioritizedReplay) -> Callable[[], None]:
        def call() -> None:
            index = replay.indices(BATCH, generator)
            replay.weights(index, 0.4)
            replay.update_priorities(index, errors)

        return call

    def item_by_item() -> None:
        for k, u in enumerate(draws.random(BATCH)):
            tree.set(tree.find((k + u) / BATCH * tree.sums[1]), u)

    print(f"{SIZE:,} transitions of 11 observations, batches of {BATCH}")
    medians = alternate(
        {
            "uniform: indices and gather": lambda: uniform.sample(BATCH, generator),
            "uniform, eight batches at once": lambda: uniform.sample(8 * BATCH, generator),
            "proportional: indices, weights, priorities": prioritised(stores[ProportionalReplay]),
            "rank: indices, weights, priorities": prioritised(stores[RankReplay]),
            "sum tree item by item in Python": item_by_item,
            "add": lambda: uniform.add(np.zeros((1, 3)), step_of(np.zeros((1, 11)), False)),
        },
        calls=20,
    )
    slow, fast = (
        medians[name] for name in ("sum tree item by item in Python", "proportional: indices, weights, priorities")
    )
    print(f"  item by item / together: {slow / fast:.1f}")
    return uniform


def frames() -> None:
    """Times whole batches of stacks of frames."""
    generator, errors = torch.Generator().manual_seed(0), torch.rand(BATCH)
    make = {"obs_dtype": torch.uint8, "action_dtype": torch.int64, "frame_stack": True}
    uniform, prioritised = (kind(FRAMES, 1, (4, 84, 84), (), 0.99, **make) for kind in (Replay, ProportionalReplay))
    for replay in (uniform, prioritised):
        fill(replay, FRAMES)
    prioritise(prioritised)

    def by_priority() -> None:
        index = prioritised.indices(BATCH, generator)
        prioritised.gather(index)
        prioritised.weights(index, 0.4)
        prioritised.update_priorities(index, errors)

    print(f"{FRAMES:,} transitions of 84 × 84 × 4 frames, batches of {BATCH}")
    medians = alternate({"uniform": lambda: uniform.sample(BATCH, generator), "proportional": by_priority}, calls=3)
    print(f"  proportional / uniform: {medians['proportional'] / medians['uniform']:.2f}")


def checkpoints(replay: Replay) -> None:
    """Times checkpoints of a full store, each with 100,000 transitions more."""
    print(f"a checkpoint of {SIZE:,} transitions, 100,000 of them new")
    with tempfile.TemporaryDirectory() as place:
        seconds = []
        for step in range(11):
            fill(replay, 100_000)
            started = time.perf_counter()
            save_checkpoint(Path(place) / f"step_{step:02d}", capture(replay))
            seconds.append(time.perf_counter() - started)
        print(f"  first {seconds[0]:.2f} s, then {median(seconds[1:]):.2f} s, at most {max(seconds[1:]):.2f} s")
        started = time.perf_counter()
        restore(Replay(SIZE, 1, (11,), (3,), 0.99), load_checkpoint(Path(place) / f"step_{step:02d}"))
        print(f"  loaded in {time.perf_counter() - started:.2f} s")


if __name__ == "__main__":
    torch.set_num_threads(1)
    checkpoints(small_observations())
    frames()
