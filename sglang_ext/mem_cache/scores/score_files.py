"""A document's scores in a file: a safetensors file that appears whole, with a checksum and a key of what they are for.

It holds ``scores``, float16 [layers, kv_heads, tokens], ``chain``, uint8 [pages, 16], which names its tokens, and in its header
the format's version, the model's key, the method, its settings and a checksum of all of it.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from sglang_ext.mem_cache.scores.checked_file import write_whole

# Tokens of a page; a document is known to its last whole page.
PAGE = 16
# Bytes of a hash.
HASH_BYTES = 16


def chain(tokens: Sequence[int]) -> Iterator[bytes]:
    """Hashes of the whole pages of ``tokens``, the first page first, each of all tokens before its end; made when it is asked for."""
    digest = b""
    for end in range(PAGE, len(tokens) + 1, PAGE):
        page = np.asarray(tokens[end - PAGE : end], dtype="<i8")
        digest = blake2b(digest + page.tobytes(), digest_size=HASH_BYTES).digest()
        yield digest


FORMAT = "1"
SUFFIX = ".safetensors"


class ScoreFileError(ValueError):
    """A file of scores cannot be used: says which, and what is wrong with it."""


@dataclass(frozen=True)
class ScoredDocument:
    """What scores belong to: the tokens of a document, to its last whole page, and how they were scored.

    Attributes:
        model: the model's key (model_key.py).
        method: name of the compressor.
        settings: of the method, as JSON with sorted keys.
        chain: hashes of the pages of its tokens, one after another.
    """

    model: str
    method: str
    settings: str
    chain: bytes

    @classmethod
    def from_tokens(cls, tokens: list[int], model: str, method: str, settings: dict[str, object]) -> "ScoredDocument":
        """The document of ``tokens``."""
        return cls(model, method, json.dumps(settings, sort_keys=True), b"".join(chain(tokens)))

    @property
    def hashes(self) -> list[bytes]:
        """Hashes of its pages."""
        return [self.chain[begin : begin + HASH_BYTES] for begin in range(0, len(self.chain), HASH_BYTES)]

    @property
    def tokens(self) -> int:
        """Tokens in whole pages."""
        return len(self.hashes) * PAGE

    @cached_property
    def file_name(self) -> str:
        """Where a folder holds its scores: named by all that they depend on."""
        key = json.dumps([FORMAT, self.model, self.method, self.settings, self.chain[-HASH_BYTES:].hex()])
        return blake2b(key.encode(), digest_size=16).hexdigest() + SUFFIX

    def checksum(self, scores: torch.Tensor) -> str:
        """Of what a file says of it and of its scores, float16."""
        digest = blake2b(digest_size=16)
        for part in (FORMAT, self.model, self.method, self.settings):
            digest.update(f"{len(part)}/{part}".encode())
        digest.update(self.chain)
        digest.update(scores.contiguous().numpy().data)
        return digest.hexdigest()


def write(folder: Path, document: ScoredDocument, scores: torch.Tensor) -> Path:
    """Store scores, [layers, kv_heads, tokens or more], of a document; the file appears when it is whole.

    Raises:
        OSError: the folder cannot be written.
    """
    stored = scores[..., : document.tokens].half().cpu().contiguous()
    metadata = {"format": FORMAT, "model": document.model, "method": document.method, "settings": document.settings}
    metadata["checksum"] = document.checksum(stored)
    hashes = torch.frombuffer(bytearray(document.chain), dtype=torch.uint8).view(-1, HASH_BYTES)
    path = folder / document.file_name
    write_whole(path, save({"scores": stored, "chain": hashes}, metadata))
    return path


@dataclass(frozen=True)
class ScoreFile:
    """A file of scores, of which the header and the hashes were read.

    Attributes:
        path: where it lies.
        document: what it says it is for.
        shape: layers, KV heads and tokens of its scores.
        checksum: what it says its checksum is.
    """

    path: Path
    document: ScoredDocument
    shape: tuple[int, int, int]
    checksum: str

    @classmethod
    def read(cls, path: Path) -> "ScoreFile":
        """Read header and hashes; the scores are not looked at.

        Raises:
            ScoreFileError: it is no such file, or of another version.
        """
        try:
            with safe_open(path, "pt") as opened:
                metadata = opened.metadata() or {}
                found = metadata.get("format")
                if found != FORMAT:
                    raise ScoreFileError(f"{path} has format {found!r}; this version reads {FORMAT!r}: make it again")
                hashes = opened.get_tensor("chain").numpy().tobytes()
                shape = tuple(opened.get_slice("scores").get_shape())
            document = ScoredDocument(metadata["model"], metadata["method"], metadata["settings"], hashes)
            file = cls(path, document, shape, metadata["checksum"])
        except (SafetensorError, OSError, KeyError) as error:
            raise ScoreFileError(f"{path} is no file of scores ({error}): make it again") from error
        if len(shape) != 3 or shape[2] != document.tokens:
            raise ScoreFileError(f"{path} has scores of shape {list(shape)} for {document.tokens} tokens: make it again")
        return file

    def scores(self) -> torch.Tensor:
        """The scores, float16 [layers, kv_heads, tokens], mapped from the file; all of it is read once for the checksum.

        Raises:
            ScoreFileError: the file is gone, or has changed.
        """
        try:
            with safe_open(self.path, "pt") as opened:
                scores = opened.get_tensor("scores")
        except (SafetensorError, OSError) as error:
            raise ScoreFileError(f"{self.path} cannot be read any more ({error}): make it again") from error
        if scores.dtype != torch.float16 or tuple(scores.shape) != self.shape or self.document.checksum(scores) != self.checksum:
            raise ScoreFileError(f"{self.path} has changed since it was written, its checksum differs: make it again")
        return scores
