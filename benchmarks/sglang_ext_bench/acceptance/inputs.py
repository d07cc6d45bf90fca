"""Model, prompts and options that the acceptance measurements share."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from sglang_ext.config import model_folder
from sglang_ext.mem_cache.scores import Predictor, model_key
from sglang_ext.tools import CommandError
from sglang_ext_bench.options import check_known
from sglang_ext_bench.prompts import Prompt, Tokenizer, load_prompts, load_tokenizer

DEFAULT_ATTENTION = "sdpa"
PREDICTED_METHOD = "kvzap"
"""The scoring method that needs a fitted predictor."""


def add_input_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options --model and --prompts."""
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder; the model runs in float32 on the CPU")
    parser.add_argument("--prompts", type=Path, required=True, help="folder of .txt files, or JSON lines (text / messages)")


def add_scoring_arguments(parser: argparse.ArgumentParser, known: Sequence[str], default: list[str]) -> None:
    """Add the options of a command that compares scoring methods: the methods, --model, --prompts and --predictor."""
    help_text = f"of {', '.join(known)}; default: {' '.join(default)}"
    parser.add_argument("methods", nargs="*", metavar="METHOD", default=default, help=help_text)
    add_input_arguments(parser)
    parser.add_argument("--predictor", type=Path, help=f"folder of the fitted predictor, for {PREDICTED_METHOD}")


def load_model(args: argparse.Namespace, attention: str = DEFAULT_ATTENTION) -> tuple[PreTrainedModel, Tokenizer]:
    """Load the model of --model in float32, and its tokenizer.

    Args:
        args: The options.
        attention: Name of the attention function in transformers.

    Raises:
        CommandError: There is no such model.
    """
    problem = model_folder.find_problem(str(args.model))
    if problem is not None:
        raise CommandError(f"--model {problem}: pass a Hugging Face folder")
    tokenizer = load_tokenizer(str(args.model))
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation=attention)
    return model.eval(), tokenizer


def read_prompts(args: argparse.Namespace, tokenizer: Tokenizer, limit: int | None = None) -> tuple[Prompt, ...]:
    """Read the first ``limit`` prompts of --prompts; None for all.

    Raises:
        CommandError: There is no such folder or file, or it has no prompts.
    """
    return load_prompts(args.prompts, tokenizer)[:limit]


def read_predictor(args: argparse.Namespace, methods: Sequence[str], known: Sequence[str]) -> Predictor | None:
    """Check the names of scoring methods, and read the predictor of --predictor.

    Args:
        args: The options.
        methods: Names of methods to measure.
        known: Names of all methods.

    Returns:
        The predictor. None if --predictor was not passed.

    Raises:
        CommandError: A method is unknown, or needs the predictor.
    """
    check_known("METHOD", methods, known)
    if args.predictor is not None:
        return Predictor.read(args.predictor, model_key(args.model))
    if PREDICTED_METHOD in methods:
        raise CommandError(f"METHOD {PREDICTED_METHOD!r} needs a fitted predictor: pass --predictor FOLDER, or leave the method out")
    return None
