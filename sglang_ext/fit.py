"""Fit a predictor of KVzip's scores to a model, for ``--kv-compressor kvzap``.

    python -m sglang_ext.fit kvzap --model MODEL --out FOLDER TEXTS...

A server started with ``--kv-compressor kvzap --kv-predictor FOLDER`` then predicts the score of each token when it computes its KV. An
interrupted run can be resumed. FOLDER/work contains samples and may be deleted afterwards.
"""

import argparse
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from sglang_ext.mem_cache.scores import FitRecord, model_folder, model_key
from sglang_ext.tools import CommandError, check_folder, exit_code, show_progress
from sglang_ext.tools.predictor_fit import Sampler, SamplingConfig, TrainingConfig, fit, split_texts

SMALLEST = {"tokens": 128, "samples": 1, "width": 0, "epochs": 1, "seed": 0}


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    made = argparse.ArgumentParser("python -m sglang_ext.fit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("method", choices=("kvzap",))
    add = made.add_argument
    add("texts", nargs="+", type=Path, metavar="TEXTS", help="text files in UTF-8, similar to the served texts")
    add("--model", required=True, help="Hugging Face folder or name; the one that is served")
    add("--revision", help="of a model's name")
    add("--out", required=True, type=Path, metavar="FOLDER", help="folder for the predictor, with samples in FOLDER/work")
    add("--target", default=SamplingConfig.target, choices=("kvzip+", "kvzip"), help="which scores (default: %(default)s, as published)")
    add("--tokens", type=int, default=SamplingConfig.tokens, help="longer texts are split into pieces of this size (default: %(default)s)")
    add("--samples", type=int, default=SamplingConfig.samples, help="sampled tokens per piece (default: %(default)s)")
    add("--network", default=TrainingConfig.network, choices=("mlp", "linear"), help="default: %(default)s")
    add("--width", type=int, default=TrainingConfig.width, help="width of the mlp's inner layer; 0: an eighth of the hidden size (default)")
    add("--epochs", type=int, default=TrainingConfig.epochs, help="epochs of the mlp (default: %(default)s)")
    add("--held-out", type=float, default=0.1, metavar="SHARE", help="share of held-out texts (default: %(default)s)")
    add("--seed", type=int, default=0)
    add("--dtype", default="auto", choices=("auto", "bfloat16", "float16", "float32"))
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: cuda where there is one, else cpu")
    return made


def run(args: argparse.Namespace, console: Console) -> None:
    """Take the missing samples, and fit the missing layers. Raises ``CommandError`` or ``OptionError`` for an option or a text of no use."""
    for name, least in SMALLEST.items():
        if getattr(args, name) < least:
            raise CommandError(f"--{name} is {getattr(args, name)}; pass a whole number from {least}")
    if not 0 < args.held_out < 1:
        raise CommandError(f"--held-out is {args.held_out}; pass the share of the texts to hold out, for example 0.1")
    samples = args.out / "work"
    check_folder("--out", args.out)
    check_folder("--out", samples)
    folder = model_folder(args.model, args.revision, download=True)
    sampling = SamplingConfig(args.target, args.tokens, args.samples, args.seed)
    training = TrainingConfig(args.network, args.width, args.epochs, seed=args.seed)
    sampler = Sampler(AutoTokenizer.from_pretrained(folder), model_key(folder), sampling, samples)
    texts = [sampler.pieces(file) for file in args.texts]
    parts = split_texts(texts, args.held_out)
    layers = AutoConfig.from_pretrained(folder).get_text_config().num_hidden_layers
    with show_progress(console) as begin:
        if missing := [piece for pieces in texts for piece in pieces if not piece.is_sampled]:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=args.dtype).to(args.device).eval()
            # Each token is computed once, and repeated once.
            advance = begin("scores of texts", 2 * sum(len(piece.tokens) for piece in missing), "tokens")
            for piece in missing:
                sampler.take(model, piece, advance)
            del model
        advance = begin("networks", layers, "layers")
        predictor = fit(sampler, training, parts, layers, torch.device(args.device), lambda: advance(1))
    predictor.write(args.out)
    print_quality(predictor.fitted, console)


def print_quality(fitted: FitRecord, console: Console) -> None:
    """Print the errors of each layer, and a warning if some layers predict nothing."""
    title = f"on held-out texts; fitted to {fitted.tokens} tokens of {fitted.texts} texts"
    table = Table("layer", "mean squared error", "R^2", title=title)
    for layer, (loss, r2) in enumerate(zip(fitted.loss, fitted.r2)):
        table.add_row(str(layer), f"{loss:.3f}", f"{r2:.3f}")
    table.add_row("mean", *(f"{sum(values) / len(values):.3f}" for values in (fitted.loss, fitted.r2)))
    console.print(table)
    useless = [layer for layer, r2 in enumerate(fitted.r2) if not r2 > 0]
    if useless:
        layers = "no layer" if len(useless) == len(fitted.r2) else f"not layers {', '.join(map(str, useless))}"
        console.print(
            f"fit: warning: the network predicts {layers} of held-out texts better than a constant does (R^2 {min(fitted.r2):.3f} at "
            f"worst; above 0 it predicts something): pass more texts, or texts that are alike ({fitted.tokens} tokens of "
            f"{fitted.texts} were learned from), --network linear, or fewer --epochs",
            style="yellow", markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run the command. Return 0, 2 for an error, or 130 if interrupted. A later run reuses the completed work."""
    args, console = parser().parse_args(argv), Console(stderr=True)
    return exit_code("fit", lambda: run(args, console), console)


if __name__ == "__main__":
    sys.exit(main())
