"""Score the tokens of documents, ahead of the requests that begin with them, for ``--kv-compressor kvzip``.

    python -m sglang_ext.precompress --model MODEL --out FOLDER FILES...

A server started with ``--kv-compressor kvzip --kv-scores FOLDER`` finds a document's scores if a prompt begins with its tokens, from the
first token on. Pass the text before documents with --prefix-text or --chat-template.
"""

import argparse
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_ext.mem_cache.compressors.kvzip import MIN_MATCH, ScoreFile, ScoreFileError, ScoredDocument, write_scores
from sglang_ext.mem_cache.scores import model_folder, model_key
from sglang_ext.tools import CommandError, check_folder, exit_code, show_progress
from sglang_ext.tools.reconstruction import PromptPrefix, ReconstructionConfig, check_device, read_text, reconstruction_scores


def is_scored(path: Path) -> bool:
    """Whether a file has the complete scores of a document."""
    try:
        return path.exists() and ScoreFile.read(path).scores() is not None
    except ScoreFileError:
        return False


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    formatter = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser("python -m sglang_ext.precompress", description=__doc__, formatter_class=formatter)
    add = made.add_argument
    add("files", nargs="+", type=Path, metavar="FILES", help="documents: text in UTF-8")
    add("--model", required=True, help="Hugging Face folder or name; the one that is served")
    add("--revision", help="of a model's name")
    add("--out", required=True, type=Path, metavar="FOLDER", help="folder for a file per document; existing ones are skipped")
    add("--prefix-text", default="", metavar="TEXT", help="text before each document in prompts")
    add("--chat-template", action="store_true", help="documents begin the user's message in the model's chat template")
    add("--system", metavar="TEXT", help="with --chat-template: the system message, if requests send one")
    add("--chunk", type=int, default=ReconstructionConfig.chunk, help="tokens that the model repeats at once (default: %(default)s)")
    add("--dtype", default="auto", choices=("auto", "bfloat16", "float16", "float32"))
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: cuda where there is one, else cpu")
    return made


def run(args: argparse.Namespace, console: Console) -> None:
    """Score the documents that are not scored yet. Raises ``CommandError`` or ``OptionError`` for an option or a document that cannot be used."""
    if args.chunk < 1:
        raise CommandError(f"--chunk is {args.chunk}; pass the number of tokens to repeat at once, from 1, for example 2048")
    if args.chat_template and args.prefix_text:
        raise CommandError("--prefix-text and --chat-template both set the text before documents: pass one of them")
    if args.system is not None and not args.chat_template:
        raise CommandError("--system is a message of the chat template: pass --chat-template too")
    check_device(args.device)
    check_folder("--out", args.out)
    folder = model_folder(args.model, args.revision, download=True)
    beginning = PromptPrefix(args.prefix_text, args.chat_template, args.system)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    how, key = ReconstructionConfig(chunk=args.chunk), model_key(folder)
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    documents: dict[Path, tuple[list[int], ScoredDocument]] = {}
    short = 0
    for file in args.files:
        tokens = beginning.tokens(tokenizer, read_text(file))
        document = ScoredDocument.from_tokens(tokens, key, "kvzip", asdict(how))
        if len(tokens) < MIN_MATCH:
            short += 1
            say(f"{file}: left out: {len(tokens)} tokens, servers look for {MIN_MATCH} or more")
        elif is_scored(args.out / document.file_name):
            say(f"{file}: there already, {len(tokens)} tokens")
        else:
            documents[file] = tokens, document
    if short == len(args.files):
        raise CommandError(f"no document has {MIN_MATCH} tokens with what stands before it, so that nothing was written: pass longer ones")
    if not documents:
        return
    encode, suffix = partial(tokenizer.encode, add_special_tokens=False), beginning.suffix(tokenizer)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=args.dtype).to(args.device).eval()
    with show_progress(console) as begin:
        for file, (tokens, document) in documents.items():
            # Each token is computed once, and repeated once.
            advance = begin(file.name, 2 * len(tokens), "tokens")
            write_scores(args.out, document, reconstruction_scores(model, encode, tokens, suffix, how, advance))


def main(argv: list[str] | None = None) -> int:
    """Run the command. Return 0, 2 for an error, or 130 if interrupted. A later run skips the completed documents."""
    args, console = parser().parse_args(argv), Console(stderr=True)
    return exit_code("precompress", lambda: run(args, console), console)


if __name__ == "__main__":
    sys.exit(main())
