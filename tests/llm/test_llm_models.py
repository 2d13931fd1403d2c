"""Log-probs, entropies and values of completions against the plain forward pass; adapters, references, files."""

import json
import warnings

import pytest
import torch

from cleanrl_zoo.llm.models import LanguageModel, context_length, load_model, tiny_llama
from cleanrl_zoo.llm.tokenizer import byte_tokenizer, load_tokenizer

FAMILIES = ("gpt2", "llama", "tied", "opt", "bloom", "gemma2", "granite", "cohere", "phi")
PROMPTS = [[5, 6, 7, 8], [9], [10, 11]]
COMPLETIONS = [[12, 13, 1], [14], [15, 16, 17, 18, 19]]


def batch(extra_left: int = 0, extra_right: int = 0, pad: int = 0):
    """The three sequences as tokens [3, P+L], attention mask, completion mask."""
    width, length = 4 + extra_left, 5 + extra_right
    tokens = torch.full((3, width + length), pad)
    attention, mask = torch.zeros_like(tokens, dtype=torch.bool), torch.zeros(3, length, dtype=torch.bool)
    for row, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        start, end = width - len(prompt), width + len(completion)
        tokens[row, start:end] = torch.tensor(prompt + completion)
        attention[row, start:end] = True
        mask[row, : len(completion)] = True
    return tokens, attention, mask


def plain(model, temperature: float = 1.0, length: int = 5):
    """Log-probs and entropies [3, length] from each sequence alone, without padding, by the model's own logits."""
    logprob, entropy = (torch.zeros(3, length, dtype=torch.float64) for _ in range(2))
    for row, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        logp = (logits / temperature).log_softmax(-1)
        logprob[row, : len(completion)] = logp.gather(1, torch.tensor(completion)[:, None])[:, 0]
        entropy[row, : len(completion)] = -(logp.exp() * logp).sum(-1)
    return logprob, entropy


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_and_entropies_are_those_of_the_plain_forward_pass(family, name, temperature):
    """In float64 where the library keeps it throughout: not in RMS norms, nor in attention that is written out."""
    model = family(name).to(torch.float64 if name in ("gpt2", "phi") else torch.float32)
    language_model = LanguageModel(model)
    output = language_model.completion(*batch(), temperature=temperature, entropy=True)
    logprob, entropy = plain(model, temperature)
    tolerance = 1e-9 if name in ("gpt2", "phi") else 1e-5
    assert (output.logprob - logprob).abs().max() < tolerance
    assert (output.entropy - entropy).abs().max() < tolerance
    assert output.value is None and logprob.abs().max() > 2  # far from uniform nothings
    assert language_model.linear_head == (name in FAMILIES[:5])


@pytest.mark.parametrize("name", FAMILIES)
def test_padding_does_not_move_a_logprob(family, name):
    """Learned and rotary positions; 0 and 5 more columns of padding on the left, 3 on the right, other pad tokens."""
    language_model = LanguageModel(family(name))
    bare = language_model.completion(*batch()).logprob
    padded = language_model.completion(*batch(extra_left=5, extra_right=3, pad=29)).logprob
    assert (padded[:, :5] - bare).abs().max() < 1e-5 and padded[:, 5:].abs().max() == 0


@pytest.mark.parametrize("name", ["gpt2", "tied", "gemma2"])
def test_gradients_are_those_of_the_plain_forward_pass(family, name):
    dtype, tolerance = (torch.float64, 1e-9) if name == "gpt2" else (torch.float32, 1e-4)
    ours, theirs = family(name).to(dtype), family(name).to(dtype)
    weights = torch.linspace(-1, 1, 15, dtype=torch.float64).view(3, 5)
    output = LanguageModel(ours).completion(*batch(extra_left=2), temperature=0.7, entropy=True)
    (weights * (output.logprob + 0.5 * output.entropy)).sum().backward()
    logprob, entropy = plain(theirs, 0.7)
    (weights * (logprob + 0.5 * entropy)).sum().backward()
    for (key, weight), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if other.grad is not None:
            assert (weight.grad - other.grad).abs().max() < tolerance * other.grad.abs().max(), key


def test_a_batch_without_completion_tokens_gives_zeros(llama):
    tokens, attention, mask = batch()
    output = llama.completion(tokens, attention, torch.zeros_like(mask), entropy=True)
    assert output.logprob.abs().sum() == 0 and output.entropy.abs().sum() == 0
    with pytest.raises(ValueError, match="at least one prompt column"):
        llama.completion(tokens[:, 4:], attention[:, 4:], mask)


