"""Safetensors files that appear whole, with a checksum over tensors and metadata.

All metadata lies under one name, as JSON with sorted keys: of several, safetensors writes them in any order.
"""

import json
import os
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

NAME = "sglang_ext"


class CheckedFileError(ValueError):
    """A file cannot be used: says which, and what is wrong with it."""


def write_checked(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Store ``tensors``, on the CPU; the file takes its name when it is whole.

    Raises:
        OSError: the folder cannot be written.
    """
    stored = {name: tensor.contiguous() for name, tensor in tensors.items()}
    about = {**metadata, "checksum": _checksum(stored, metadata)}
    write_whole(path, save(stored, {NAME: json.dumps(about, sort_keys=True)}))


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that takes its name when it is whole.

    Raises:
        OSError: the folder cannot be written.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read_checked(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors and metadata of a file; all of it is read, for the checksum.

    Raises:
        CheckedFileError: it is gone, cut or changed.
    """
    try:
        with safe_open(path, "pt") as opened:
            metadata = json.loads((opened.metadata() or {}).get(NAME, "{}"))
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckedFileError(f"{path} cannot be read: {error}") from error
    if metadata.pop("checksum", None) != _checksum(tensors, metadata):
        raise CheckedFileError(f"{path} has changed since it was written, its checksum differs")
    return tensors, metadata


def is_whole(path: Path) -> bool:
    """Whether there is such a file, unchanged."""
    try:
        read_checked(path)
    except CheckedFileError:
        return False
    return True


def _checksum(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> str:
    digest = blake2b(digest_size=16)
    for name, text in sorted(metadata.items()):
        digest.update(f"{len(name)}/{len(text)}/{name}{text}".encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{len(name)}/{name}/{tensor.dtype}/{list(tensor.shape)}/".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
