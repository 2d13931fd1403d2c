"""Text to tokens and back: prompts, chats, padding, and which tokens end a completion."""

import json
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cleanrl_zoo.llm.models import LanguageModel, from_pretrained, gguf_file, import_transformers, local_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

Prompt = str | list[dict]


def byte_tokenizer() -> "PreTrainedTokenizerFast":
    """One token per byte, with the byte as its id, so that digits stand apart; then <pad> (256) and <eos> (257).

    Any text comes back unchanged; the names of the two special tokens, in a text, are plain bytes.
    """
    transformers = import_transformers()
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}  # bytes that stand for themselves (GPT-2)
    others = iter(range(256, 512))
    vocab = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left",
        split_special_tokens=True, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def load_tokenizer(name: str) -> "PreTrainedTokenizerBase":
    """The tokenizer of a model's folder, of a folder with one GGUF file, or of the hub; with a pad token in any case.

    Without one of its own, padding is the end token: the masks tell them apart.

    Raises:
        ValueError: one line: no such model, or a folder without tokenizer.
        ImportError: one line: a package is missing.
    """
    transformers = import_transformers()
    folder = local_folder(name)
    adapter = folder / "adapter_config.json"
    if adapter.exists() and not (folder / "tokenizer_config.json").exists():
        return load_tokenizer(json.loads(adapter.read_text())["base_model_name_or_path"])
    packed = gguf_file(folder)
    tokenizer = from_pretrained(transformers.AutoTokenizer, folder, **({"gguf_file": packed} if packed else {}))
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    tokenizer.padding_side = "left"
    return tokenizer


def encode_prompts(tokenizer: "PreTrainedTokenizerBase", prompts: list[Prompt]) -> list[list[int]]:
    """Ids of each prompt: a text, or a chat (a list of {"role", "content"}) up to where the answer begins.

    There is one start token where the tokenizer has them, and no end token.

    Raises:
        ValueError: one line: a chat without chat template, an empty prompt.
    """
    texts, is_chat = [], [not isinstance(prompt, str) for prompt in prompts]
    for prompt, chat in zip(prompts, is_chat, strict=True):
        if chat and not tokenizer.chat_template:
            raise ValueError(
                "a prompt is a chat, but this model's tokenizer has no chat template; give prompts as text, "
                "without --chat and --system"
            )
        texts.append(
            tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True) if chat else prompt
        )
    # all texts in one call, and all chats, to which the template has written the start token
    encoded = {
        chat: iter(tokenizer(chosen, add_special_tokens=not chat).input_ids) if chosen else iter(())
        for chat in (False, True)
        for chosen in [[text for text, other in zip(texts, is_chat, strict=True) if other == chat]]
    }
    rows = []
    for text, chat in zip(texts, is_chat, strict=True):
        ids = list(next(encoded[chat]))
        if not chat and ids and ids[-1] == tokenizer.eos_token_id and not text.endswith(tokenizer.eos_token):
            ids.pop()  # some tokenizers close every text
        if len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
            del ids[0]  # the text had one, and the tokenizer added another
        if not ids:
            raise ValueError(f"prompt {len(rows)} is empty; a prompt needs at least one token")
        rows.append(ids)
    return rows


def encode_completions(tokenizer: "PreTrainedTokenizerBase", completions: list[str], stop_id: int) -> list[list[int]]:
    """Ids of each text as a model would have written it after its prompt: no start token, `stop_id` at the end."""
    if not completions:
        return []
    return [[*ids, stop_id] for ids in tokenizer(completions, add_special_tokens=False).input_ids]


def pad_left(rows: list[list[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Rows of ids as one tensor [B, P], padded on the left, and the mask [B, P], True on real tokens."""
    ids, mask = pad_right([row[::-1] for row in rows], pad_id)
    return ids.flip(1), mask.flip(1)


def pad_right(rows: list[list[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Rows of ids as one tensor [B, L], padded on the right, and the mask [B, L], True on real tokens."""
    lengths = torch.tensor([len(row) for row in rows])  # [B]
    width = max(map(len, rows), default=0)
    ids = torch.tensor([row + [pad_id] * (width - len(row)) for row in rows], dtype=torch.int64).view(len(rows), width)
    return ids, torch.arange(width) < lengths.unsqueeze(1)


def stop_ids(model: "PreTrainedModel | LanguageModel", tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    """All tokens that end a completion: what closes a turn of a chat, the end tokens of tokenizer and model.

    The first is the one that a demonstration ends with.
    """
    found = [_end_of_turn(tokenizer), tokenizer.eos_token_id]
    for config in (model.generation_config, model.config):
        end = getattr(config, "eos_token_id", None)
        found += end if isinstance(end, list | tuple) else [end]
    return tuple(dict.fromkeys(token for token in found if token is not None))


def decode(tokenizer: "PreTrainedTokenizerBase", ids: Tensor, mask: Tensor) -> list[str]:
    """Texts of the completions [B, L], without stop, pad and other special tokens."""
    rows = [row[:length] for row, length in zip(ids.tolist(), mask.sum(1).tolist(), strict=True)]
    return tokenizer.batch_decode(rows, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _end_of_turn(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """The special token that the chat template writes right after an answer."""
    if not tokenizer.chat_template:
        return None
    answer = "answer"
    chat = [{"role": "user", "content": "question"}, {"role": "assistant", "content": answer}]
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False)
    except Exception:  # templates raise what they like on a chat they were not made for
        return None
    after = tokenizer(text.rpartition(answer)[2].lstrip(), add_special_tokens=False).input_ids
    return after[0] if after and after[0] in tokenizer.added_tokens_decoder else None