def test_the_head_sees_the_rows_that_count_and_no_others(llama, monkeypatch):
    from cleanrl_zoo.llm import models

    seen, real = [], models.linear_logprobs
    monkeypatch.setattr(
        models, "linear_logprobs", lambda hidden, *a, **k: seen.append(hidden.shape) or real(hidden, *a, **k)
    )
    llama.completion(*batch())
    assert seen == [(9, 64)]  # 3 + 1 + 5 tokens of 15 places


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_values_read_the_state_before_the_token(family, name):
    """The value head is zero at first; then w·h + b with h the trunk's last state at the place before each token."""
    model = family(name)
    language_model = LanguageModel(model, value_head=True)
    inputs = batch()
    value = language_model.completion(*inputs, value=True).value
    assert value.shape == (3, 5) and value.abs().max() == 0 and value.requires_grad
    with torch.no_grad():
        language_model.value_head.weight.copy_(torch.linspace(-1, 1, 16))
        language_model.value_head.bias.fill_(0.5)
    value = language_model.completion(*inputs, value=True).value
    hidden = model.base_model(torch.tensor([PROMPTS[2] + COMPLETIONS[2]])).last_hidden_state[0]  # [7, 16]
    expected = hidden[1:6] @ torch.linspace(-1, 1, 16) + 0.5
    assert (value[2] - expected).abs().max() < 1e-5
    assert value[1, 1:].abs().max() == 0  # beyond the completion
    assert len(language_model.trainable()) == len(list(model.parameters())) + 2
    with pytest.raises(ValueError, match="without value head"):
        LanguageModel(model).completion(*inputs, value=True)


def test_dropout_stays_off(family):
    """Ratio 1 at step 0 with dropout in the config: two passes agree exactly."""
    dropout = {"attn_pdrop": 0.5, "embd_pdrop": 0.5, "resid_pdrop": 0.5}
    language_model = LanguageModel(family("gpt2", **dropout).train())
    first, second = (language_model.completion(*batch()).logprob for _ in range(2))
    assert torch.equal(first, second)


# --- LoRA and references ------------------------------------------------------------------------------------------


def lora(model, rank: int = 2, seed: int = 0, **settings) -> LanguageModel:
    return LanguageModel(model, lora_rank=rank, generator=torch.Generator().manual_seed(seed), **settings)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_a_fresh_adapter_changes_nothing_and_alone_is_trained(family, name):
    base, model = family(name), family(name)
    language_model = lora(model, value_head=True)
    inputs = batch()
    expected = LanguageModel(base).completion(*inputs).logprob
    assert (language_model.completion(*inputs).logprob - expected).abs().max() < 1e-6
    reference = language_model.reference()
    assert (reference.completion(*inputs).logprob - expected).abs().max() < 1e-6
    names = set(language_model.state_dict())
    assert {key.split(".lora_")[0].split(".")[-1] for key in names if "lora_" in key} == {
        "llama": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
        "gemma2": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
        "gpt2": {"c_attn", "c_proj", "c_fc"},
    }[name]
    assert {key for key in names if "lora_" not in key} == {"value_head.weight", "value_head.bias"}
    loss = language_model.completion(*inputs).logprob.sum()
    loss.backward()
    with_gradient = {key for key, weight in language_model.named_parameters() if weight.grad is not None}
    assert with_gradient == {key for key in names if "lora_" in key}
    with pytest.raises(ValueError, match="rank 4 .* adapter of rank 2"):
        LanguageModel(model, lora_rank=4)


