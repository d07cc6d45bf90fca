"""Score the tokens of documents, ahead of the requests that begin with them, for ``--kv-compressor kvzip``.

    python -m sglang_ext.precompress --model MODEL --out FOLDER FILES...

A server started with ``--kv-compressor kvzip --kv-scores FOLDER`` finds a document's scores if a prompt begins with its tokens, from the
first token on. Pass the text before documents with --prefix-text or --chat-template.
"""

import argparse
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from sglang_ext.mem_cache.scores.index import MIN_MATCH
from sglang_ext.mem_cache.scores.model_key import model_folder, model_key
from sglang_ext.mem_cache.scores.score_files import ScoredDocument, ScoreFile, ScoreFileError, write
from sglang_ext.tools import CommandError, check_folder, exit_code
from sglang_ext.tools.reconstruction import PromptPrefix, ReconstructionConfig, read_text, reconstruction_scores


@dataclass(frozen=True)
class ScoringJob:
    """Scores documents. Its fields are the settings that scores depend on, in addition to a document's text, and the output folder."""

    tokenizer: PreTrainedTokenizerBase
    beginning: PromptPrefix
    how: ReconstructionConfig
    model: str
    out: Path

    def document(self, tokens: list[int]) -> ScoredDocument:
        """The key of the scores of ``tokens``."""
        return ScoredDocument.from_tokens(tokens, self.model, "kvzip", asdict(self.how))

    def is_scored(self, tokens: list[int]) -> bool:
        """Whether the folder contains their complete scores."""
        path = self.out / self.document(tokens).file_name
        try:
            return path.exists() and ScoreFile.read(path).scores() is not None
        except ScoreFileError:
            return False

    def missing(self, files: Iterable[Path], say: Callable[[str], None]) -> dict[Path, list[int]]:
        """Token ids of the documents without scores. Calls ``say`` with a line for each document that is scored or too short.

        Raises ``CommandError`` if a document cannot be read or tokenized, or if all are too short.
        """
        found: dict[Path, list[int]] = {}
        files, short = list(files), 0
        for file in files:
            tokens = self.beginning.tokens(self.tokenizer, read_text(file))
            if len(tokens) < MIN_MATCH:
                short += 1
                say(f"{file}: left out: {len(tokens)} tokens, servers look for {MIN_MATCH} or more")
            elif self.is_scored(tokens):
                say(f"{file}: there already, {len(tokens)} tokens")
            else:
                found[file] = tokens
        if short == len(files):
            raise CommandError(f"no document has {MIN_MATCH} tokens with what stands before it, so that nothing was written: pass longer ones")
        return found

    def score(self, model: PreTrainedModel, tokens: list[int], progress: Callable[[int], None]) -> Path:
        """Score a document and store the scores. Calls ``progress`` with numbers of computed or repeated tokens."""
        encode, suffix = partial(self.tokenizer.encode, add_special_tokens=False), self.beginning.suffix(self.tokenizer)
        return write(self.out, self.document(tokens), reconstruction_scores(model, encode, tokens, suffix, self.how, progress))


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
    check_folder("--out", args.out)
    folder = model_folder(args.model, args.revision, download=True)
    beginning = PromptPrefix(args.prefix_text, args.chat_template, args.system)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    work = ScoringJob(tokenizer, beginning, ReconstructionConfig(chunk=args.chunk), model_key(folder), args.out)
    documents = work.missing(args.files, lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True))
    if not documents:
        return
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=args.dtype).to(args.device).eval()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"), TimeRemainingColumn()
    with Progress(*columns, console=console) as progress:
        for file, tokens in documents.items():
            # Each token is computed once, and repeated once.
            task = progress.add_task(file.name, total=2 * len(tokens))
            work.score(model, tokens, lambda count: progress.advance(task, count))


def main(argv: list[str] | None = None) -> int:
    """Run the command. Return 0, 2 for an error, or 130 if interrupted. A later run skips the completed documents."""
    args, console = parser().parse_args(argv), Console(stderr=True)
    return exit_code("precompress", lambda: run(args, console), console)


if __name__ == "__main__":
    sys.exit(main())
