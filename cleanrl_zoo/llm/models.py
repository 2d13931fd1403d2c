"""Causal language models: how they are loaded, and what training needs of them.

Sequences are prompts, padded on the left to P columns, followed by completions, padded on the right to L columns.
Positions count real tokens only, so that padding never moves a log-prob.
"""

import contextlib
import copy
import inspect
import io
import json
import logging
import re
import shutil
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from cleanrl_zoo.core.entropy import clamped_entropy, linear_clamped_entropy
from cleanrl_zoo.core.logprobs import linear_logprobs, token_entropy, token_logprobs

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

LONGEST_CONTEXT = sys.maxsize  # of models without a limit
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
INSTALL = "pip install -c constraints.txt -e '.[llm]'"


def import_transformers() -> ModuleType:
    """The library, with its warnings and progress bars off: a run's terminal is the run's. ImportError: missing."""
    try:
        import transformers
    except ImportError:
        raise ImportError(f"language models need the package transformers: {INSTALL}") from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    return transformers


def local_folder(name: str) -> Path:
    """The folder of that name, or the hub's files of a model: from the local cache, else downloaded into it.

    Raises:
        ValueError: one line: there is neither.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if not HUB_NAME.fullmatch(name):
        raise ValueError(f"model {name}: there is no such folder, and it is not a name on the hub (owner/model)")
    import_transformers()
    from huggingface_hub import constants, get_session, snapshot_download

    try:
        folder = Path(snapshot_download(name, local_files_only=True))
        if (folder / "config.json").exists() and any(folder.glob("*.safetensors")):
            return folder
    except Exception:  # the library raises errors of many kinds
        pass
    try:
        get_session().head(constants.ENDPOINT, timeout=5)  # the download would try for minutes to reach it
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except Exception as error:
        tried = "there is no such folder, it is not in the local cache, and not to be had from the hub"
        raise ValueError(f"model {name}: {tried}: {_one_line(error)}") from None


def gguf_file(folder: Path) -> str | None:
    """The name of the GGUF file in a folder that holds no other model. Raises ValueError unless there is one file."""
    if any((folder / file).exists() for file in ("config.json", "tokenizer_config.json")):
        return None
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        found = f"{len(files)} GGUF files" if files else "neither config.json nor a GGUF file"
        raise ValueError(f"model {folder}: {found}; a model is config.json and *.safetensors, or one *.gguf")
    _need("gguf", "a GGUF file needs the package gguf: pip install gguf")
    return files[0].name


def from_pretrained(loader: Any, folder: Path, **options: Any) -> Any:
    """`loader.from_pretrained` of a folder, without running code from it and without a word on the terminal.

    Raises:
        ValueError: one line, whatever went wrong.
    """
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stderr(io.StringIO()),
        ):  # a progress bar ignores all settings
            warnings.simplefilter("ignore")
            return loader.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False, **options)
    except Exception as error:
        raise ValueError(f"model {folder}: {_one_line(error)}") from None


def load_model(name: str, dtype: str = "float32", device: str = "cpu") -> "PreTrainedModel":
    """A causal model from a folder, a folder with one GGUF file, or the hub; LoRA adapters come with their base.

    Args:
        name: the folder, or a name on the hub.
        dtype: of the weights, "float32" or "bfloat16".
        device: where to put it.

    Raises:
        ValueError: one line: no such model, or weights that are neither safetensors nor GGUF (a pickle can run code).
        ImportError: one line: a package is missing.
    """
    transformers = import_transformers()
    folder = local_folder(name)
    for pickled, safe in (("pytorch_model*.bin", "*.safetensors"), ("adapter_model.bin", "adapter_model.safetensors")):
        if any(folder.glob(pickled)) and not any(folder.glob(safe)):
            raise ValueError(f"model {name}: its weights are a pickle, which can run code; convert them to {safe}")
    if (folder / "adapter_config.json").exists():
        return _with_loaded_adapter(folder, dtype, device)
    options, packed = {"dtype": getattr(torch, dtype), "use_safetensors": True}, gguf_file(folder)
    if packed:  # unpacked to plain weights, to be trained and saved as such
        options |= {"gguf_file": packed, "quantization_config": transformers.GgufConfig(dequantize=True)}
    return from_pretrained(transformers.AutoModelForCausalLM, folder, **options).to(device).eval()


def tiny_llama(
    vocab_size: int, generator: torch.Generator, width: int = 64, layers: int = 3, heads: int = 4, context: int = 256,
    pad_id: int | None = None, eos_id: int | None = None,
) -> "LlamaForCausalLM":  # fmt: skip
    """A small Llama with weights drawn from `generator`: rotary positions, RMS norms, SwiGLU of four times the width.

    Matrices are normal with variance 1/width, those that write to the residual stream smaller by √(2·layers) (GPT-2).
    """
    transformers = import_transformers()
    config = transformers.LlamaConfig(
        vocab_size=vocab_size, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=context, bos_token_id=None,
        pad_token_id=pad_id, eos_token_id=eos_id, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):  # its own initialisation draws from torch's global generator
        model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                weight.normal_(0.0, (width * (2 * layers if residual else 1)) ** -0.5, generator=generator)
    return model.eval()


def context_length(model: "PreTrainedModel | LanguageModel") -> int:
    """How many tokens prompt and completion may have together."""
    config = model.config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        if getattr(config, name, None):
            return int(getattr(config, name))
    return LONGEST_CONTEXT


@dataclass
class CompletionOutput:
    """Of every completion token, 0 where the mask is 0; the value is of the state in which the token was chosen."""

    logprob: Tensor  # [B, L]
    entropy: Tensor | None = None  # [B, L] nats
    value: Tensor | None = None  # [B, L]
    clamped_entropy: Tensor | None = None  # [B, L] nats, of the likeliest tokens


class LanguageModel(nn.Module):
    """A causal model and what training needs of it. It stays in eval mode: dropout would make every ratio noise.

    Args:
        model: any causal model of transformers; a LoRA adapter that it came with is what is trained.
        lora_rank: above 0, adapters of this rank on all linear layers but the head are trained instead of the weights
            (Hu et al. 2022): W + (α/r)·B·A, B zero at first.
        lora_alpha: α; twice the rank by default.
        value_head: adds a linear value of the last hidden state, zero at first.
        generator: of A's initialisation; torch's global one by default.

    Raises:
        ValueError: for a rank other than that of the adapter that came with the model.
    """

    def __init__(
        self, model: "PreTrainedModel", lora_rank: int = 0, lora_alpha: float | None = None, value_head: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.model = model
        self.lora = _with_lora(model, lora_rank, lora_alpha, generator)
        for name, weight in model.named_parameters():
            weight.requires_grad_(".lora_" in name if self.lora else weight.is_floating_point())
        head = model.get_output_embeddings()
        self.value_head = None
        if value_head:
            self.value_head = nn.Linear(head.weight.shape[1], 1).to(head.weight.device)
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)
        self.accepts = frozenset(inspect.signature(model.forward).parameters)
        self.eval()
        self.linear_head = _has_linear_head(model)
        self.decodes: bool | None = None  # whether llm/decoder.py can drive it, found by the first sample

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def generation_config(self) -> Any:
        return self.model.generation_config

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def context(self) -> int:
        """Tokens that prompt and completion may have together."""
        return context_length(self)

    def inputs(self, tokens: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        """Keyword arguments of the model for `tokens` [B, S]: positions count the real tokens of each row from 0."""
        inputs = {"input_ids": tokens, "attention_mask": attention_mask.long()}
        if "position_ids" in self.accepts:
            inputs["position_ids"] = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)  # [B, S]
        return inputs

    def completion(
        self, tokens: Tensor, attention_mask: Tensor, mask: Tensor, temperature: float = 1.0, entropy: bool = False,
        value: bool = False, entropy_share: float = 1.0,
    ) -> CompletionOutput:  # fmt: skip
        """Log-probs, and if asked entropies and values, of the completions.

        tokens, attention_mask: [B, P+L], 1 on real tokens; mask: [B, L], 1 on what the model wrote, its stop token
        included. The head is applied to the rows with mask 1 alone: at positions P−1 … P+L−2, one before the token.
        With an `entropy_share` below 1 also the entropies of that share of the vocabulary, the likeliest tokens.

        Raises:
            ValueError: when there is no prompt column, or a value is asked of a model without value head.
        """
        length = mask.shape[1]
        start = tokens.shape[1] - length - 1
        if start < 0:
            raise ValueError(
                f"tokens {list(tokens.shape)} and mask {list(mask.shape)}: at least one prompt column is needed"
            )
        if value and self.value_head is None:
            raise ValueError("a value is asked of a model without value head; make it with value_head=True")
        keep, clamped = mask.bool(), None
        ids = tokens[:, start + 1 :][keep]  # [n]
        # nothing is predicted from the last column
        inputs = self.inputs(tokens[:, :-1], attention_mask[:, :-1]) | {"use_cache": False}
        if self.linear_head:
            hidden = self.model.base_model(**inputs).last_hidden_state[:, start:][keep]  # [n, H]
            weight = self.model.get_output_embeddings().weight  # [V, H]
            logprob = linear_logprobs(hidden, weight, ids, temperature, entropy=entropy)  # [n]
            logprob, entropies = logprob if entropy else (logprob, None)
            if entropy_share < 1:
                clamped = linear_clamped_entropy(hidden, weight, entropy_share, temperature)
        else:  # soft caps, scales, biases: the model's own logits
            if "logits_to_keep" in self.accepts:
                inputs["logits_to_keep"] = length
            output = self.model(**inputs, output_hidden_states=value)
            logits = output.logits[:, -length:][keep].unsqueeze(0)  # [1, n, V]
            logprob = token_logprobs(logits, ids.unsqueeze(0), temperature)[0]
            entropies = token_entropy(logits, temperature)[0] if entropy else None
            if entropy_share < 1:
                clamped = clamped_entropy(logits[0], entropy_share, temperature)
            hidden = output.hidden_states[-1][:, start:][keep] if value else None

        def spread(rows: Tensor) -> Tensor:
            whole = rows.new_zeros(mask.shape)  # [B, L]
            whole[keep] = rows
            return whole

        values = self.value_head(hidden.to(self.value_head.weight.dtype)).squeeze(-1) if value else None
        return CompletionOutput(*(None if x is None else spread(x) for x in (logprob, entropies, values, clamped)))

    forward = completion

    def trainable(self) -> list[nn.Parameter]:
        """What the optimizer gets: all weights, or with LoRA the adapter's; and the value head's. Tied weights once."""
        return [weight for weight in self.parameters() if weight.requires_grad]

    def state_dict(self) -> dict[str, Tensor]:
        """The trainable weights by name. The rest is as the model's name gives it."""
        return {name: weight.detach() for name, weight in self.named_parameters() if weight.requires_grad}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copies weights in. Raises ValueError (one line) when names or shapes are not this model's."""
        own = self.state_dict()
        for name in sorted(own.keys() | state.keys()):
            here, there = (list(x[name].shape) if name in x else "missing" for x in (own, state))
            if here != there:
                raise ValueError(f"weights of another model: {name} is {here} here and {there} in the given state")
        for name, weight in own.items():
            weight.copy_(state[name])

    def reference(self) -> "Reference":
        """A frozen model as this one stands now. After `load_state_dict` of a run's weights it is too late for it."""
        return Reference(self)

    def sampler_copy(self, dtype: str = "float32") -> "LanguageModel":
        """The model to sample with: this one if its weights have that dtype already, else a cast copy to `refresh`."""
        if next(self.model.parameters()).dtype == getattr(torch, dtype):
            return self
        cast = copy.deepcopy(self)
        for weight in cast.parameters():  # not the buffers: rotary frequencies lose their precision in bfloat16
            weight.requires_grad_(False)
            weight.data = weight.data.to(getattr(torch, dtype))
        return cast

    @torch.no_grad()
    def refresh(self, source: "LanguageModel") -> None:
        """Fills a cast copy anew, in place, with the weights that `source` trains. Nothing to do if they are one."""
        if source is not self:
            own = dict(self.named_parameters())
            for name, weight in source.state_dict().items():
                own[name].copy_(weight)

    def save(self, folder: Path | str, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Writes a folder that transformers loads: safetensors, LoRA merged into its base; no value head.

        It is written to a temporary name and renamed.
        """
        folder = Path(folder)
        temporary, replaced = (folder.with_name(f".{what}-{folder.name}") for what in ("writing", "old"))
        for path in (temporary, replaced):
            shutil.rmtree(path, ignore_errors=True)
        temporary.parent.mkdir(parents=True, exist_ok=True)
        model = _merged(copy.deepcopy(self.model)) if self.lora else self.model
        own = model.generation_config
        try:
            own.validate(strict=True)
        except ValueError:  # settings at odds with each other, which would be refused: the tokens alone are kept
            tokens = ("bos_token_id", "eos_token_id", "pad_token_id")
            model.generation_config = type(own)(**{name: getattr(own, name) for name in tokens})
        model.save_pretrained(temporary)
        model.generation_config = own
        tokenizer.save_pretrained(temporary)
        if folder.exists():
            folder.rename(replaced)
        temporary.rename(folder)
        shutil.rmtree(replaced, ignore_errors=True)


class Reference:
    """A model as it stood when this was made: a copy of the weights that are trained, put in for each call.

    With LoRA that is a copy of the adapter, whether it is still zero or not; the base is shared.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.weights = {name: weight.clone() for name, weight in model.state_dict().items()}

    @torch.no_grad()
    def completion(
        self, tokens: Tensor, attention_mask: Tensor, mask: Tensor, temperature: float = 1.0, entropy: bool = False
    ) -> CompletionOutput:
        """As `LanguageModel.completion`, without gradient."""
        return functional_call(self.model, self.weights, (tokens, attention_mask, mask, temperature, entropy))


@torch.no_grad()
def _has_linear_head(model: "PreTrainedModel") -> bool:
    """Whether the logits are the last hidden states times the head's weight and nothing else, found by a trial.

    The head's output is replaced by numbers so large that a soft cap or a scale would change them.
    """
    head, trunk, seen = model.get_output_embeddings(), model.base_model, {}
    if type(head) is not nn.Linear or head.bias is not None or trunk is model:
        return False

    def replace(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        seen["input"] = args[0]
        seen["output"] = torch.linspace(-100, 100, output.shape[-1]).to(output).expand_as(output)
        return seen["output"]

    inputs = {"input_ids": torch.zeros(1, 2, dtype=torch.long, device=head.weight.device), "use_cache": False}
    hook = head.register_forward_hook(replace)
    try:
        logits = model(**inputs).logits  # [1, 2, V]
    finally:
        hook.remove()
    before = torch.equal(seen["input"], trunk(**inputs).last_hidden_state)
    return before and torch.equal(logits.to(seen["output"].dtype), seen["output"])


def _with_lora(model: "PreTrainedModel", rank: int, alpha: float | None, generator: torch.Generator | None) -> bool:
    """Adds adapters of `rank` unless the model came with one; whether it has one now."""
    if hasattr(model, "peft_config"):
        config = model.peft_config["default"]
        if config.peft_type != "LORA" or config.modules_to_save:
            raise ValueError(
                f"the model came with an adapter of type {config.peft_type.value} or with whole layers retrained; "
                "only plain LoRA can be trained on: merge it first"
            )
        found = config.r
        if rank and rank != found:
            raise ValueError(
                f"LoRA rank {rank} is asked for a model that came with an adapter of rank {found}; give {found} or 0"
            )
        return True
    if not rank:
        return False
    _need("peft", f"LoRA needs the package peft: {INSTALL}")
    from peft import LoraConfig, inject_adapter_in_model

    alpha = 2 * rank if alpha is None else alpha
    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules="all-linear")
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inject_adapter_in_model(config, model)
    if generator is not None:
        for name, weight in model.named_parameters():
            if ".lora_A." in name:  # uniform with variance 1/(3·fan-in), as peft draws it
                drawn = torch.empty(weight.shape).uniform_(-1, 1, generator=generator) * weight.shape[1] ** -0.5
                weight.data.copy_(drawn)
    return True


def _with_loaded_adapter(folder: Path, dtype: str, device: str) -> "PreTrainedModel":
    """The base that the adapter in `folder` names, with that adapter in its layers."""
    _need("peft", f"a LoRA adapter needs the package peft: {INSTALL}")
    from peft import PeftModel

    model = load_model(json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"], dtype)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return PeftModel.from_pretrained(model, str(folder)).get_base_model().to(device).eval()
    except Exception as error:
        raise ValueError(f"adapter {folder}: {_one_line(error)}") from None


def _merged(model: "PreTrainedModel") -> "PreTrainedModel":
    """The model with its adapter added to the base's weights and taken away, in place."""
    from peft.tuners.lora import LoraLayer

    for name, module in list(model.named_modules()):
        if isinstance(module, LoraLayer):
            module.merge()
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, module.get_base_layer())
    del model.peft_config
    return model


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"


def _need(package: str, message: str) -> None:
    try:
        __import__(package)
    except ImportError:
        raise ImportError(message) from None
