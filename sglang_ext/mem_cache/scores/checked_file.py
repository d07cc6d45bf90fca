"""Safetensors files that are written atomically, with a checksum over tensors and metadata.

All metadata is stored under one name, as JSON with sorted keys, because safetensors writes several entries in any order.
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
    """A file cannot be used. The message has its path and the reason."""


def write_checked(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Store ``tensors``, on the CPU, in a file that appears only when it is complete.

    Raises:
        OSError: The folder cannot be written.
    """
    stored = {name: tensor.contiguous() for name, tensor in tensors.items()}
    about = {**metadata, "checksum": _checksum(stored, metadata)}
    write_whole(path, save(stored, {NAME: json.dumps(about, sort_keys=True)}))


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that appears only when it is complete.

    Raises:
        OSError: The folder cannot be written.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read_checked(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Read a file's tensors and metadata. The whole file is read for the checksum.

    Raises:
        CheckedFileError: The file is missing, truncated or changed.
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
    """Whether the file exists and is unchanged."""
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
