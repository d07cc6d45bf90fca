"""Documents as the beginnings of prompts: the token ids that a server will receive."""

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from sglang_ext.tools.precompress import PrecompressError

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
