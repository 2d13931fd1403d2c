"""A model of the world on the disk: `model.safetensors` and `model.json`, beside the episodes to judge it by.

Nothing in the files is ever executed. `benchmarks/world_model.py` draws what is to be seen in them.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from cleanrl_zoo.nn.ensemble import GaussianEnsemble

TENSORS, CARD, EPISODES = "model.safetensors", "model.json", "episodes.safetensors"


class SavedModel(NamedTuple):
    """What `load_model` found."""

    model: GaussianEnsemble  # without gradients, on the CPU
    episodes: list[tuple[Tensor, Tensor]]  # float32 obs [L, D] and actions [L, A] of each
    card: dict[str, Any]


def save_model(
    folder: Path, model: GaussianEnsemble, episodes: Sequence[tuple[np.ndarray, np.ndarray]], card: dict[str, Any]
) -> None:
    """Writes the model and `episodes` (obs [L, D], actions [L, A]) that it has not learned from into `folder`.

    card: where it comes from, as JSON; each file goes through a temporary name.
    """
    network = model.network
    spec = {
        "members": model.members,
        "input_dim": network.weights[0].shape[1],
        "output_dim": network.weights[-1].shape[2] // 2,
        "hidden": [weight.shape[2] for weight in network.weights[:-1]],
        "elites": len(model.elites),
        "activation": network.activation_name,
        "scale_targets": model.scale_targets,
    }
    played = {
        f"{name}_{index}": torch.as_tensor(rows, dtype=torch.float32).contiguous()
        for index, episode in enumerate(episodes)
        for name, rows in zip(("obs", "actions"), episode, strict=True)
    }
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    data = safetensors.torch.save(tensors)
    card = {**card, "model": spec, "episodes": len(episodes), "sha256": hashlib.sha256(data).hexdigest()}
    folder.mkdir(parents=True, exist_ok=True)
    contents = (
        (TENSORS, data),
        (EPISODES, safetensors.torch.save(played)),
        (CARD, json.dumps(card, indent=1).encode()),
    )
    for name, content in contents:
        temporary = folder / f".writing-{name}"
        temporary.write_bytes(content)
        os.replace(temporary, folder / name)


def load_model(folder: Path) -> SavedModel:
    """Reads what `save_model` wrote.

    Raises:
        ValueError: one line, when a file is missing, damaged, or not of this model.
    """
    try:
        card = json.loads((folder / CARD).read_text())
        data = (folder / TENSORS).read_bytes()
        if hashlib.sha256(data).hexdigest() != card["sha256"]:
            raise ValueError(f"{folder}: {TENSORS} is not the file that {CARD} was written with")
        model = GaussianEnsemble(**card["model"])
        model.load_state_dict(safetensors.torch.load(data))
        played = safetensors.torch.load((folder / EPISODES).read_bytes())
        episodes = [(played[f"obs_{i}"], played[f"actions_{i}"]) for i in range(card["episodes"])]
    except OSError as error:
        name = Path(error.filename or CARD).name
        raise ValueError(f"{folder}: {name} cannot be read ({error.strerror}); a run writes it when it ends") from None
    except (KeyError, TypeError, RuntimeError, json.JSONDecodeError, safetensors.SafetensorError) as error:
        raise ValueError(f"{folder}: damaged ({' '.join(str(error).split())})") from None
    return SavedModel(model.requires_grad_(False), episodes, card)
