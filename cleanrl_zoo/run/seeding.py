"""Independent random streams from one seed."""

import random

import numpy as np
import torch

# One stream per purpose; 0 and 1 are the training and evaluation environments (envs/vec.py).
STREAMS = {"global": 2, "init": 3, "noise": 4, "minibatch": 5, "prompts": 6, "evaluation": 7, "model": 8}


def stream_seed(seed: int, stream: str) -> int:
    """A 63-bit seed for one of `STREAMS`, from `SeedSequence((seed, stream, 0))`."""
    sequence = np.random.SeedSequence((seed, STREAMS[stream], 0))
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


def torch_generator(seed: int, stream: str, device: str | torch.device = "cpu") -> torch.Generator:
    """A torch generator on `device` for one of `STREAMS`."""
    return torch.Generator(device).manual_seed(stream_seed(seed, stream))


def seed_everything(seed: int) -> None:
    """Seeds the global generators of Python, numpy and torch, for third-party code that draws from them."""
    value = stream_seed(seed, "global")
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)


def global_random_state() -> dict:
    """The states of the global generators, in types that a checkpoint stores."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    state = {
        "python": [version, list(words), gauss],
        "numpy": [name, keys, int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_global_random_state(state: dict) -> None:
    """Restores what `global_random_state` gave."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