def test_an_adapter_is_drawn_from_the_generator_alone(family):
    before = torch.random.get_rng_state()
    one, same, other = (lora(family("llama"), seed=seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(one[key], same[key]) for key in one)
    assert not all(torch.equal(one[key], other[key]) for key in one)
    a = next(value for key, value in one.items() if "q_proj.lora_A" in key)  # [2, 16]: uniform within 1/√16
    assert 0.15 < a.abs().max() <= 0.25


@pytest.mark.parametrize("rank", [0, 2])
def test_a_reference_stays_while_the_model_moves(family, rank):
    language_model = LanguageModel(family("tied"), lora_rank=rank)
    inputs = batch()
    at_first = language_model.completion(*inputs).logprob.detach()
    reference = language_model.reference()
    with torch.no_grad():
        for weight in language_model.trainable():
            weight.add_(0.05)
    moved = language_model.completion(*inputs).logprob
    assert (reference.completion(*inputs).logprob - at_first).abs().max() < 1e-6
    assert not reference.completion(*inputs).logprob.requires_grad
    assert (moved - at_first).abs().max() > 1e-2
    assert torch.equal(language_model.completion(*inputs).logprob, moved)  # the call left nothing behind
    assert all(weight.requires_grad for weight in language_model.trainable())


def test_a_model_that_comes_with_an_adapter_has_kl_zero_to_its_reference(family, tmp_path):
    import peft

    base = family("llama")
    base.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], lora_dropout=0.5, init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = peft.get_peft_model(load_model(str(tmp_path / "base")), config).eval()
    wrapped.save_pretrained(tmp_path / "adapter")
    adapted = LanguageModel(wrapped.get_base_model())

    language_model = LanguageModel(load_model(str(tmp_path / "adapter")))
    inputs = batch()
    logprob = language_model.completion(*inputs).logprob
    assert (logprob - adapted.completion(*inputs).logprob).abs().max() < 1e-5
    assert (logprob - LanguageModel(base).completion(*inputs).logprob).abs().max() > 0.1
    reference = language_model.reference()
    assert (reference.completion(*inputs).logprob - logprob).abs().max() < 1e-6
    assert language_model.lora and all("lora_" in key for key in language_model.state_dict())
    with torch.no_grad():
        for weight in language_model.trainable():
            weight.mul_(0.5)
    assert (reference.completion(*inputs).logprob - logprob).abs().max() < 1e-6
    (tmp_path / "adapter" / "adapter_model.safetensors").rename(tmp_path / "adapter" / "adapter_model.bin")
    with pytest.raises(ValueError, match="a pickle, which can run code"):
        load_model(str(tmp_path / "adapter"))


# --- state, copies, files -----------------------------------------------------------------------------------------


def test_state_is_the_trainable_weights_with_tied_ones_once(family):
    language_model = LanguageModel(family("tied"))
    state = {key: value.clone() for key, value in language_model.state_dict().items()}
    assert "model.model.embed_tokens.weight" in state and "model.lm_head.weight" not in state
    other = LanguageModel(family("tied"))
    with torch.no_grad():
        for weight in other.trainable():
            weight.zero_()
    other.load_state_dict(state)
    assert torch.equal(other.completion(*batch()).logprob, language_model.completion(*batch()).logprob)
    state.pop("model.model.embed_tokens.weight")
    with pytest.raises(ValueError, match=r"embed_tokens.weight is \[31, 16\] here and missing in the given state"):
        other.load_state_dict(state)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_cast_copy_is_refreshed_in_place(family, rank):
    language_model = lora(family("llama"), rank)
    assert language_model.sampler_copy("float32") is language_model
    cast = language_model.sampler_copy("bfloat16")
    assert {weight.dtype for weight in cast.parameters()} == {torch.bfloat16}
    assert cast.model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert language_model.trainable()[0].dtype == torch.float32 and language_model.trainable()[0].requires_grad
    places = [weight.data_ptr() for weight in cast.parameters()]
    with torch.no_grad():
        for weight in language_model.trainable():
            weight.add_(0.1)
    cast.refresh(language_model)
    assert places == [weight.data_ptr() for weight in cast.parameters()]
    for ours, theirs in zip(cast.parameters(), language_model.parameters(), strict=True):
        assert torch.equal(ours, theirs.detach().bfloat16())
    language_model.refresh(language_model)  # nothing to do
    gap = cast.completion(*batch()).logprob - language_model.completion(*batch()).logprob
    assert 0 < gap.abs().max() < 0.5 and cast.completion(*batch()).logprob.dtype == torch.float32


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("name", ["tied", "gpt2"])
def test_a_saved_model_is_one_that_transformers_loads(family, name, rank, tmp_path):
    import transformers

    language_model = lora(family(name, vocab=258), rank, value_head=True)
    with torch.no_grad():
        for weight in language_model.trainable():
            weight.add_(0.05)
    before = {key: value.clone() for key, value in language_model.state_dict().items()}
    folder = tmp_path / "runs" / "model"
    language_model.save(folder, byte_tokenizer())
    language_model.save(folder, byte_tokenizer())  # again, over the old one
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    assert not list(folder.glob("*.bin")) and not (folder / "adapter_config.json").exists()
    assert all(torch.equal(before[key], value) for key, value in language_model.state_dict().items())

    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer("37+85=").input_ids == list(b"37+85=")
    expected = language_model.completion(*batch()).logprob
    assert (LanguageModel(loaded).completion(*batch()).logprob - expected).abs().max() < 1e-5
    again = LanguageModel(load_model(str(folder)))
    assert (again.completion(*batch()).logprob - expected).abs().max() < 1e-5
    assert load_tokenizer(str(folder)).decode([51, 55]) == "37"


def test_settings_at_odds_do_not_lose_a_trained_model(family, tmp_path):
    """A temperature without sampling, as some models come with: the library refuses to save that."""
    model = family("llama")
    model.generation_config.temperature, model.generation_config.eos_token_id = 0.6, [1, 5]
    LanguageModel(model).save(tmp_path / "model", byte_tokenizer())
    assert load_model(str(tmp_path / "model")).generation_config.eos_token_id == [1, 5]
    assert model.generation_config.temperature == 0.6


