"""Fixtures of several folders of tests: the demo model, SGLang with the plugin loaded as each of its processes has it, and a tiny model."""

from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's folder."""
    from sglang_ext_bench.demo_model import prepare

    return prepare(ROOT / ".cache/models/SmolLM2-135M-Instruct")


@pytest.fixture(scope="session")
def model(demo_model: Path) -> Path:
    """The folder of the model that servers serve."""
    return demo_model


@pytest.fixture(scope="session", autouse=True)
def plugin() -> None:
    """Load SGLang's plugins: the arguments class is replaced and the registries are filled."""
    from sglang.srt.plugins import load_plugins

    load_plugins()


@pytest.fixture(scope="session")
def tiny(model, tmp_path_factory):
    """The folder of a model of two layers with random weights, and the demo model's tokenizer."""
    # Here, because the process that only hands out tests loads this module too.
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    folder, tokenizer = tmp_path_factory.mktemp("tiny"), AutoTokenizer.from_pretrained(model)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "initializer_range": 0.2}
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), tie_word_embeddings=True, **heads, **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
