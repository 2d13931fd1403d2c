"""The replay store of off-policy methods: a ring of the last transitions, allocated once, sampled in batches.

Row t of an environment is the transition obs[t] → next_obs[t]. An observation is stored once: `next_obs[t]` is the
observation of row t+1, and the newest row is followed by the one that is acted on next. Only where an episode ended is
the true last observation something else; those few are kept apart, in the order in which they came. Where observations
are stacks of frames, a row holds its newest frame alone and a stack is put together when it is sampled.
"""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cleanrl_zoo.data.memory import available_memory

CHUNK_BYTES = 2**24  # of rows that a checkpoint writes as one file


class Batch(NamedTuple):
    """B sampled transitions; the memory is used again by the next batch of the same size."""

    obs: Tensor  # [B, ...] as the environment gave it
    action: Tensor  # [B, ...] as given to `add`
    reward: Tensor  # float32 [B], raw; with n steps their discounted sum
    next_obs: Tensor  # [B, ...] the true one after the last of these rewards, before any autoreset
    terminated: Tensor  # float32 [B], 0 or 1, of the transition that led to next_obs
    truncated: Tensor  # float32 [B], 0 or 1
    discount: Tensor  # float32 [B], γ to the number of rewards summed


class Replay:
    """The last `capacity` transitions of `num_envs` environments, sampled uniformly.

    Args:
        capacity: transitions in all; rounded down to whole rows of `num_envs`.
        num_envs: N.
        obs_shape, action_shape: of one environment; `()` for discrete actions.
        gamma: discount factor γ.
        obs_dtype: kept as it is; float32 vectors are stored beside the rest of their row, so that a batch is one
            read per transition.
        action_dtype: float32, or int64 below 2²⁴.
        n_step: rewards that are summed; windows shorten where an episode ends and at the newest row.
        frame_stack: the first axis of an observation is a stack of frames, the newest last, that moves by one frame
            per step and starts anew in any way; each frame is stored once.
        device: where batches are delivered; the store itself is in main memory.

    Memory is taken once, but for a record of each episode that ended in the store: the queue of these grows as needed.

    Use: `begin(obs)` with the first observations, then `add(action, step)` after each step.

    Raises:
        ValueError: when `capacity` is below `num_envs`, or the memory is not there.
    """

    def __init__(
        self,
        capacity: int,
        num_envs: int,
        obs_shape: tuple[int, ...],
        action_shape: tuple[int, ...],
        gamma: float,
        obs_dtype: torch.dtype = torch.float32,
        action_dtype: torch.dtype = torch.float32,
        n_step: int = 1,
        frame_stack: bool = False,
        device: str = "cpu",
    ) -> None:
        self.plan(capacity, num_envs, obs_shape, action_shape, obs_dtype, frame_stack)  # raises where it cannot be
        layout = self._layout(capacity, num_envs, obs_shape, action_shape, obs_dtype, frame_stack)
        self.num_envs, self.gamma, self.n_step, self.device = num_envs, gamma, n_step, device
        self._powers = gamma ** np.arange(n_step + 1)  # of γ
        self.obs_shape, self.action_shape, self.action_dtype = obs_shape, action_shape, action_dtype
        self.frame_stack, self.stack = frame_stack, obs_shape[0] if frame_stack else 1  # S
        self.steps = capacity // num_envs  # T, transitions of each environment
        self.capacity = self.steps * num_envs
        self.slots = self.steps + self.stack
        self.packed = "obs" not in layout

        self._arrays = arrays = {name: np.zeros(*entry) for name, entry in layout.items()}
        self._rows, self._ends, self._record = arrays["rows"], arrays["ends"], arrays["record"]
        self._record[:] = -1
        self._stride, width = self._rows.shape[1:]
        obs_width = obs_shape[0] if self.packed else 0
        self._action = slice(obs_width, obs_width + math.prod(action_shape))
        self._reward, self._terminated, self._truncated = range(self._action.stop, width)
        self._obs = self._rows[..., :obs_width] if self.packed else arrays["obs"]
        self._age = arrays.get("age")
        self._flat_rows, self._flat_record = self._rows.reshape(-1, width), self._record.reshape(-1)
        if self.packed:  # a row and the observation that follows it, as one piece of memory
            table, rows = torch.from_numpy(self._rows), num_envs * self._stride - 1
            self._transitions = table.as_strided((rows, width + obs_width), (width, 1))

        self._total = 1  # rows stored so far; row 0 stands for what was before the first observation
        self._first_record = self._next_record = 0  # numbers of the oldest record still needed and of the next
        row_bytes = num_envs * (4 * width + (0 if self.packed else self._obs[0, 0].nbytes))
        self._chunk = max(1, CHUNK_BYTES // row_bytes)  # rows that a checkpoint keeps in one file
        self._begun = False
        self._outputs: dict[int, _Output] = {}

    @staticmethod
    def _layout(
        capacity: int, num_envs: int, obs_shape: tuple[int, ...], action_shape: tuple[int, ...],
        obs_dtype: torch.dtype, frame_stack: bool,
    ) -> dict[str, tuple[tuple[int, ...], np.dtype]]:  # fmt: skip
        """Shape and type of every array."""
        stack = obs_shape[0] if frame_stack else 1
        frame_shape = obs_shape[1:] if frame_stack else obs_shape
        frame_dtype = torch.empty(0, dtype=obs_dtype).numpy().dtype
        packed = obs_dtype == torch.float32 and len(obs_shape) == 1
        # one slot more for the observation that is acted on next, and S−1 for the frames before the oldest row
        slots = capacity // num_envs + stack
        # a packed row is read on into the next one: slot 0 is repeated after the last
        stride = slots + packed
        width = (obs_shape[0] if packed else 0) + math.prod(action_shape) + 3  # reward, terminated, truncated
        float32, int32 = np.dtype(np.float32), np.dtype(np.int32)
        return {
            "rows": ((num_envs, stride, width), float32),
            **({} if packed else {"obs": ((num_envs, stride, *frame_shape), frame_dtype)}),
            # What the ring cannot say about an episode's end: the frames before the newest of the stack with which the
            # next one began, then the newest frame of its own true last observation. A queue in the order of time.
            "records": ((max(64, num_envs), stack, *frame_shape), frame_dtype),
            "record": ((num_envs, stride), int32),  # number of the row's record, −1: none
            "ends": ((slots,), int32),  # records made at this slot
            **({"age": ((num_envs, slots), np.dtype(np.uint8))} if frame_stack else {}),  # steps since start, up to S−1
        }

    @classmethod
    def plan(
        cls, capacity: int, num_envs: int, obs_shape: tuple[int, ...], action_shape: tuple[int, ...] = (),
        obs_dtype: torch.dtype = torch.float32, frame_stack: bool = False, available: int | None = None,
    ) -> str:  # fmt: skip
        """The memory that a replay with these arguments takes, as one line, before it is taken.

        Args:
            available: bytes that may be taken; by default those that the system can give.

        Raises:
            ValueError: when `capacity` is below `num_envs`, or the memory is not there.
        """
        if capacity < num_envs:
            raise ValueError(
                f"a replay of {capacity} transitions: must hold one of each of the {num_envs} environments"
            )
        layout = cls._layout(capacity, num_envs, obs_shape, action_shape, obs_dtype, frame_stack)
        total = sum(math.prod(shape) * dtype.itemsize for shape, dtype in layout.values())
        shape = obs_shape[1:] if frame_stack else obs_shape
        kind = f"{'frames' if frame_stack else 'observations'} of {' × '.join(map(str, shape)) or '1'}"
        if not frame_stack and len(obs_shape) == 3:
            kind += ", whole stacks"
        each = math.prod(shape) * obs_dtype.itemsize
        text = (
            f"replay: {capacity:,} transitions, {str(obs_dtype).removeprefix('torch.')} {kind}, each stored once: "
            f"{capacity:,} × {each:,} bytes = {_gigabytes(capacity * each)}, {_gigabytes(total)} with the rest"
        )
        if frame_stack:  # few thousands of them are a percent, but games of short lives have more
            text += f", and {each * obs_shape[0]:,} bytes for each end of an episode in it"
        available = available_memory() if available is None else available
        if available is not None and total > available:
            free = f"only {_gigabytes(available)} of memory are free"
            raise ValueError(f"{text}; {free}; give a smaller capacity (--buffer-size)")
        return text

    @property
    def nbytes(self) -> int:
        """Bytes that the store takes: as `plan` predicts, and more where many episodes ended in it."""
        return sum(array.nbytes for array in self._arrays.values())

    def __len__(self) -> int:
        """Transitions that can be sampled."""
        return self._count * self.num_envs

    @property
    def _records(self) -> np.ndarray:
        return self._arrays["records"]

    @property
    def _slot(self) -> int:
        """The slot whose observation is acted on next."""
        return self._total % self.slots

    @property
    def _count(self) -> int:
        """Transitions of each environment that can be sampled."""
        return min(self._total - 1, self.steps)

    # Writing

    def begin(self, obs: np.ndarray) -> None:
        """Goes on in `obs` [N, ...]: at the start, and after episodes were dropped (`VecEnv.cut`).

        An episode that was running is truncated where it stood: its last observation is the one after its last step.
        """
        newest = (self._slot - 1) % self.slots
        running = np.flatnonzero(self._record[:, newest] < 0)
        self._rows[running, newest, self._truncated] = 1
        self._end(running, newest, self._obs[running, self._slot], obs[running])
        if self.frame_stack:  # of those that had ended just before, too
            self._records[self._record[:, newest] % len(self._records), :-1] = obs[:, :-1]
        self._put_obs(self._slot, obs)
        if self.frame_stack:
            self._age[:, self._slot] = 0
        self._begun = True

    def add(self, action: np.ndarray, step: Any) -> None:
        """Stores the transitions of one step: `action` [N, ...] and what `envs.step` (a `VecStep`) returned."""
        if not self._begun:
            raise RuntimeError("begin(obs) comes before the first add")
        slot, following = self._slot, (self._slot + 1) % self.slots
        rows = self._rows[:, slot]
        rows[:, self._action] = np.reshape(action, (self.num_envs, -1))
        rows[:, self._reward] = step.reward
        rows[:, self._terminated] = step.terminated
        rows[:, self._truncated] = step.truncated
        self._first_record += int(self._ends[slot])  # of the row that was here
        self._ends[slot] = 0
        self._record[:, slot] = -1
        done = step.terminated | step.truncated
        if done.any():
            ended = np.flatnonzero(done)
            self._end(ended, slot, self._newest_frame(step.final_obs[ended]), step.obs[ended])
        self._put_obs(following, step.obs)
        if self.frame_stack:
            self._age[:, following] = np.where(done, 0, np.minimum(self._age[:, slot] + 1, self.stack - 1))
        self._total += 1

    def _newest_frame(self, obs: np.ndarray) -> np.ndarray:
        return obs[:, -1] if self.frame_stack else obs

    def _put_obs(self, slot: int, obs: np.ndarray) -> None:
        frame = self._newest_frame(obs)
        self._obs[:, slot] = frame
        if self.packed and slot == 0:
            self._obs[:, self.slots] = frame

    def _end(self, envs: np.ndarray, slot: int, final_frame: np.ndarray, first_obs: np.ndarray) -> None:
        """Keeps the true last frames of episodes of `envs` [E] that ended at `slot`, and how the next ones started."""
        self._make_room(len(envs))
        numbers = self._next_record + np.arange(len(envs))
        places = numbers % len(self._records)
        self._records[places, -1] = final_frame
        if self.frame_stack:
            self._records[places, :-1] = first_obs[:, :-1]
        self._record[envs, slot] = numbers
        self._ends[slot] += len(envs)
        self._next_record += len(envs)

    def _make_room(self, more: int) -> None:
        """Lets the queue of records grow by a half, to hold `more` beside those that are still needed.

        Raises:
            MemoryError: when the memory is not there.
        """
        live = np.arange(self._first_record, self._next_record)
        if len(live) + more > len(self._records):
            size = 3 * (len(live) + more) // 2
            needed, available = size * self._records[0].nbytes, available_memory()
            if available is not None and needed > available:
                raise MemoryError(
                    f"the replay needs {_gigabytes(needed)} for the ends of {size:,} episodes, only "
                    f"{_gigabytes(available)} of memory are free; free more, or begin anew with a smaller one"
                )
            larger = np.zeros((size, *self._records.shape[1:]), self._records.dtype)
            larger[live % size] = self._records[live % len(self._records)]
            self._arrays["records"] = larger

    # Reading

    def sample(self, batch_size: int, generator: torch.Generator) -> Batch:
        """`batch_size` transitions, each drawn uniformly, with replacement."""
        return self.gather(self.indices(batch_size, generator))

    def indices(self, batch_size: int, generator: torch.Generator) -> np.ndarray:
        """Row numbers int64 [B] for `gather`, drawn uniformly over what can be sampled.

        Raises:
            ValueError: when nothing has been stored.
        """
        if self._count == 0:
            raise ValueError("the replay is empty: add transitions before sampling")
        draw = torch.randint(len(self), (batch_size,), generator=generator).numpy()
        env, age = np.divmod(draw, self._count) if self.num_envs > 1 else (0, draw)
        return env * self._stride + (self._slot - 1 - age) % self.slots

    def gather(self, index: np.ndarray) -> Batch:
        """The transitions of the row numbers `index`, int64 [B]."""
        out = self._outputs.get(len(index)) or self._outputs.setdefault(len(index), _Output(self, len(index)))
        last = index if self.n_step == 1 else self._window(index, out)
        if self.packed:
            torch.index_select(self._transitions, 0, torch.from_numpy(index), out=out.rows)
            if last is not index:
                tail = self._transitions[:, self._terminated :].index_select(0, torch.from_numpy(last))
                out.rows[:, self._terminated :] = tail
        else:
            self._flat_rows.take(index, 0, out=out.numpy_rows, mode="clip")
            self._stacks(index, out.stacks)
            if last is not index:
                flags = self._flat_rows[last, self._terminated :]
                out.numpy_rows[:, self._terminated :] = flags
                self._stacks(last, out.next_stacks)
        if last is not index:
            out.numpy_rows[:, self._reward] = out.window_reward
        ended = np.flatnonzero(out.numpy_rows[:, self._terminated] + out.numpy_rows[:, self._truncated])
        if len(ended):
            numbers = self._flat_record[last[ended]]
            out.final[ended] = self._records[numbers % len(self._records), -1]
        return out.deliver()

    def _stacks(self, index: np.ndarray, out: np.ndarray) -> None:
        """Writes the stack of each row and the frame after it to `out` [B, S+1, ...]."""
        env, slot = np.divmod(index, self._stride)
        offsets = np.arange(1 - self.stack, 2)
        rows = (env * self._stride)[:, None] + (slot[:, None] + offsets) % self.slots  # [B, S+1]
        flat = (-1, math.prod(self._obs.shape[2:]))
        np.take(self._obs.reshape(flat), rows.ravel(), 0, out=out.reshape(flat), mode="clip")
        if not self.frame_stack:
            return
        age = self._age[env, slot]
        for steps in range(self.stack - 1):  # rows whose episode began so few steps ago: older frames are in a record
            young = np.flatnonzero(age == steps)
            number = self._record[env[young], (slot[young] - steps - 1) % self.slots]
            out[young, : self.stack - 1 - steps] = self._records[number % len(self._records), steps:-1]

    def _window(self, index: np.ndarray, out: "_Output") -> np.ndarray:
        """The row at which the n-step window of each row ends, [B]; fills its discounted rewards and discount."""
        slot = index % self._stride if self.num_envs > 1 else index
        newest, steps = self._slot - 1, np.arange(self.n_step)
        rows = (index - slot)[:, None] + (slot[:, None] + steps) % self.slots  # [B, n]
        table = self._flat_rows.take(rows.ravel(), 0)[:, self._reward :].reshape(*rows.shape, 3)
        ended = table[:, :-1, 1] + table[:, :-1, 2]  # [B, n−1] terminated or truncated
        goes_on = (ended == 0) & (steps[:-1] < (newest - slot[:, None]) % self.slots)
        inside = np.logical_and.accumulate(goes_on, 1)  # the rewards after the first, up to the end
        beyond = inside.sum(1)
        out.window_reward = table[:, 0, 0] + (table[:, 1:, 0] * inside * self._powers[1:-1]).sum(1)
        out.discount[:] = self._powers[1 + beyond]
        return rows[np.arange(len(rows)), beyond]

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """All that is stored: full chunks of rows as `segments`, which a checkpoint writes once, the rest as arrays.

        Rows are counted from the first ever stored, and a chunk has the number of its first row divided by its size.
        The newest row belongs to the rest: `begin` may still truncate it.
        """
        oldest = max(0, self._total - self.steps - self.stack + 1)
        full = range(oldest // self._chunk, (self._total - 1) // self._chunk)
        chunks = {str(c): Segment(self, max(oldest, c * self._chunk), (c + 1) * self._chunk) for c in full}
        return {
            "segments": chunks,
            "rest": self._read(max(oldest, full.stop * self._chunk), self._total),
            "pending": self._obs[:, self._slot].copy(),  # what is acted on next
            **({"pending_age": self._age[:, self._slot].copy()} if self.frame_stack else {}),
            "total": self._total,
            "begun": self._begun,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` gave; the replay must have been made with the same arguments."""
        self._total, self._begun = state["total"], state["begun"]
        self._ends[:] = 0
        self._record[:] = -1
        self._first_record = self._next_record = 0
        for segment in state["segments"].values():
            self._write(segment.arrays())
        self._write(state["rest"])
        self._obs[:, self._slot] = state["pending"]
        if self.frame_stack:
            self._age[:, self._slot] = state["pending_age"]
        if self.packed:
            self._obs[:, self.slots] = self._obs[:, 0]

    def _read(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """Copies of the rows `start` to `stop`, counted from the first ever stored."""
        slots = np.arange(start, stop) % self.slots
        record = self._record[:, slots]
        ended = np.argwhere(record >= 0)  # [E, 2]: environment, row
        numbers = record[tuple(ended.T)]
        return {
            "start": np.array(start),
            "rows": self._rows[:, slots],
            **({} if self.packed else {"obs": self._obs[:, slots]}),
            **({"age": self._age[:, slots]} if self.frame_stack else {}),
            "ended": ended,
            "numbers": numbers,
            "records": self._records[numbers % len(self._records)],
        }

    def _write(self, arrays: dict[str, np.ndarray]) -> None:
        """Puts back what `_read` gave, later rows after earlier ones."""
        rows = np.arange(arrays["rows"].shape[1]) + int(arrays["start"])
        live = rows >= self._total - self.steps - self.stack + 1
        slots = rows[live] % self.slots
        self._rows[:, slots] = arrays["rows"][:, live]
        if not self.packed:
            self._obs[:, slots] = arrays["obs"][:, live]
        if self.frame_stack:
            self._age[:, slots] = arrays["age"][:, live]
        kept = live[arrays["ended"][:, 1]]
        (env, row), numbers = arrays["ended"][kept].T, arrays["numbers"][kept]
        if not len(numbers):
            return
        if self._next_record == 0:
            self._first_record = self._next_record = int(numbers.min())
        self._make_room(int(numbers.max()) + 1 - self._next_record)
        self._next_record = int(numbers.max()) + 1
        self._records[numbers % len(self._records)] = arrays["records"][kept]
        slots = rows[row] % self.slots
        self._record[env, slots] = numbers
        np.add.at(self._ends, slots, 1)


@dataclass(frozen=True)
class Segment:
    """The rows `start` to `stop` of a replay, which do not change any more."""

    replay: Replay = field(repr=False)
    start: int
    stop: int

    def arrays(self) -> dict[str, np.ndarray]:
        """The rows, as `Replay.load_state_dict` takes them."""
        return self.replay._read(self.start, self.stop)


class _Output:
    """The memory of batches of one size, and the batch as views of it."""

    def __init__(self, replay: Replay, batch_size: int) -> None:
        width, stack = replay._rows.shape[-1], replay.stack
        obs_width = replay.obs_shape[0] if replay.packed else 0
        pin = replay.device.startswith("cuda")  # copies to the device are twice as fast from pinned memory
        self.rows = torch.zeros(batch_size, width + obs_width, pin_memory=pin)
        discount = torch.full((batch_size,), replay.gamma, pin_memory=pin)
        host = [self.rows, discount]
        if not replay.packed:
            frames = torch.from_numpy(replay._obs[:0, 0])
            several = 1 if replay.n_step == 1 else 2  # next_obs overlaps obs, or is a stack of its own
            host += [frames.new_zeros(batch_size, stack + 1, *frames.shape[1:], pin_memory=pin) for _ in range(several)]
            self.stacks, self.next_stacks = host[2].numpy(), host[-1].numpy()
        self.numpy_rows, self.discount = self.rows.numpy(), discount.numpy()
        self.window_reward = self.discount  # replaced by each n-step window
        self.final = self.numpy_rows[:, width:] if replay.packed else self.next_stacks[:, -1]

        self.copies = [] if replay.device == "cpu" else [(x.to(replay.device), x) for x in host]
        rows, discount, *stacks = [target for target, _ in self.copies] or host
        if replay.packed:
            obs, next_obs = rows[:, :obs_width], rows[:, width:]
        else:
            obs, next_obs = stacks[0][:, :-1], stacks[-1][:, 1:]
            obs, next_obs = (obs, next_obs) if replay.frame_stack else (obs[:, 0], next_obs[:, 0])
        action = rows[:, replay._action].view(batch_size, *replay.action_shape)
        if replay.action_dtype != torch.float32:
            self.copies.append((action.to(replay.action_dtype), action))
            action = self.copies[-1][0]
        reward, *flags = (rows[:, i] for i in (replay._reward, replay._terminated, replay._truncated))
        self.batch = Batch(obs, action, reward, next_obs, *flags, discount)

    def deliver(self) -> Batch:
        """The batch, once its memory in front of the device has been filled."""
        for target, source in self.copies:
            target.copy_(source)
        return self.batch


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.3g} GB"
