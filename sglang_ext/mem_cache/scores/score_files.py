"""Files of a document's scores: safetensors files that are written atomically, with a checksum and a key.

A file has ``scores``, float16 [layers, kv_heads, tokens], and ``chain``, uint8 [pages, 16], which identifies its tokens. Its header has
the format's version, the model's key, the method, the method's settings and a checksum of everything.
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

# Tokens of a page. A document's scores end at its last whole page.
PAGE = 16
# Bytes of a hash.
HASH_BYTES = 16


def chain(tokens: Sequence[int]) -> Iterator[bytes]:
    """Yield the hashes of the whole pages of ``tokens``, in order, lazily. Each hash covers all tokens before the page's end."""
    digest = b""
    for end in range(PAGE, len(tokens) + 1, PAGE):
        page = np.asarray(tokens[end - PAGE : end], dtype="<i8")
        digest = blake2b(digest + page.tobytes(), digest_size=HASH_BYTES).digest()
        yield digest


FORMAT = "1"
SUFFIX = ".safetensors"


class ScoreFileError(ValueError):
    """A file of scores cannot be used. The message has its path and the reason."""


@dataclass(frozen=True)
class ScoredDocument:
    """Identity of scores: the tokens of a document, up to its last whole page, and how they were scored.

    Attributes:
        model: The model's key (model_key.py).
        method: Name of the compressor.
        settings: Settings of the method, as JSON with sorted keys.
        chain: Concatenated hashes of the pages of its tokens.
    """

    model: str
    method: str
    settings: str
    chain: bytes

    @classmethod
    def from_tokens(cls, tokens: list[int], model: str, method: str, settings: dict[str, object]) -> "ScoredDocument":
        """Create the identity for the document of ``tokens``."""
        return cls(model, method, json.dumps(settings, sort_keys=True), b"".join(chain(tokens)))

    @property
    def hashes(self) -> list[bytes]:
        """Hashes of its pages."""
        return [self.chain[begin : begin + HASH_BYTES] for begin in range(0, len(self.chain), HASH_BYTES)]

    @property
    def tokens(self) -> int:
        """Number of tokens in whole pages."""
        return len(self.hashes) * PAGE

    @cached_property
    def file_name(self) -> str:
        """Name of the file in a score folder, which depends on the whole identity."""
        key = json.dumps([FORMAT, self.model, self.method, self.settings, self.chain[-HASH_BYTES:].hex()])
        return blake2b(key.encode(), digest_size=16).hexdigest() + SUFFIX

    def checksum(self, scores: torch.Tensor) -> str:
        """Checksum of this identity and of the scores, float16."""
        digest = blake2b(digest_size=16)
        for part in (FORMAT, self.model, self.method, self.settings):
            digest.update(f"{len(part)}/{part}".encode())
        digest.update(self.chain)
        digest.update(scores.contiguous().numpy().data)
        return digest.hexdigest()


def write(folder: Path, document: ScoredDocument, scores: torch.Tensor) -> Path:
    """Store scores, [layers, kv_heads, tokens or more], of a document. The file appears only when it is complete.

    Raises:
        OSError: The folder cannot be written.
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
    """A file of scores. Only its header and hashes were read.

    Attributes:
        path: Path of the file.
        document: The document in its header.
        shape: Layers, KV heads and tokens of its scores.
        checksum: The checksum in its header.
    """

    path: Path
    document: ScoredDocument
    shape: tuple[int, int, int]
    checksum: str

    @classmethod
    def read(cls, path: Path) -> "ScoreFile":
        """Read header and hashes, without the scores.

        Raises:
            ScoreFileError: It is not a file of scores, or of another version.
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
            raise ScoreFileError(f"{path} is not a file of scores ({error}): make it again") from error
        if len(shape) != 3 or shape[2] != document.tokens:
            raise ScoreFileError(f"{path} has scores of shape {list(shape)} for {document.tokens} tokens: make it again")
        return file

    def scores(self) -> torch.Tensor:
        """The scores, float16 [layers, kv_heads, tokens], mapped from the file. The whole file is read once for the checksum.

        Raises:
            ScoreFileError: The file is missing or has changed.
        """
        try:
            with safe_open(self.path, "pt") as opened:
                scores = opened.get_tensor("scores")
        except (SafetensorError, OSError) as error:
            raise ScoreFileError(f"{self.path} cannot be read any more ({error}): make it again") from error
        if scores.dtype != torch.float16 or tuple(scores.shape) != self.shape or self.document.checksum(scores) != self.checksum:
            raise ScoreFileError(f"{self.path} has changed since it was written, its checksum differs: make it again")
        return scores
