"""Steps and episodes of many environments at once, with discrete observations and actions, for tables."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class Transition(NamedTuple):
    """One step of every environment, all [N]."""

    obs: Tensor  # int64
    action: Tensor  # int64
    reward: Tensor  # float64
    next_obs: Tensor  # int64, the true successor, also where an episode ended
    terminated: Tensor  # bool
    done: Tensor  # bool, terminated or truncated

    @classmethod
    def of(cls, obs: np.ndarray, action: Tensor, step: Any) -> "Transition":
        """What the `VecStep` gave after `action` [N] in `obs` [N]."""
        obs, reward, next_obs, terminated, truncated = map(
            torch.from_numpy, (obs, step.reward, step.final_obs, step.terminated, step.truncated)
        )
        return cls(obs, action, reward, next_obs, terminated, terminated | truncated)


class EpisodeBatch(NamedTuple):
    """E whole episodes side by side, padded to the longest, [L, E]; padding follows a row with `done`."""

    runs: Tensor  # int64 [E] the environments that they were played in
    obs: Tensor  # int64 [L, E]
    action: Tensor  # int64 [L, E]
    reward: Tensor  # float64 [L, E]
    next_obs: Tensor  # int64 [L, E]
    prob: Tensor  # float64 [L, E] of the action, under the policy that chose it
    terminated: Tensor  # bool [L, E]
    done: Tensor  # bool [L, E]
    active: Tensor  # bool [L, E] false in the padding


class Episodes:
    """The open episode of each of N environments with discrete observations and actions."""

    FIELDS = ("obs", "action", "reward", "next_obs", "prob")

    def __init__(self, num_envs: int) -> None:
        self.length = np.zeros(num_envs, np.int64)  # [N]
        self._all = np.arange(num_envs)
        self._rows = self._allocate(64)  # float64 [5, capacity, N]; whole numbers are exact in it

    def _allocate(self, capacity: int) -> np.ndarray:
        return np.zeros((len(self.FIELDS), capacity, len(self.length)))

    def add(self, step: Transition, prob: Tensor | float = 1.0) -> EpisodeBatch | None:
        """Adds one step of every environment; prob [N]: of its action. Returns the episodes that it ended, if any.

        An episode that was truncated is among them, with `terminated` false: what it earned later is not known.
        """
        longest = int(self.length.max())
        if longest == self._rows.shape[1]:
            self._rows = np.concatenate([self._rows, self._allocate(longest)], 1)
        for rows, values in zip(self._rows, (step.obs, step.action, step.reward, step.next_obs, prob), strict=True):
            rows[self.length, self._all] = values
        self.length += 1
        if not step.done.any():
            return None
        runs = step.done.numpy().nonzero()[0]
        length = self.length[runs]
        obs, action, reward, next_obs, prob = torch.from_numpy(self._rows[:, : length.max(), runs])
        terminated, ends = torch.zeros(obs.shape, dtype=torch.bool), torch.zeros(obs.shape, dtype=torch.bool)
        last, columns = torch.from_numpy(length) - 1, torch.arange(len(runs))
        terminated[last, columns] = step.terminated[runs]
        ends[last, columns] = True
        active = torch.arange(len(obs)).unsqueeze(1) <= last
        self.length[runs] = 0
        return EpisodeBatch(
            torch.from_numpy(runs), obs.long(), action.long(), reward, next_obs.long(), prob, terminated, ends, active
        )

    def clear(self) -> None:
        """Drops all open episodes."""
        self.length[:] = 0

    def state_dict(self) -> dict[str, Any]:
        """The open episodes."""
        return {"length": self.length.copy(), "rows": self._rows[:, : int(self.length.max())].copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on with the open episodes of `state_dict()`."""
        self.length[:] = state["length"]
        rows = state["rows"]
        self._rows = self._allocate(max(64, rows.shape[1]))
        self._rows[:, : rows.shape[1]] = rows


def side_by_side(collect: Callable[[], EpisodeBatch | None], num_envs: int, count: int) -> list[EpisodeBatch]:
    """The k-th episode of every environment as one batch [L, N], for k < count.

    collect: one step of every environment; the episodes that it ended, if any.
    """
    found: list[list[list[Tensor]]] = [[] for _ in range(num_envs)]
    while min(map(len, found)) < count:
        batch = collect()
        for column, run in enumerate(batch.runs.tolist() if batch else ()):
            length = int(batch.active[:, column].sum())
            found[run].append([field[:length, column] for field in batch[1:]])
    pad, fields = torch.nn.utils.rnn.pad_sequence, range(len(EpisodeBatch._fields) - 1)
    return [
        EpisodeBatch(torch.arange(num_envs), *(pad([episodes[k][i] for episodes in found]) for i in fields))
        for k in range(count)
    ]
