"""Text to tokens and back: bytes, chats, start and end tokens, padding."""

import pytest
import torch

from cleanrl_zoo.llm.models import LanguageModel
from cleanrl_zoo.llm.tokenizer import (
    byte_tokenizer,
    decode,
    encode_completions,
    encode_prompts,
    load_tokenizer,
    pad_left,
    pad_right,
    stop_ids,
)

CHAT = "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}" \
       "{% if add_generation_prompt %}<|assistant|>{% endif %}"  # fmt: skip


def word_tokenizer(start: bool = False, end: bool = False, chat_template: str | None = None):
    """Words split at spaces and punctuation; on demand it puts <s> before, </s> after every text."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>", "hello", "you", "\n"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    if start or end:
        pieces = ["<s>"] * start + ["$A"] + ["</s>"] * end
        tokenizer.post_processor = processors.TemplateProcessing(
            single=pieces, special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", chat_template=chat_template,
        extra_special_tokens=["<|user|>", "<|assistant|>", "<|end|>"],
    )  # fmt: skip


@pytest.mark.parametrize("text", ["37+85=", "né ☃ 𝄞\n\t end  ", "<eos> and <pad> are bytes here", "\x00\x7f", ""])
def test_bytes_come_back(text):
    tokenizer = byte_tokenizer()
    ids = tokenizer(text).input_ids
    assert ids == list(text.encode())  # the id is the byte, digits apart
    assert decode(tokenizer, torch.tensor([ids], dtype=torch.int64), torch.ones(1, len(ids), dtype=torch.bool)) == [
        text
    ]


def test_the_byte_tokenizer_is_saved_and_loaded(tmp_path):
    tokenizer = byte_tokenizer()
    assert (len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id) == (258, 256, 257)
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert (len(loaded), loaded.pad_token_id, loaded.eos_token_id) == (258, 256, 257)
    assert loaded("<eos>é").input_ids == list("<eos>é".encode())


def test_a_prompt_has_one_start_token_and_no_end_token():
    hello = [{"role": "user", "content": "hello"}]
    for start in (False, True):
        for end in (False, True):
            tokenizer = word_tokenizer(start, end, CHAT)
            text, with_start = encode_prompts(tokenizer, ["hello you", "<s> hello"])
            assert text == ([1] if start else []) + [6, 7]
            assert with_start == [1, 6]
            # <s> <|user|> hello <|end|> \n <|assistant|>: one start token, and the place where the answer begins
            assert encode_prompts(tokenizer, [hello]) == [[1, 3, 6, 5, 8, 4]]
    with pytest.raises(ValueError, match="no chat template"):
        encode_prompts(byte_tokenizer(), [hello])
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        encode_prompts(byte_tokenizer(), ["a", ""])


def test_prompt_ids_are_a_prefix_of_the_whole():
    tokenizer = word_tokenizer(start=True, end=True)
    prompt, completion = encode_prompts(tokenizer, ["hello"])[0], encode_completions(tokenizer, ["you hello"], 5)[0]
    assert prompt + completion == [1, 6, 7, 6, 5]  # no second start token, one end
    assert encode_completions(tokenizer, [], 5) == []


def test_padding_on_either_side():
    ids, mask = pad_left([[5, 6], [7]], 0)
    assert ids.tolist() == [[5, 6], [0, 7]] and mask.tolist() == [[True, True], [False, True]]
    ids, mask = pad_right([[5, 0], [0]], 0)  # a real token that is the pad token stays real
    assert ids.tolist() == [[5, 0], [0, 0]] and mask.tolist() == [[True, True], [True, False]]
    assert ids.dtype == torch.int64 and mask.dtype == torch.bool
    assert pad_right([], 0)[0].shape == (0, 0)


def test_all_end_tokens_are_found(family):
    """First what closes a turn in the chat template, then the tokenizer's, then the generation config's (a list)."""
    model = family("llama")
    model.generation_config.eos_token_id = [1, 9]
    assert stop_ids(model, word_tokenizer(chat_template=CHAT)) == (5, 2, 1, 9)
    assert stop_ids(LanguageModel(model), word_tokenizer()) == (2, 1, 9)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    assert stop_ids(model, byte_tokenizer()) == (257,)
    only_user = "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
    assert stop_ids(model, word_tokenizer(chat_template=only_user)) == (2,)


def test_decoding_leaves_out_end_pad_and_unknown_ids():
    tokenizer = byte_tokenizer()
    ids = torch.tensor([[50, 49, 257, 257], [55, 256, 65, 65], [55, 300, 56, 257]])  # 300: the head's padding
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]]).bool()
    assert decode(tokenizer, ids, mask) == ["21", "7", "78"]


def test_a_missing_pad_token_is_the_end_token(tmp_path):
    tokenizer = word_tokenizer()
    assert tokenizer.pad_token_id is None
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.pad_token_id == loaded.eos_token_id == 2 and loaded.padding_side == "left"


def test_a_missing_tokenizer_is_told_in_one_line(family, tmp_path):
    family("llama").save_pretrained(tmp_path)
    for name in (str(tmp_path), str(tmp_path / "nothing")):
        with pytest.raises(ValueError) as error:
            load_tokenizer(name)
        assert "\n" not in str(error.value) and name in str(error.value)
