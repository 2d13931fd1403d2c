"""Microseconds of the replay store's calls, on one thread.

    python benchmarks/replay_speed.py      # writes results/speed/replay.json and replay.md

10⁶ transitions of 11 observations and 3 actions, batches of 256, uniform and prioritised; a prioritised call draws,
weighs and gives new priorities, `gather` not included. A sum tree of plain Python lists does the same item by item.
Then 84 × 84 × 4 frames: a whole batch each time, with `gather`. Then checkpoints: of the small store, each with 100,000
transitions more, and of frames of which all are new, as they are where a checkpoint comes more seldom than the store is
filled. Ways alternate in rounds; the median of the rounds' means counts, and the fastest round stands beside it.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from records import ROOT, Parser, write_text
from speed import check_idle
from threadpoolctl import threadpool_limits

from cleanrl_zoo.data.prioritized import PrioritizedReplay, ProportionalReplay, RankReplay
from cleanrl_zoo.data.replay import Replay
from cleanrl_zoo.envs import VecStep
from cleanrl_zoo.run import usage_errors
from cleanrl_zoo.run.checkpoint import capture, load_checkpoint, restore, save_checkpoint
from cleanrl_zoo.run.provenance import git_commit, machine, versions

SIZE, BATCH, ROUNDS, FRAMES = 10**6, 256, 40, 50_000
UNIFORM, PROPORTIONAL, RANK = "uniform: indices and gather", "proportional: indices, weights, priorities", "rank-based"
PYTHON = "sum tree item by item in Python"
Row = tuple[str, float, float]  # of a way: its median and its fastest round


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


def alternate(ways: dict[str, Callable[[], object]], calls: int) -> list[Row]:
    """Microseconds of a call of each way: the median of the rounds' means and the fastest."""
    means: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            started = time.perf_counter()
            for _ in range(calls):
                way()
            means[name].append(1e6 * (time.perf_counter() - started) / calls)
    return [(name, median(values), min(values)) for name, values in means.items()]


def small_observations() -> tuple[Replay, list[Row]]:
    """Times the store of `SIZE` small transitions, and gives it."""
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

    ways = {
        UNIFORM: lambda: uniform.sample(BATCH, generator),
        "uniform, eight batches at once": lambda: uniform.sample(8 * BATCH, generator),
        PROPORTIONAL: prioritised(stores[ProportionalReplay]),
        RANK: prioritised(stores[RankReplay]),
        PYTHON: item_by_item,
        "add": lambda: uniform.add(np.zeros((1, 3)), step_of(np.zeros((1, 11)), False)),
    }
    return uniform, alternate(ways, calls=20)


def frame_stores() -> tuple[Replay, list[Row]]:
    """Times whole batches of stacks of `FRAMES` frames, and gives the uniform store."""
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

    return uniform, alternate(
        {"uniform": lambda: uniform.sample(BATCH, generator), "proportional": by_priority}, calls=3
    )


def checkpoints(small: Replay, frames: Replay) -> dict[str, float]:
    """Seconds of a checkpoint of each store, and of loading the small one."""
    found = {}
    with tempfile.TemporaryDirectory() as place:
        seconds = []
        for step in range(11):
            fill(small, SIZE // 10)
            started = time.perf_counter()
            save_checkpoint(Path(place) / f"step_{step:02d}", capture(small))
            seconds.append(time.perf_counter() - started)
        found["the small store, all of it new"] = seconds[0]
        found["the small store, a tenth of it new (median of ten)"] = median(seconds[1:])
        started = time.perf_counter()
        restore(Replay(SIZE, 1, (11,), (3,), 0.99), load_checkpoint(Path(place) / f"step_{step:02d}"))
        found["loading the small store"] = time.perf_counter() - started
    with tempfile.TemporaryDirectory() as place:
        started = time.perf_counter()
        save_checkpoint(Path(place) / "step_00", capture(frames))
        found[f"{FRAMES:,} frames, all of them new"] = time.perf_counter() - started
    return found


def table(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    small, frames = ({name: middle for name, middle, _ in record["times"][kind]} for kind in ("small", "frames"))
    lines = [f"{SIZE:,} transitions of 11 observations and 3 actions, batches of {BATCH}:", ""]
    for kind in ("small", "frames"):
        if kind == "frames":
            lines += ["", f"{FRAMES:,} transitions of 84 × 84 × 4 frames, batches of {BATCH} with `gather`:", ""]
        lines += ["| a call | µs | fastest round |", "| --- | --- | --- |"]
        lines += [f"| {name} | {middle:,.1f} | {fastest:,.1f} |" for name, middle, fastest in record["times"][kind]]
    lines += ["", "| a checkpoint | seconds |", "| --- | --- |"]
    lines += [f"| {name} | {seconds:.2f} |" for name, seconds in record["checkpoints"].items()]
    where, code = record["machine"], record["commit"] or "no commit"
    packages = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    lines += [
        "",
        f"- Drawing, weighing and new priorities of {BATCH} of {SIZE:,} (goal: at most 250 µs): "
        f"**{small[PROPORTIONAL]:.0f} µs**; item by item in Python (goal: at least 10 times as long) "
        f"**{small[PYTHON] / small[PROPORTIONAL]:.1f}**.",
        "- Prioritised over uniform on frames (goal: at most 1.3): "
        f"**{frames['proportional'] / frames['uniform']:.2f}**.",
        f"- Medians of {ROUNDS} rounds in turns, one thread, {where['cpu']} ({where['system']}), commit {code[:12]}"
        f"{' (modified)' if record['dirty'] else ''}, {packages}.",
    ]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="benchmarks/replay_speed.py", description="Microseconds of the replay store's calls.")
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="default results/")
    parser.add_argument("--force", action="store_true", help="measure even while something else runs")
    args = parser.parse_args(argv)
    with usage_errors():
        check_idle(args.force)
    torch.set_num_threads(1)
    threadpool_limits(1, "blas")
    commit, dirty = git_commit(ROOT)
    record: dict[str, Any] = {
        "machine": machine(), "commit": commit, "dirty": dirty, "versions": versions(),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"), "load_before": os.getloadavg()[0],
    }  # fmt: skip
    small, times_small = small_observations()
    frames, times_frames = frame_stores()
    record["times"] = {"small": times_small, "frames": times_frames}  # microseconds
    record["checkpoints"] = checkpoints(small, frames)  # seconds
    out = args.results / "speed" / "replay.json"
    write_text(out, json.dumps(record, indent=1) + "\n")
    write_text(out.with_suffix(".md"), table(record))
    print(table(record), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
