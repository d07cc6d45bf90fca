"""KVzip (Kim et al. 2025, arXiv 2505.23416) keeps the tokens that the model needs to repeat the context.

KVzap predicts KVzip's scores.

KVzip's scores of a document are computed before, and stored in a safetensors file, which is written atomically, with a checksum. It has
``scores``, float16 [layers, kv_heads, tokens], and ``chain``, uint8 [pages, 16], which identifies its tokens. Its header has the format's
version, the model's key, the method, the method's settings and a checksum of everything. An index finds the document that a prompt
begins with.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from sglang_ext.device import sent
from sglang_ext.mem_cache.compressed.layouts.block_layout import prefix_hashes
from sglang_ext.mem_cache.compressed.slot_scores import SlotScores
from sglang_ext.mem_cache.compressors.attention_scores import SnapKV
from sglang_ext.mem_cache.compressors.compressor import Always, Compressor, ContextKV, LayerKV, Part, RequiredFolder
from sglang_ext.mem_cache.compressors.registry import register
from sglang_ext.mem_cache.scores import write_whole

logger = logging.getLogger(__name__)

# Tokens of a page. A document's scores end at its last whole page.
PAGE = 16
# Bytes of a hash.
HASH_BYTES = 16
FORMAT = "1"
SUFFIX = ".safetensors"
# Minimum common tokens for a match. Fewer may be a chat template alone.
MIN_MATCH = 128


def document_hashes(tokens: Sequence[int]) -> Iterator[bytes]:
    """Yield the hashes of the whole pages of ``tokens``, in order, lazily. Each hash covers all tokens before the page's end."""
    return prefix_hashes(np.asarray(tokens[end - PAGE : end], dtype="<i8").tobytes() for end in range(PAGE, len(tokens) + 1, PAGE))


class ScoreFileError(ValueError):
    """A file of scores cannot be used. The message has its path and the reason."""


@dataclass(frozen=True)
class ScoredDocument:
    """Identity of scores: the tokens of a document, up to its last whole page, and how they were scored.

    ``model`` is the model's key (scores.py), ``settings`` those of the compressor ``method``, as JSON with sorted keys. ``chain`` are the
    concatenated hashes of the document's pages.
    """

    model: str
    method: str
    settings: str
    chain: bytes

    @classmethod
    def from_tokens(cls, tokens: list[int], model: str, method: str, settings: dict[str, object]) -> "ScoredDocument":
        return cls(model, method, json.dumps(settings, sort_keys=True), b"".join(document_hashes(tokens)))

    @property
    def hashes(self) -> list[bytes]:
        """Hashes of its pages."""
        return [self.chain[begin : begin + HASH_BYTES] for begin in range(0, len(self.chain), HASH_BYTES)]

    @property
    def tokens(self) -> int:
        """Number of tokens in whole pages."""
        return len(self.hashes) * PAGE

    @property
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


def write_scores(folder: Path, document: ScoredDocument, scores: torch.Tensor) -> Path:
    """Store scores, [layers, kv_heads, tokens or more], of a document, as :func:`write_whole`. Returns the file's path."""
    stored = scores[..., : document.tokens].half().cpu().contiguous()
    metadata = {"format": FORMAT, "model": document.model, "method": document.method, "settings": document.settings}
    metadata["checksum"] = document.checksum(stored)
    hashes = torch.frombuffer(bytearray(document.chain), dtype=torch.uint8).view(-1, HASH_BYTES)
    path = folder / document.file_name
    write_whole(path, save({"scores": stored, "chain": hashes}, metadata))
    return path


@dataclass(frozen=True)
class ScoreFile:
    """A file of scores, of which the header and the hashes were read. ``shape``: layers, KV heads and tokens of its scores."""

    path: Path
    document: ScoredDocument
    shape: tuple[int, int, int]
    checksum: str

    @classmethod
    def read(cls, path: Path) -> "ScoreFile":
        """Read header and hashes, without the scores. Raises ScoreFileError for another file or version."""
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
        """The scores, float16 [layers, kv_heads, tokens], mapped from the file, which is read once for the checksum.

        Raises ScoreFileError if the file is missing or has changed.
        """
        try:
            with safe_open(self.path, "pt") as opened:
                scores = opened.get_tensor("scores")
        except (SafetensorError, OSError) as error:
            raise ScoreFileError(f"{self.path} cannot be read any more ({error}): make it again") from error
        if scores.dtype != torch.float16 or tuple(scores.shape) != self.shape or self.document.checksum(scores) != self.checksum:
            raise ScoreFileError(f"{self.path} has changed since it was written, its checksum differs: make it again")
        return scores


