"""Small models for the tests of the language-model room: random ones of several families, and a Markov chain."""

import pytest
import torch

from cleanrl_zoo.llm.models import LanguageModel, tiny_llama


@pytest.fixture(autouse=True, scope="session")
def no_network():
    """Hub names are looked up in the local cache only."""
    patch = pytest.MonkeyPatch()
    patch.setenv("HF_HUB_OFFLINE", "1")
    yield
    patch.undo()


def small(family: str, vocab: int = 31, **settings):
    """A random model of two layers and width 16: learned positions, rotary ones, soft caps, scales, a biased head."""
    import transformers

    shared = {"vocab_size": vocab, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
              "num_key_value_heads": 1, "intermediate_size": 24, "max_position_embeddings": 256, "pad_token_id": 0,
              "bos_token_id": None, "eos_token_id": 1, "initializer_range": 0.3}  # fmt: skip
    gpt2 = {"vocab_size": vocab, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 256, "pad_token_id": 0,
            "bos_token_id": None, "eos_token_id": 1, "initializer_range": 0.3}  # fmt: skip
    few = {
        key: shared[key]
        for key in shared
        if key not in ("num_key_value_heads", "intermediate_size", "initializer_range")
    }
    config = {
        "gpt2": lambda: transformers.GPT2Config(**gpt2 | settings),
        "llama": lambda: transformers.LlamaConfig(**shared | settings),
        "tied": lambda: transformers.LlamaConfig(**shared | {"tie_word_embeddings": True} | settings),
        "gemma2": lambda: transformers.Gemma2Config(
            **shared | {"head_dim": 8, "sliding_window": 6, "final_logit_softcapping": 2.0} | settings
        ),
        "granite": lambda: transformers.GraniteConfig(**shared | {"logits_scaling": 3.0} | settings),
        "cohere": lambda: transformers.CohereConfig(**shared | {"logit_scale": 0.25} | settings),
        # The trunk is entered past its outer module, and projects at its end; positions are the model's own business;
        # no attention, and no cache of keys.
        "opt": lambda: transformers.OPTConfig(**few | {"ffn_dim": 24, "word_embed_proj_dim": 12} | settings),
        "bloom": lambda: transformers.BloomConfig(**few | {"n_layer": 2, "n_head": 2} | settings),
        "mamba": lambda: transformers.MambaConfig(**few | {"state_size": 4} | settings),
        "phi": lambda: transformers.PhiConfig(**shared | {"num_key_value_heads": 2} | settings),
    }[family]()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for name, weight in model.named_parameters():
            if "norm" not in name and "ln_" not in name:
                torch.nn.init.normal_(weight, 0.0, 0.3)
    return model.eval()


@pytest.fixture
def family():
    return small


def markov(transitions: dict[int, dict[int, float]], vocab: int = 16) -> LanguageModel:
    """A model whose next token depends on the last one alone: transitions[a][b] is the probability of b after a.

    The layers write nothing, embeddings are unit vectors of length 1, which the norm makes √width long, and the head's
    column of token a holds the log-probs, divided by that.
    """
    model = tiny_llama(vocab, torch.Generator().manual_seed(0), width=vocab, layers=1, heads=2, pad_id=0, eos_id=1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(vocab))
        head = torch.full((vocab, vocab), -1e4)  # [V, H]
        for last, following in transitions.items():
            for token, probability in following.items():
                head[token, last] = torch.tensor(probability).log() / vocab**0.5
        model.lm_head.weight.copy_(head)
    return LanguageModel(model)


@pytest.fixture
def chain():
    return markov


@pytest.fixture
def llama() -> LanguageModel:
    return LanguageModel(tiny_llama(31, torch.Generator().manual_seed(3), pad_id=0, eos_id=1))
