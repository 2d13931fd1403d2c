import tracemalloc
from typing import NamedTuple

import numpy as np
import pytest
import torch

from cleanrl_zoo.data import replay as replay_module
from cleanrl_zoo.data.memory import available_memory
from cleanrl_zoo.data.replay import Replay
from cleanrl_zoo.run.checkpoint import capture, load_checkpoint, restore, save_checkpoint


class Step(NamedTuple):
    obs: np.ndarray
    final_obs: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray


KINDS = {  # shape and type of observations; a stack's frames are two by three
    "vector": ((2,), torch.float32, False),
    "wide": ((2,), torch.float64, False),
    "number": ((), torch.int64, False),
    "image": ((2, 3), torch.uint8, False),
    "stack": ((4, 2, 3), torch.uint8, True),
}


def random_world(replay, stack, shape, dtype, seed, cuts=0.0):
    """Steps a replay through random episodes beside plain lists; yields, after each step, the lists of its
    transitions (obs, action, reward, next_obs, terminated, truncated), one list per environment.

    No frame occurs twice in a row of 250. A stack's first frames are arbitrary: as after a lost life, where older
    frames go on, or after a reset, where they are empty or repeated.
    """
    rng, count = np.random.default_rng(seed), replay.num_envs
    frames = iter(range(10**9))
    frame_shape = shape[1:] if stack else shape
    frame = lambda: np.full(frame_shape, next(frames) % 251, dtype=torch.empty(0, dtype=dtype).numpy().dtype)  # noqa: E731
    first = lambda: np.stack([frame() for _ in range(shape[0])]) if stack else frame()  # noqa: E731
    after = lambda obs: np.concatenate([obs[1:], frame()[None]]) if stack else frame()  # noqa: E731
    history = [[] for _ in range(count)]
    obs = np.stack([first() for _ in range(count)])
    replay.begin(obs)
    while True:
        action, reward = rng.integers(0, 9, count), rng.normal(size=count)
        terminated = rng.random(count) < 0.1
        truncated = (rng.random(count) < 0.1) & ~terminated
        done, final = terminated | truncated, np.stack([after(x) for x in obs])
        following = np.stack([first() if done[i] else final[i] for i in range(count)])
        for i in range(count):
            history[i].append([obs[i], action[i], reward[i], final[i], terminated[i], truncated[i]])
        replay.add(action, Step(following, final, reward, terminated, truncated))
        obs = following
        if rng.random() < cuts:
            for i in range(count):
                history[i][-1][5] |= not history[i][-1][4]
            obs = np.stack([first() for _ in range(count)])
            replay.begin(obs)
        yield history


def stored_rows(replay):
    """Row numbers of all that can be sampled, and environment and age (0: the newest) of each."""
    env = np.repeat(np.arange(replay.num_envs), replay._count)
    age = np.tile(np.arange(replay._count), replay.num_envs)
    return env * replay._stride + (replay._slot - 1 - age) % replay.slots, env, age


def assert_right(replay, history):
    """Every transition that can be sampled is that of the plain lists, its n-step window worked out in a loop."""
    index, envs, ages = stored_rows(replay)
    assert len(index) == len(replay) == min(len(history[0]), replay.steps) * replay.num_envs
    batch = replay.gather(index)
    for row, (env, age) in enumerate(zip(envs, ages, strict=True)):
        episode = history[env][len(history[env]) - 1 - age :]
        total, length = 0.0, 0
        for _, _, reward, *_, terminated, truncated in episode[: replay.n_step]:
            total += replay.gamma**length * reward
            length += 1
            if terminated or truncated:
                break
        first, last = episode[0], episode[length - 1]
        assert np.array_equal(batch.obs[row], first[0]) and batch.action[row] == first[1]
        assert np.array_equal(batch.next_obs[row], last[3])
        assert batch.terminated[row] == last[4] and batch.truncated[row] == last[5]
        assert batch.reward[row] == pytest.approx(total, abs=1e-6)
        assert batch.discount[row] == pytest.approx(replay.gamma**length)
    assert batch.obs.shape[1:] == batch.next_obs.shape[1:] == replay.obs_shape


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_every_row_is_that_of_a_plain_list(kind, num_envs, n_step):
    """From the first step until the ring has gone round several times, through ends, cuts and records that grow."""
    shape, dtype, stack = KINDS[kind]
    for capacity in (num_envs, 20):
        replay = Replay(capacity, num_envs, shape, (), 0.9, dtype, torch.int64, n_step, stack)
        world = random_world(replay, stack, shape, dtype, seed=capacity, cuts=0.05)
        for step, history in zip(range(100), world, strict=False):
            if step < 6 or step % 13 == 0:
                assert_right(replay, history)


