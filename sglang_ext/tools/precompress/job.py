"""Finds the documents that are not scored yet, and scores a document. A document begins a prompt: its token ids are those that a server will
receive.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sglang_ext.mem_cache.compressors.kvzip import MIN_MATCH, ScoreFile, ScoreFileError, ScoredDocument, write_scores
from sglang_ext.tools.precompress import PrecompressError
from sglang_ext.tools.precompress.reconstruction import (
    ReconstructionConfig,
    reconstruction_scores,
)

# Placeholder for a document when the chat template's text is examined.
MARK = "A document."


@dataclass(frozen=True)
class PromptPrefix:
    """The text before a document in prompts.

    Attributes:
        text: The text, with ``chat`` False.
        chat: Whether the document begins the user's message, in the model's chat template.
        system: The system message in the template. None for the template's own.
    """

    text: str = ""
    chat: bool = False
    system: str | None = None

    def tokens(self, tokenizer: PreTrainedTokenizerBase, document: str) -> list[int]:
        """Token ids of a prompt up to the end of ``document``, tokenized as SGLang tokenizes prompts.

        Raises:
            PrecompressError: The chat template changes the document's text, or there is none.
        """
        if not self.chat:
            return tokenizer.encode(self.text + document)
        rendered = self._rendered(tokenizer, document)
        # Templates may strip a message.
        found = rendered.rfind(document.strip())
        if found < 0:
            raise PrecompressError("the chat template changes the document's text: pass what stands before it as --prefix-text")
        return tokenizer.encode(rendered[: found + len(document.strip())], add_special_tokens=False)

    def suffix(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Token ids between a question and the model's answer. A line break if prompts have no template."""
        if tokenizer.chat_template is None:
            return tokenizer.encode("\n", add_special_tokens=False)
        rendered = self._rendered(tokenizer, MARK, answer=True)
        return tokenizer.encode(rendered[rendered.rindex(MARK) + len(MARK) :], add_special_tokens=False)

    def _rendered(self, tokenizer: PreTrainedTokenizerBase, message: str, answer: bool = False) -> str:
        if tokenizer.chat_template is None:
            raise PrecompressError("--chat-template is given, but the model's tokenizer has none: use --prefix-text")
        messages = [{"role": "user", "content": message}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer)


def read_text(path: Path) -> str:
    """Read a document's text.

    Raises:
        PrecompressError: It cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PrecompressError(f"{path} cannot be read: {error}; pass files of text in UTF-8") from error


METHOD = "kvzip"


@dataclass(frozen=True)
class ScoringJob:
    """Settings that scores depend on, in addition to a document's text, and the output folder.

    Attributes:
        tokenizer: The model's tokenizer.
        beginning: The text before documents.
        how: Settings of the method.
        model: The model's key.
        out: The folder of scores.
    """

    tokenizer: PreTrainedTokenizerBase
    beginning: PromptPrefix
    how: ReconstructionConfig
    model: str
    out: Path

    def document(self, tokens: list[int]) -> ScoredDocument:
        """The key of the scores of ``tokens``."""
        return ScoredDocument.from_tokens(tokens, self.model, METHOD, asdict(self.how))

    def is_scored(self, tokens: list[int]) -> bool:
        """Whether the folder contains their complete scores."""
        path = self.out / self.document(tokens).file_name
        try:
            return path.exists() and ScoreFile.read(path).scores() is not None
        except ScoreFileError:
            return False

    def missing(self, files: Iterable[Path], say: Callable[[str], None]) -> dict[Path, list[int]]:
        """Token ids of the documents without scores. Calls ``say`` with a line for each document that is scored or too short.

        Raises:
            PrecompressError: A document cannot be read or tokenized, or all are too short.
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
            raise PrecompressError(
                f"no document has {MIN_MATCH} tokens with what stands before it, so that nothing was written: pass longer ones"
            )
        return found

    def score(self, model: PreTrainedModel, tokens: list[int], progress: Callable[[int], None]) -> Path:
        """Score a document and store the scores. Calls ``progress`` with numbers of computed or repeated tokens."""
        suffix = self.beginning.suffix(self.tokenizer)
        scores = reconstruction_scores(model, self._encode, tokens, suffix, self.how, progress)
        return write_scores(self.out, self.document(tokens), scores)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)
