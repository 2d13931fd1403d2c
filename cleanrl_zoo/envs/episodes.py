"""Running whole episodes."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from cleanrl_zoo.envs.vec import VecEnv


def run_episodes(
    envs: VecEnv,
    act: Callable[[np.ndarray], np.ndarray],
    max_steps: int = 100_000,
    steps: list[tuple[np.ndarray, np.ndarray]] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Resets `envs` and plays one episode in each: raw returns float64 [N] and lengths int64 [N].

    act: obs [N, ...] -> actions [N, ...]. Counting each environment's first episode, whichever ends first, does not
    favour short ones. Environments that are done early are stepped on until the last is done. The environments'
    seeds decide the episodes, so calls repeat for a deterministic `act`. An episode that has not ended after
    `max_steps` (an environment without a time limit) counts with what it has earned by then.

    steps: a list to which the observations [N, ...] and actions [N, ...] of every step are added.
    """
    obs = envs.reset()
    returns = np.zeros(envs.num_envs)
    lengths = np.zeros(envs.num_envs, np.int64)
    running = np.ones(envs.num_envs, bool)
    for count in range(1, max_steps + 1):
        action = act(obs)
        if steps is not None:
            steps.append((obs, np.array(action)))
        step = envs.step(action)
        obs = step.obs
        ended = running & (step.terminated | step.truncated | (count == max_steps))
        returns[ended] = step.episode_return[ended]
        lengths[ended] = step.episode_length[ended]
        running &= ~ended
        if not running.any():
            break
    return returns, lengths


def played_episodes(
    steps: list[tuple[np.ndarray, np.ndarray]], lengths: np.ndarray
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(obs [L, ...], actions [L, ...]) of each episode, from the `steps` and the lengths of `run_episodes`."""
    obs, actions = (np.stack(parts) for parts in zip(*steps, strict=True))  # [T, N, ...]
    return [(obs[:length, env], actions[:length, env]) for env, length in enumerate(lengths)]


def on_arrays(
    act: Callable[[Tensor], Tensor], device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Callable[[np.ndarray], np.ndarray]:
    """`act`, from observations to actions as tensors on `device`, the way `run_episodes` calls it; without gradients.

    dtype: of the observations that `act` gets.
    """

    @torch.no_grad()
    def act_on_arrays(obs: np.ndarray) -> np.ndarray:
        return act(torch.as_tensor(obs, dtype=dtype, device=device)).cpu().numpy()

    return act_on_arrays
