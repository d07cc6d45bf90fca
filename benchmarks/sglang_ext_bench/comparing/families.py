"""Compare verified decoding with stock SGLang on a tiny random model of each supported family, in float32.

Writes each model to a Hugging Face folder, and runs ``sglang-ext-bench identity`` on it. Random weights give flat logits, with which
small numerical differences change the output, and few draft tokens are accepted.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "max_position_embeddings": 8192,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}


def heads(query: int, kv: int, dim: int) -> dict[str, int]:
    """Return the fields of a model config for the numbers and the size of heads."""
    return {"num_attention_heads": query, "num_key_value_heads": kv, "head_dim": dim}


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-mha-64": ("LlamaConfig", heads(4, 4, 64)),
    "llama-mqa-128": ("LlamaConfig", heads(4, 1, 128)),
    "mistral-gqa-64": ("MistralConfig", {**heads(4, 2, 64), "sliding_window": None}),
    "qwen2-gqa-64": ("Qwen2Config", {**heads(4, 2, 64), "use_sliding_window": False}),
    "qwen3-gqa-128": ("Qwen3Config", {**heads(4, 2, 128), "use_sliding_window": False}),
    "llama-gqa16-128": ("LlamaConfig", heads(128, 8, 128)),
    "qwen3-gqa16-128": ("Qwen3Config", {**heads(64, 4, 128), "use_sliding_window": False}),
    "qwen3-moe-128": ("Qwen3MoeConfig", {**heads(4, 2, 128), **MOE, "use_sliding_window": False}),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``families``."""
    parser.add_argument("--tokenizer", required=True, help="folder with the tokenizer of all models")
    parser.add_argument("--prompts", required=True, help="folder of .txt files, or JSON lines, as for identity")
    parser.add_argument("--out", type=Path, required=True, help="folder for models and reports")
    parser.add_argument("--families", default=",".join(FAMILIES), help="names separated by commas (default: all)")
    parser.add_argument("identity", nargs="*", help="further options for identity, after --")


def run(args: argparse.Namespace) -> int:
    """Run ``identity`` for each family. Returns the largest exit code."""
    code = 0
    for name in args.families.split(","):
        folder = write_model(name, args.out / name, args.tokenizer)
        print(f"== {name}", flush=True)
        command = [sys.executable, "-m", "sglang_ext_bench", "identity", "--model", str(folder)]
        command += ["--prompts", args.prompts, "--json", str(args.out / f"{name}.json"), *args.identity]
        code = max(code, subprocess.run(command).returncode)
    return code


def write_model(name: str, folder: Path, tokenizer: str) -> Path:
    """Write a model with random weights (seed 0) and the files of a tokenizer. Returns the folder."""
    import torch
    import transformers

    config_class, shape = FAMILIES[name]
    vocabulary = transformers.AutoTokenizer.from_pretrained(tokenizer).vocab_size
    config = getattr(transformers, config_class)(vocab_size=vocabulary, **SIZES, **shape)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    for pattern in ("tokenizer*", "special_tokens*", "chat_template*"):
        for file in Path(tokenizer).glob(pattern):
            shutil.copy(file, folder)
    return folder
