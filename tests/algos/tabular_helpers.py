"""Helpers of the tests of tabular files: episodes and steps by hand, a probe with a table's spaces, short trainings."""

from typing import Any

import gymnasium
import numpy as np
import torch
from algo_helpers import load_algorithm
from gymnasium.spaces import Discrete

from cleanrl_zoo.data.episodes import EpisodeBatch, Transition
from cleanrl_zoo.envs import make_vec
from cleanrl_zoo.envs.probes import Probe


class LoopTable(Probe):
    """Reward 1 for ever, cut after 10 steps: values 1/(1 − γ)."""

    def __init__(self):
        super().__init__()
        self.observation_space, self.action_space = Discrete(1), Discrete(2)

    def _obs(self):
        return int(self.value)

    def advance(self, action):
        return 1.0, False


LOOP = "test/LoopTable-v0"
if LOOP not in gymnasium.registry:
    gymnasium.register(LOOP, LoopTable, max_episode_steps=10)


def episode(states, rewards, terminated=True, last=0, actions=None, probs=None, run=0) -> EpisodeBatch:
    """One episode of one run as a batch [L, 1]; `last` is the state after it."""
    length = len(states)
    column = lambda values, dtype: torch.tensor(values, dtype=dtype).unsqueeze(1)  # noqa: E731
    ends = [False] * (length - 1) + [True]
    return EpisodeBatch(
        torch.tensor([run]),
        column(states, torch.int64),
        column(actions or [0] * length, torch.int64),
        column(rewards, torch.float64),
        column([*states[1:], last], torch.int64),
        column(probs or [1.0] * length, torch.float64),
        column([end and terminated for end in ends], torch.bool),
        column(ends, torch.bool),
        column([True] * length, torch.bool),
    )


def beside(*episodes: EpisodeBatch) -> EpisodeBatch:
    """Episodes of one run each as one batch [L, E], padded with what must not matter."""
    longest = max(len(e.obs) for e in episodes)

    def padded(field: torch.Tensor) -> torch.Tensor:
        filler = torch.full((longest - len(field), 1), 0 if field.dtype == torch.bool else 1, dtype=field.dtype)
        return torch.cat([field, filler])

    fields = [torch.cat([padded(e[i]) for e in episodes], 1) for i in range(1, len(episodes[0]))]
    return EpisodeBatch(torch.cat([e.runs for e in episodes]), *fields)


def step(obs, action, reward, next_obs, terminated=False, done=None) -> Transition:
    """One step of each run; numbers or lists."""
    runs = max(len(x) if isinstance(x, list) else 1 for x in (obs, action, reward, next_obs, terminated))
    tensor = lambda x, dtype: torch.tensor(x if isinstance(x, list) else [x] * runs, dtype=dtype)  # noqa: E731
    ends = tensor(terminated, torch.bool)
    return Transition(
        tensor(obs, torch.int64), tensor(action, torch.int64), tensor(reward, torch.float64),
        tensor(next_obs, torch.int64), ends, ends if done is None else tensor(done, torch.bool),
    )  # fmt: skip


def begin(name: str, env: str, runs: int, seed: int = 101, **flags: Any) -> tuple[Any, Any, Any, Any]:
    """Module, flags, environments and state of a file."""
    module = load_algorithm(name)
    args = module.Args(env=env, num_envs=runs, seed=seed)
    for flag, value in flags.items():
        assert hasattr(args, flag), flag
        setattr(args, flag, value)
    args.check()
    envs = make_vec(env, runs, seed)
    return module, args, envs, module.TrainState.create(args, envs)


def train(name: str, env: str, runs: int, steps: int, **flags: Any) -> tuple[Any, np.ndarray]:
    """The state of a control file after `steps` steps of each run, and how many episodes ended."""
    module, args, envs, state = begin(name, env, runs, **flags)
    for _ in range(steps):
        found = module.collect(state, envs, args)
        if found is not None:
            module.update(state, found, args)
    return state, len(envs.pop_episodes())