@dataclass
class ScoreIndex:
    """Scores of a folder that fit a model: a table from each page's hash to its file and the number of tokens up to the page's end.

    Each used file is mapped with its state at that time (:func:`_state`), and no scores if its checksum differed.
    """

    _pages: dict[bytes, tuple[ScoreFile, int]] = field(default_factory=dict)
    _mapped: dict[Path, tuple[tuple[int, ...] | None, torch.Tensor | None]] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, method: str, model: str, layers: int, kv_heads: int) -> "ScoreIndex":
        """Read headers and hashes of all files in the output folder of ``python -m sglang_ext.precompress``.

        Files for another method, another model's key, or other numbers of layers and KV heads are logged and ignored.
        """
        index = cls()
        files = sorted(folder.glob(f"*{SUFFIX}"))
        for path in files:
            try:
                file = ScoreFile.read(path)
                for what, found, wanted in (
                    ("method", file.document.method, method),
                    ("model", file.document.model, model),
                    ("layers and KV heads", file.shape[:2], (layers, kv_heads)),
                ):
                    if found != wanted:
                        raise ScoreFileError(f"{path} is for another {what}: {found}, not {wanted}")
            except ScoreFileError as error:
                logger.warning("sglang-ext: scores are not used: %s", error)
                continue
            for page, digest in enumerate(file.document.hashes, start=1):
                index._pages.setdefault(digest, (file, page * PAGE))
        used = len({file.path for file, _ in index._pages.values()})
        logger.info("sglang-ext: scores of %s documents in %s, %s of them for this model", len(files), folder, used)
        return index

    @property
    def empty(self) -> bool:
        """Whether no file of the folder fits the model."""
        return not self._pages

    def match(self, tokens: Sequence[int]) -> torch.Tensor | None:
        """Scores, float16 [layers, kv_heads, common tokens], of the document with the longest common prefix with ``tokens``.

        None if it is shorter than :data:`MIN_MATCH`, or if the file has changed, which is logged once. A modified file is mapped and checked
        again, because the mapping of a truncated file must not be read.
        """
        found, common = None, 0
        for digest in document_hashes(tokens):
            if digest not in self._pages:
                break
            found, common = self._pages[digest]
        if found is None or common < MIN_MATCH:
            return None
        state = _state(found.path)
        if found.path not in self._mapped or self._mapped[found.path][0] != state:
            try:
                self._mapped[found.path] = state, found.scores()
            except ScoreFileError as error:
                logger.warning("sglang-ext: scores are not used: %s", error)
                self._mapped[found.path] = state, None
        scores = self._mapped[found.path][1]
        return None if scores is None else scores[..., :common]


def _state(path: Path) -> tuple[int, ...] | None:
    """Inode, size and modification time of a file; None if it does not exist."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


class KVzipScores(Compressor):
    """KVzip's scores, exact or predicted. An ``online`` method scores contexts without them; None if all have them."""

    online: Compressor | None
    comparable: ClassVar[bool] = True
    better_uneven: ClassVar[bool] = True

    @property
    def window(self) -> int:
        return 0 if self.online is None else self.online.window

    @property
    def needs_rotary(self) -> bool:
        return self.online is not None and self.online.needs_rotary


@register("kvzip")
@dataclass(frozen=True)
class KVzip(KVzipScores):
    """Scores of documents come from files (``python -m sglang_ext.precompress``), all others from an online method.

    Attributes:
        online: Scores contexts that begin with no stored document, and the tokens after a document.
        index: The stored documents; None for none.
        heads: The KV heads of this tensor-parallel rank, among all KV heads.
    """

    online: Compressor = SnapKV()
    index: ScoreIndex | None = None
    heads: slice = field(default_factory=lambda: slice(None))
    reads: ClassVar[RequiredFolder] = RequiredFolder("--kv-scores", "reads scores that were computed ahead", "sglang_ext.precompress")

    def for_context(self, context: ContextKV) -> Compressor:
        """Return the stored scores if the context begins with a document, otherwise the online method."""
        found = None if self.index is None else self.index.match(context.prompt[: len(context.slots)])
        return self.online if found is None else StoredScores(found[:, self.heads], self.online)

    def always(self, context: ContextKV) -> Always:
        return self.online.always(context)

    def scores(self, layer: LayerKV) -> torch.Tensor:
        return self.online.scores(layer)