def counting(capacity, limit, steps, num_envs=1, **kwargs):
    """A replay of a world that counts 0, 1, 2, ... and is cut by a time limit; its action is ten times the state."""
    replay = Replay(capacity, num_envs, (1,), (1,), 0.9, **kwargs)
    column = lambda x: np.full((num_envs, 1), float(x))  # noqa: E731
    replay.begin(column(0))
    for t in range(steps):
        state, done = t % limit, np.full(num_envs, t % limit == limit - 1)
        following = column(0 if done[0] else state + 1)
        step = Step(following, column(state + 1), np.ones(num_envs), np.zeros(num_envs, bool), done)
        replay.add(column(10 * state), step)
    return replay


@pytest.mark.parametrize("steps, present", [(3, {0, 1, 2}), (4, {0, 1, 2, 3}), (5, {0, 1, 2, 3}), (50, {0, 1, 2, 3})])
def test_the_successor_of_the_last_observation_is_the_final_one(steps, present):
    """Limit 4: after 3 comes 4, never the 0 of the next episode; and no slot is seen that was not written."""
    replay = counting(capacity=10, limit=4, steps=steps)
    batch = replay.sample(500, torch.Generator().manual_seed(0))
    assert set(batch.obs[:, 0].tolist()) == present
    assert torch.equal(batch.next_obs, batch.obs + 1)
    assert torch.equal(batch.action, 10 * batch.obs)
    assert torch.equal(batch.truncated, (batch.obs[:, 0] == 3).float())
    assert batch.terminated.sum() == 0 and batch.reward.eq(1).all()


def test_every_transition_is_drawn_equally_often():
    """χ² of 40,000 draws over 20 transitions, half full and after the ring went round; 19 degrees of freedom have a
    mean of 19 and a deviation of √38 = 6.2."""
    for steps in (10, 37):
        replay = counting(capacity=20 if steps > 20 else 40, limit=99, steps=steps, num_envs=2)
        index = replay.indices(40_000, torch.Generator().manual_seed(1))
        rows, counts = np.unique(index, return_counts=True)
        assert set(rows) == set(stored_rows(replay)[0]) and len(rows) == 20
        expected = 40_000 / 20
        assert ((counts - expected) ** 2 / expected).sum() < 19 + 4 * 6.2


def test_n_step_window_ends_with_the_episode_and_with_the_newest_row():
    """Limit 4, γ = .9, n = 3, rewards 1, six steps. From 0: 1 + .9 + .81 = 2.71 and γ³. From 2: the limit is inside,
    so 1 + .9 = 1.9, final observation 4, γ². From 3: 1, 4, γ. The second episode has only its steps 0 and 1."""
    replay = counting(capacity=10, limit=4, steps=6, n_step=3)
    index, _, _ = stored_rows(replay)
    batch = replay.gather(index[::-1].copy())  # oldest first
    assert batch.obs[:, 0].tolist() == [0, 1, 2, 3, 0, 1]
    assert batch.reward.tolist() == pytest.approx([2.71, 2.71, 1.9, 1.0, 1.9, 1.0])
    assert batch.next_obs[:, 0].tolist() == [3, 4, 4, 4, 2, 2]
    assert batch.discount.tolist() == pytest.approx([0.729, 0.729, 0.81, 0.9, 0.81, 0.9])
    assert batch.truncated.tolist() == [0, 1, 1, 1, 0, 0]


