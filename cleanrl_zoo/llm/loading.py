"""A model, its tokenizer and its stop tokens from one name."""

import importlib.util
from pathlib import Path
from typing import Any

import torch

from cleanrl_zoo.llm.models import LanguageModel, load_model, tiny_llama
from cleanrl_zoo.llm.tokenizer import byte_tokenizer, load_tokenizer, stop_ids

PACKAGE = "package:"


def load_language_model(
    name: str,
    dtype: str = "float32",
    device: str = "cpu",
    lora_rank: int = 0,
    value_head: bool = False,
    generator: torch.Generator | None = None,
    **sizes: int,
) -> tuple[LanguageModel, Any, tuple[int, ...]]:
    """A model to train, its tokenizer, and the tokens that end a completion.

    Args:
        name: a folder, a name on the Hugging Face hub, "package:NAME" for an installed Python package that ships a
            model (which is not imported), or "tiny": a small Llama on bytes with weights from `generator`.
        dtype: of the weights, "float32" or "bfloat16".
        device: where to put it.
        lora_rank: above 0, trains adapters of this rank instead of the weights.
        value_head: adds a linear value head, zero at first.
        generator: of everything that is initialised at random.
        sizes: width, layers, heads, context of "tiny".

    Raises:
        ValueError, ImportError: one line, as `load_model`.
    """
    if name == "tiny":
        tokenizer = byte_tokenizer()
        ids = {"pad_id": tokenizer.pad_token_id, "eos_id": tokenizer.eos_token_id}
        model = tiny_llama(len(tokenizer), generator or torch.Generator().manual_seed(0), **ids, **sizes)
        model = model.to(device)
        for weight in model.parameters():  # not the buffers: rotary frequencies would lose their precision
            weight.data = weight.data.to(getattr(torch, dtype))
    else:
        name = _package_folder(name) if name.startswith(PACKAGE) else name
        if name.startswith("results/") and not Path(name).is_dir():
            raise ValueError(f"model {name}: not found; run in the repository's folder, or give another --model")
        tokenizer = load_tokenizer(name)
        model = load_model(name, dtype, device)
    agent = LanguageModel(model, lora_rank, value_head=value_head, generator=generator)
    return agent, tokenizer, stop_ids(model, tokenizer)


def _package_folder(name: str) -> str:
    """The folder with the model inside an installed package: its own, or the first below with a model's files."""
    package = name.removeprefix(PACKAGE)
    found = importlib.util.find_spec(package) if package.isidentifier() else None
    if found is None or not found.submodule_search_locations:
        raise ValueError(f"model {name}: no package {package} is installed here")
    root = Path(found.submodule_search_locations[0])
    for pattern in ("config.json", "*.gguf"):
        for path in sorted(root.rglob(pattern)):
            return str(path.parent)
    raise ValueError(f"model {name}: the package has neither config.json nor a GGUF file")
