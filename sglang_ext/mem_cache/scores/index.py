"""Finds the stored document that a prompt begins with."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from sglang_ext.mem_cache.scores.score_files import PAGE, SUFFIX, ScoreFile, ScoreFileError, chain

logger = logging.getLogger(__name__)

# Smallest number of common tokens for a match. Fewer may be a chat template alone.
MIN_MATCH = 128


class MappedScores(NamedTuple):
    """A file's scores.

    Attributes:
        state: The file's state when it was mapped: inode, size, modification time; None if it did not exist.
        scores: float16 [layers, kv_heads, tokens], mapped from the file; None if its checksum differed.
    """

    state: tuple[int, ...] | None
    scores: torch.Tensor | None


@dataclass
class ScoreIndex:
    """Scores of a folder that fit a model: a table from each page's hash to its file and the number of tokens up to the page's end."""

    _pages: dict[bytes, tuple[ScoreFile, int]] = field(default_factory=dict)
    _mapped: dict[Path, MappedScores] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, method: str, model: str, layers: int, kv_heads: int) -> "ScoreIndex":
        """Read headers and hashes of all files. Files that do not fit are logged and ignored.

        Args:
            folder: Output folder of ``python -m sglang_ext.precompress``.
            method: Name of the compressor.
            model: The model's key.
            layers, kv_heads: The model's numbers of layers and KV heads.
        """
        index = cls()
        files = sorted(folder.glob(f"*{SUFFIX}"))
        for path in files:
            try:
                index._add(_check_fits(ScoreFile.read(path), method, model, layers, kv_heads))
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
        """Scores, float16 [layers, kv_heads, common tokens], of the document with the longest common prefix with ``tokens``.

        None if it is shorter than :data:`MIN_MATCH`, or if the file has changed, which is logged once. A file is mapped and its checksum
        compared on first use, and again after it was modified, because the mapping of a truncated file must not be read.
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
            mapped = self._mapped[found.path] = MappedScores(state, _checked_scores(found))
        return None if mapped.scores is None else mapped.scores[..., :common]


def _check_fits(file: ScoreFile, method: str, model: str, layers: int, kv_heads: int) -> ScoreFile:
    """Return ``file`` if it has this method, model and shape.

    Raises:
        ScoreFileError: It does not.
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


def _checked_scores(file: ScoreFile) -> torch.Tensor | None:
    try:
        return file.scores()
    except ScoreFileError as error:
        logger.warning("sglang-ext: scores are not used: %s", error)
        return None