def test_a_cut_truncates_where_the_episode_stood():
    """Dropped after two steps at 2: the transition 1 → 2 is truncated there, and 7 is the start of something else."""
    replay = counting(capacity=10, limit=99, steps=2)
    replay.begin(np.array([[7.0]]))
    no = np.zeros(1, bool)
    replay.add(np.array([[70.0]]), Step(np.array([[8.0]]), np.array([[8.0]]), np.ones(1), no, no))
    batch = replay.gather(stored_rows(replay)[0][::-1].copy())
    assert batch.obs[:, 0].tolist() == [0, 1, 7] and batch.next_obs[:, 0].tolist() == [1, 2, 8]
    assert batch.truncated.tolist() == [0, 1, 0]


def test_many_ends_of_episodes_are_kept():
    """First one in 20 transitions is an end, later one in 2: of a ring of 300 then 150, more than there was room for,
    after the queue of them has gone round. What follows 1 is then always 2, never the next 0."""
    replay, state, no = Replay(300, 1, (1,), (1,), 0.9), 0, np.zeros(1, bool)
    replay.begin(np.zeros((1, 1)))
    for t in range(2700):
        final, done = np.full((1, 1), state + 1.0), np.full(1, state == (19 if t < 1500 else 1))
        state = 0 if done[0] else state + 1
        replay.add(final, Step(np.full((1, 1), float(state)), final, np.ones(1), no, done))
        if t % 100 == 99:
            batch = replay.gather(stored_rows(replay)[0])
            assert torch.equal(batch.next_obs, batch.obs + 1) and torch.equal(batch.next_obs, batch.action)
    # and that of the slot that is written next
    assert replay._next_record - replay._first_record == 151 and len(replay._records) < 600


def test_several_batches_can_be_drawn_at_once():
    replay = counting(capacity=50, limit=4, steps=30)
    batches = [x.unflatten(0, (4, 8)) for x in replay.sample(32, torch.Generator().manual_seed(0))]
    one = replay.gather(replay.indices(32, torch.Generator().manual_seed(0)))
    assert batches[0].shape == (4, 8, 1) and torch.equal(batches[0][3], one.obs[24:])


def test_batches_are_delivered_on_a_device():
    replay = Replay(10, 1, (4, 2, 2), (), 0.9, torch.uint8, torch.int64, frame_stack=True, device="meta")
    next(random_world(replay, True, (4, 2, 2), torch.uint8, seed=0))
    batch = replay.sample(3, torch.Generator().manual_seed(0))
    assert {x.device.type for x in batch} == {"meta"} and batch.action.dtype == torch.int64


def test_what_cannot_be_is_said():
    with pytest.raises(ValueError, match="replay of 3 transitions: must hold one of each of the 4 environments"):
        Replay(3, 4, (1,), (1,), 0.9)
    replay = Replay(4, 1, (1,), (1,), 0.9)
    with pytest.raises(RuntimeError, match="begin"):
        replay.add(np.zeros((1, 1)), None)
    with pytest.raises(ValueError, match="empty"):
        replay.sample(1, torch.Generator())


# Memory


def test_memory_is_told_beforehand():
    """84 · 84 = 7,056 bytes a frame: 7.06 GB for 10⁶ of them, four times as much where whole stacks are stored."""
    frames = Replay.plan(10**6, 8, (4, 84, 84), (), torch.uint8, frame_stack=True, available=10**11)
    stacks = Replay.plan(10**6, 8, (4, 84, 84), (), torch.uint8, available=10**11)
    assert "frames of 84 × 84" in frames and "1,000,000 × 7,056 bytes = 7.06 GB" in frames
    assert "whole stacks" in stacks and "= 28.2 GB" in stacks
    assert frames.endswith("and 28,224 bytes for each end of an episode in it") and "episode" not in stacks


