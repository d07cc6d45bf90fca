"""What scripts share that run a model over a folder of prompts, without a server."""

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)


def parser_of(description: str | None, *named: str, default: list[str], **options: Any) -> argparse.ArgumentParser:
    """A parser of what is compared, ``named`` so, of ``--model`` and ``--prompts``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(*named, nargs="*", default=default, **options)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    return parser


def load(model: Path, **options: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A folder's model in float32, and its tokenizer."""
    found = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, **options)
    return found.eval(), AutoTokenizer.from_pretrained(model)


def prompts_in(folder: Path) -> list[Path]:
    """The files of a folder's prompts, by name."""
    return sorted(folder.glob("*.txt"))