def test_what_cannot_be_loaded_is_told_in_one_line(family, tmp_path, capfd):
    def message(name) -> str:
        with pytest.raises(ValueError) as error:
            load_model(str(name))
        text = str(error.value)
        assert "\n" not in text and len(text) < 500
        return text

    assert "there is no such folder" in message(tmp_path / "nothing")
    assert "there is no such folder" in message("./nothing/there")
    assert "not in the local cache, and not to be had from the hub" in message("nobody/nothing-of-this-name")
    (tmp_path / "empty").mkdir()
    assert "neither config.json nor a GGUF file" in message(tmp_path / "empty")
    for name in ("one.gguf", "two.gguf"):
        (tmp_path / "empty" / name).write_bytes(b"GGUF")
    assert "2 GGUF files" in message(tmp_path / "empty")
    model = family("llama")
    model.save_pretrained(tmp_path / "pickle")
    torch.save(model.state_dict(), tmp_path / "pickle" / "pytorch_model.bin")
    (tmp_path / "pickle" / "model.safetensors").unlink()
    assert "a pickle, which can run code" in message(tmp_path / "pickle")
    model.save_pretrained(tmp_path / "cut")
    data = (tmp_path / "cut" / "model.safetensors").read_bytes()
    (tmp_path / "cut" / "model.safetensors").write_bytes(data[: len(data) // 2])
    assert str(tmp_path / "cut") in message(tmp_path / "cut")
    config = json.loads((tmp_path / "cut" / "config.json").read_text())
    config |= {
        "model_type": "unheard_of",
        "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"},
    }
    (tmp_path / "cut" / "config.json").write_text(json.dumps(config))
    (tmp_path / "cut" / "code.py").write_text("raise SystemExit('code of the folder was run')")
    assert "contains custom code" in message(tmp_path / "cut")
    assert capfd.readouterr() == ("", "")


def test_loading_and_saving_print_nothing(family, tmp_path, capfd):
    LanguageModel(family("llama")).save(tmp_path / "model", byte_tokenizer())
    lora(load_model(str(tmp_path / "model")))
    assert capfd.readouterr() == ("", "")


def test_the_tiny_llama_is_drawn_from_its_generator_alone():
    before = torch.random.get_rng_state()
    one, same = (tiny_llama(258, torch.Generator().manual_seed(0), pad_id=256, eos_id=257) for _ in range(2))
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert context_length(one) == context_length(LanguageModel(one)) == 256
    assert (one.config.pad_token_id, one.config.eos_token_id) == (256, 257)
    logits = one(torch.arange(20)[None]).logits
    assert 0.3 < logits.std() < 3  # neither uniform nor decided


def test_a_gguf_file_gives_the_model_that_it_was_made_from(tmp_path, capfd):
    gguf = pytest.importorskip("gguf")
    model = tiny_llama(32, torch.Generator().manual_seed(0), width=64, layers=2, heads=2)
    write_gguf(gguf, model, tmp_path / "model.gguf")
    loaded = load_model(str(tmp_path))
    tokens = torch.arange(3, 19)[None]
    assert (loaded(tokens).logits - model(tokens).logits).abs().max() < 1e-4
    assert loaded.config.eos_token_id == 2
    language_model = lora(loaded)  # trainable, and saved as plain weights
    language_model.save(tmp_path / "saved", byte_tokenizer())
    again = load_model(str(tmp_path / "saved"))
    assert torch.equal(again(tokens).logits, loaded(tokens).logits)
    assert capfd.readouterr() == ("", "")


def write_gguf(gguf, model, path):
    """The model in llama.cpp's layout: rows of q and k are interleaved per head, for its other rotary convention."""
    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{index}" for index in range(config.vocab_size)])
    writer.add_eos_token_id(2)
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
             "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
             "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
             "post_attention_layernorm": "ffn_norm"}  # fmt: skip
    for key, weight in model.state_dict().items():
        weight = weight.float()
        if "layers." in key:
            _, _, layer, name = key.removesuffix(".weight").split(".", 3)
            if names[name] in ("attn_q", "attn_k"):
                weight = (
                    weight.view(config.num_attention_heads, 2, -1, weight.shape[1])
                    .transpose(1, 2)
                    .reshape(weight.shape)
                )
            key = f"blk.{layer}.{names[name]}.weight"
        else:
            key = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
                   "lm_head.weight": "output.weight"}[key]  # fmt: skip
        writer.add_tensor(key, weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