def test_memory_that_is_not_there_is_told_at_once(monkeypatch):
    with pytest.raises(ValueError, match=r"28\.2 GB.*only 20 GB of memory are free") as error:
        Replay.plan(10**6, 8, (4, 84, 84), (), torch.uint8, available=20 * 10**9)
    assert "\n" not in str(error.value)
    monkeypatch.setattr(replay_module, "available_memory", lambda: 10**6)
    with pytest.raises(ValueError, match="only 0.001 GB"):
        Replay(10**5, 8, (11,), (3,), 0.99)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_taken_is_the_memory_predicted(kind):
    shape, dtype, stack = KINDS[kind]
    layout = Replay._layout(20_000, 2, shape, (), dtype, stack)
    predicted = sum(int(np.prod(shape)) * kind.itemsize for shape, kind in layout.values())
    tracemalloc.start()
    replay = Replay(20_000, 2, shape, (), 0.9, dtype, frame_stack=stack)
    measured, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert replay.nbytes == predicted
    assert predicted <= measured < predicted + 20_000  # and some small objects


def test_memory_grows_with_the_ends_of_episodes_and_no_further_than_there_is(monkeypatch):
    """Every second step an end: 500 live records of four frames of 4 bytes in a store of 1,000 rows."""
    replay = Replay(1000, 1, (4, 2, 2), (), 0.9, torch.uint8, frame_stack=True)
    obs, flags = np.zeros((1, 4, 2, 2), np.uint8), (np.zeros(1, bool), np.ones(1, bool))
    replay.begin(obs)
    before, one = replay.nbytes, np.ones(1)
    for t in range(3000):
        replay.add(one, Step(obs, obs, one, flags[0], flags[t % 2]))
    assert 16 * (500 - 64) <= replay.nbytes - before <= 16 * (1.5 * 502 - 64)
    monkeypatch.setattr(replay_module, "available_memory", lambda: 10_000)
    with pytest.raises(MemoryError, match="for the ends of [0-9]+ episodes, only 1e-05 GB") as error:
        for _ in range(1000):
            replay.add(one, Step(obs, obs, one, flags[0], flags[1]))
    assert "\n" not in str(error.value)


