"""Finds the stored document that a prompt begins with."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from sglang_ext.mem_cache.scores.score_files import PAGE, SUFFIX, ScoreFile, ScoreFileError, chain

logger = logging.getLogger(__name__)

# Tokens in common from which on a prompt begins with a document: fewer may be a chat template alone.
MIN_MATCH = 128


class MappedScores(NamedTuple):
    """A file's scores.

    Attributes:
        state: of the file when it was mapped: inode, size, time of its last change; None where it was gone.
        scores: float16 [layers, kv_heads, tokens], mapped from the file; None where its checksum differed.
    """

    state: tuple[int, ...] | None
    scores: torch.Tensor | None


@dataclass
class ScoreIndex:
    """The scores of a folder that fit a model: by the hash of each of their pages, file and tokens up to its end."""

    _pages: dict[bytes, tuple[ScoreFile, int]] = field(default_factory=dict)
    _mapped: dict[Path, MappedScores] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, method: str, model: str, layers: int, kv_heads: int) -> "ScoreIndex":
        """Read headers and hashes of all files; those that do not fit are named in the log and not used.

        Args:
            folder: where ``python -m sglang_ext.precompress`` put them.
            method: name of the compressor.
            model: the model's key.
            layers, kv_heads: of the model.
        """
        index = cls()
        files = sorted(folder.glob(f"*{SUFFIX}"))
        for path in files:
            try:
                index._add(_fitting(ScoreFile.read(path), method, model, layers, kv_heads))
            except ScoreFileError as error:
                logger.warning("sglang-ext: scores are not used: %s", error)
        used = len({file.path for file, _ in index._pages.values()})
        logger.info("sglang-ext: scores of %s documents in %s, %s of them for this model", len(files), folder, used)
        return index

    @property
    def empty(self) -> bool:
        """Whether no file of the folder fits the model."""
        return not self._pages

    def _add(self, file: ScoreFile) -> None:
        for page, digest in enumerate(file.document.hashes, start=1):
            self._pages.setdefault(digest, (file, page * PAGE))

    def match(self, tokens: Sequence[int]) -> torch.Tensor | None:
        """Scores, float16 [layers, kv_heads, common tokens], of the document that has most in common with ``tokens``.

        None where that is less than :data:`MIN_MATCH`, or its file has changed, which the log says once. A file is mapped and
        its checksum compared when it is first needed, and again when it was touched: what a cut file maps must not be read.
        """
        found, common = None, 0
        for digest in chain(tokens):
            if digest not in self._pages:
                break
            found, common = self._pages[digest]
        if found is None or common < MIN_MATCH:
            return None
        mapped, state = self._mapped.get(found.path), _state(found.path)
        if mapped is None or mapped.state != state:
            mapped = self._mapped[found.path] = MappedScores(state, _checked(found))
        return None if mapped.scores is None else mapped.scores[..., :common]


def _fitting(file: ScoreFile, method: str, model: str, layers: int, kv_heads: int) -> ScoreFile:
    """``file``, where it is of this method, model and shape.

    Raises:
        ScoreFileError: it is not.
    """
    for what, found, wanted in (
        ("method", file.document.method, method),
        ("model", file.document.model, model),
        ("layers and KV heads", file.shape[:2], (layers, kv_heads)),
    ):
        if found != wanted:
            raise ScoreFileError(f"{file.path} is for another {what}: {found}, not {wanted}")
    return file


def _state(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _checked(file: ScoreFile) -> torch.Tensor | None:
    try:
        return file.scores()
    except ScoreFileError as error:
        logger.warning("sglang-ext: scores are not used: %s", error)
        return None