@dataclass(frozen=True)
class StoredScores(Compressor):
    """A context that begins with a document, whose ``stored`` scores are float16 [layers, kv_heads, tokens], on the host.

    ``online`` scores the tokens after it. Scores of the two methods do not compare, so each ranks its own tokens and gets a share of the
    budget. It first gets its always-kept tokens (infinite scores: first tokens, the observation window). The rest is shared in proportion to
    the remaining tokens.
    """

    stored: torch.Tensor
    online: Compressor
    name = KVzip.name
    comparable: ClassVar[bool] = True

    def scores(self, layer: LayerKV) -> torch.Tensor:
        return self._joined(self.stored[layer.layer_id], self.online.scores(layer))

    def scores_all(self, context: ContextKV) -> torch.Tensor:
        if self.stored.shape[-1] == len(context.slots):
            return sent(self.stored, context.slots.device).float()
        return self._joined(self.stored, self.online.scores_all(context))

    def _joined(self, stored: torch.Tensor, online: torch.Tensor) -> torch.Tensor:
        return torch.cat([sent(stored, online.device).float(), online[..., stored.shape[-1] :]], dim=-1)

    def cuts(self, context: ContextKV, part: Part) -> list[Part]:
        """Split ``part`` at the end of the document."""
        border = self.stored.shape[-1]
        if not part.start < border < part.end:
            return [part]
        sizes = border - part.start, part.end - border
        # One number for all heads, because they keep equally many tokens.
        first = int(self.stored[..., part.start :].isinf().sum(dim=-1).max())
        second = self.online.always(context).among(border, part.end, len(context.slots))
        left = sizes[0] - first, sizes[1] - second
        share = first + round((part.count - first - second) * left[0] / max(1, sum(left)))
        count = min(max(share, part.count - sizes[1], 0), sizes[0], part.count)
        return [Part(part.start, border, count), Part(border, part.end, part.count - count)]


@register("kvzap")
@dataclass(frozen=True)
class KVzap(KVzipScores):
    """KVzap (Jegou and Jeblick 2026, arXiv 2601.07891): a small network predicts which tokens KVzip would keep.

    Scores are predicted when the KV is computed (``python -m sglang_ext.fit kvzap``), and stored by slot.

    Attributes:
        slots: The scores; None without a predictor.
        online: Compressor for contexts with unknown scores, whose KV came from host memory; None if no KV comes from there.
        sinks: First tokens, always kept. KVzip does not score them.
        recent: Newest tokens, always kept. The paper keeps 128 of a whole cache; here the tokens after the compressed KV are exact.
    """

    slots: SlotScores | None = None
    online: Compressor | None = SnapKV()
    sinks: int = 4
    recent: int = 32
    reads: ClassVar[RequiredFolder] = RequiredFolder("--kv-predictor", "needs a network fitted to the model", "sglang_ext.fit kvzap")

    @property
    def held_bytes(self) -> int:
        return 0 if self.slots is None else self.slots.held_bytes

    def for_context(self, context: ContextKV) -> Compressor:
        """The online method if a score is unknown."""
        return self if self.online is None or (self.slots is not None and self.slots.has_scores(context.slots)) else self.online

    def always(self, context: ContextKV) -> Always:
        """The first tokens. The newest ones are not infinite; they only score far above all others."""
        if self.slots is None and self.online is not None:
            return self.online.always(context)
        return Always(self.sinks)

    def scores(self, layer: LayerKV) -> torch.Tensor:
        """Scores of the online method, because a layer's KV alone does not identify its slots. Raises ValueError without one."""
        if self.online is None:
            raise ValueError("kvzap scores contexts by their slots: call scores_all, or give it an online method")
        return self.online.scores(layer)

    def scores_all(self, context: ContextKV) -> torch.Tensor:
        """Predicted scores: float32 [layers, kv_heads, tokens], infinite for the first tokens, far above all others for the newest."""
        if self.slots is None:
            return super().scores_all(context)
        scores = self.slots.read(context.slots)
        tokens = scores.shape[-1]
        recent = min(self.recent, tokens)
        # Newer tokens score higher, since a part's count may be too small for all of them.
        scores[..., tokens - recent :] = 1e6 + torch.arange(recent, device=scores.device)
        scores[..., : self.sinks] = float("inf")
        return scores