def test_available_memory_minds_the_limits_of_control_groups(tmp_path):
    def write(name, text):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    assert available_memory(tmp_path) is None
    write("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    write("proc/self/cgroup", "0::/box\n")
    assert available_memory(tmp_path) == 8000 * 1024
    write("sys/fs/cgroup/box/memory.max", "max\n")
    write("sys/fs/cgroup/box/memory.current", "1000\n")
    write("sys/fs/cgroup/box/memory.stat", "anon 900\ninactive_file 100\n")
    assert available_memory(tmp_path) == 8000 * 1024
    write("sys/fs/cgroup/box/memory.max", "5000\n")  # 5000 − 1000 used, of which 100 can be given back
    assert available_memory(tmp_path) == 4100
    write("proc/self/cgroup", "3:memory:/elsewhere\n2:cpu:/\n")  # version 1, seen from inside a container
    for name, text in (("limit_in_bytes", "3000"), ("usage_in_bytes", "4000"), ("stat", "total_inactive_file 0\n")):
        write(f"sys/fs/cgroup/memory/memory.{name}", text)
    assert available_memory(tmp_path) == 0


# Checkpoints


def everything(replay):
    """The state with its segments read, as comparable bytes."""
    state = capture(replay)
    flat = lambda arrays: {key: (x.dtype, x.shape, x.tobytes()) for key, x in arrays.items()}  # noqa: E731
    segments = {key: flat(segment.arrays()) for key, segment in state.pop("segments").items()}
    rest, pending = (
        flat(state.pop("rest")),
        {k: state.pop(k).tobytes() for k in ("pending", "pending_age") if k in state},
    )
    return segments, rest, pending, state


@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_goes_through_the_disk_at_any_moment(tmp_path, monkeypatch, kind):
    """Saved every few steps, from before the first until after several rounds; each time a new one is filled from the
    disk, gives what the old one gives, and takes its place every other time."""
    monkeypatch.setattr(replay_module, "CHUNK_BYTES", 400)
    shape, dtype, stack = KINDS[kind]
    make = lambda: Replay(45, 3, shape, (), 0.9, dtype, torch.int64, 2, stack)  # noqa: E731
    proxy = Proxy(make())
    world = random_world(proxy, stack, shape, dtype, seed=5, cuts=0.05)
    generator, checked = torch.Generator().manual_seed(0), 0
    for step, history in zip(range(80), world, strict=False):
        if step % 11 == 0:
            folder = tmp_path / f"step_{step:04d}"
            save_checkpoint(folder, {"replay": capture(proxy.replay)})
            other = restore(make(), load_checkpoint(folder)["replay"])
            assert everything(other) == everything(proxy.replay)
            assert_right(other, history)
            state = generator.get_state()
            first = [x.clone() for x in proxy.sample(64, generator)]
            generator.set_state(state)
            assert all(torch.equal(a, b) for a, b in zip(first, other.sample(64, generator), strict=True))
            if step % 2:
                proxy.replay = other
            checked += len(capture(other)["segments"])
    assert checked > 5


class Proxy:
    """A replay that can be replaced by another while a world is stepping it."""

    def __init__(self, replay):
        self.replay = replay

    def __getattr__(self, name):
        return getattr(self.replay, name)


def test_a_resumed_run_has_the_same_checkpoints(tmp_path, monkeypatch):
    """Segments too are the same files: those written before the kill are referred to, not read out of the ring again,
    which holds only a part of them by then."""
    monkeypatch.setattr(replay_module, "CHUNK_BYTES", 800)
    shape, dtype, stack = KINDS["vector"]
    for name in ("whole", "killed"):
        proxy = Proxy(Replay(90, 3, shape, (), 0.9, dtype, torch.int64))
        for step, _ in zip(range(150), random_world(proxy, stack, shape, dtype, seed=6), strict=False):
            if step % 15 == 0:
                folder = tmp_path / name / f"step_{step:04d}"
                save_checkpoint(folder, capture(proxy.replay))
                if name == "killed" and step % 30 == 0:
                    proxy.replay = restore(Replay(90, 3, shape, (), 0.9, dtype, torch.int64), load_checkpoint(folder))
    files = [
        {p.relative_to(tmp_path / n): p.read_bytes() for p in (tmp_path / n).rglob("*.*")} for n in ("whole", "killed")
    ]
    assert files[0] == files[1] and len(files[0]) > 8


def test_a_cut_after_a_checkpoint_is_in_the_next_one(tmp_path, monkeypatch):
    """The newest row changes when its episode is dropped: no chunk that was written already may hold it."""
    monkeypatch.setattr(replay_module, "CHUNK_BYTES", 100)  # 5 rows of 20 bytes
    for steps in range(3, 12):
        replay = counting(capacity=50, limit=99, steps=steps)
        save_checkpoint(tmp_path / str(steps) / "step_1", capture(replay))
        replay.begin(np.array([[7.0]]))
        save_checkpoint(tmp_path / str(steps) / "step_2", capture(replay))
        other = restore(Replay(50, 1, (1,), (1,), 0.9), load_checkpoint(tmp_path / str(steps) / "step_2"))
        truncated = other.gather(stored_rows(other)[0]).truncated
        assert truncated.tolist() == [1.0] + [0.0] * (steps - 1)


def test_only_new_rows_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(replay_module, "CHUNK_BYTES", 800)
    shape, dtype, stack = KINDS["vector"]
    replay = Replay(900, 3, shape, (), 0.9, dtype, torch.int64)
    written = []
    for step, _ in zip(range(250), random_world(replay, stack, shape, dtype, seed=7), strict=False):
        if step % 50 == 49:
            before = set((tmp_path / "segments").glob("*")) if step > 50 else set()
            save_checkpoint(tmp_path / f"step_{step:04d}", capture(replay))
            written.append(len(set((tmp_path / "segments").glob("*")) - before))
    rows = 800 // (3 * 4 * 6)  # of a chunk: 3 environments, 2 + 1 + 3 numbers of 4 bytes
    assert sum(written) == len(capture(replay)["segments"]) == 250 // rows and max(written) <= 50 // rows + 1
