"""Files that methods with scores read: the key of a model's weights, checked safetensors files, and KVzap's predictor (arXiv 2601.07891)."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch.nn.functional import gelu, linear

from sglang_ext.core import OptionError

# Patterns of weight files. Only the first one with matches is used.
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
# Files that are downloaded for a model name.
NEEDED = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
# Evenly spread pieces that are read of each weight file, and bytes of a piece. Training changes all weights.
PIECES, PIECE_BYTES = 64, 4096
# Config entries that describe how the config was written, not the model.
VOLATILE = ("transformers_version", "torch_dtype", "dtype", "use_cache")


def model_key(folder: Path) -> str:
    """32 hexadecimal digits from the config in a model's folder, and from names, sizes and pieces of its weight files."""
    digest = blake2b(digest_size=16)
    config = json.loads((folder / "config.json").read_text())
    kept = {name: value for name, value in config.items() if not name.startswith("_") and name not in VOLATILE}
    digest.update(json.dumps(kept, sort_keys=True).encode())
    # Only one kind: which other kinds were downloaded may differ between users.
    kinds = (sorted(folder.glob(pattern)) for pattern in WEIGHTS)
    for file in next(filter(None, kinds), ()):
        digest.update(f"/{file.name}/{file.stat().st_size}/".encode())
        _add_pieces(digest, file)
    return digest.hexdigest()


def model_folder(model: str, revision: str | None = None, download: bool = False) -> Path:
    """The folder of the files of a model, a Hugging Face folder or name. ``download`` allows to download missing files of a name.

    Raises:
        OptionError: There is no such folder, and no files for that name.
    """
    if (Path(model) / "config.json").exists():
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=not download, allow_patterns=NEEDED))
    except (OSError, ValueError) as error:
        raise OptionError(
            f"{model} is no folder with a config.json, and the files of a model of that name are not here: stored scores "
            "belong to a model's files; pass its folder"
        ) from error


def _add_pieces(digest: blake2b, file: Path) -> None:
    last = max(0, file.stat().st_size - PIECE_BYTES)
    with file.open("rb") as weights:
        for piece in range(PIECES):
            weights.seek(last * piece // (PIECES - 1))
            digest.update(weights.read(PIECE_BYTES))


# Name of all metadata of a checked file, JSON with sorted keys: safetensors writes several entries in any order.
NAME = "sglang_ext"


class CheckedFileError(ValueError):
    """A file cannot be used. The message has its path and the reason."""


def write_checked(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Store ``tensors``, on the CPU, and ``metadata`` with a checksum, as :func:`write_whole`."""
    stored = {name: tensor.contiguous() for name, tensor in tensors.items()}
    about = {**metadata, "checksum": _checksum(stored, metadata)}
    write_whole(path, save(stored, {NAME: json.dumps(about, sort_keys=True)}))


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that appears only when it is complete. Raises OSError if the folder cannot be written."""
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


PREDICTOR_FORMAT, PREDICTOR_FILE = "1", "predictor.safetensors"


@dataclass(frozen=True)
class FitRecord:
    """How a predictor was fitted: to the model with a key (:func:`model_key`), on ``texts`` texts, of which ``tokens`` tokens were sampled.

    Attributes:
        settings: Settings of targets and training, as JSON with sorted keys.
        loss: By layer, mean squared error of the logarithm of the score, on held-out texts.
        r2: By layer, explained share of that logarithm's variance on held-out texts, mean over KV heads.
    """

    model: str
    settings: str
    texts: int
    tokens: int
    loss: tuple[float, ...]
    r2: tuple[float, ...]


@dataclass(frozen=True)
class Predictor:
    """Predicts the logarithm of KVzip's score from the hidden states that enter attention.

    Attributes:
        outer: [layers, kv_heads, width], or [layers, kv_heads, hidden_size] without an inner layer.
        outer_bias: [layers, kv_heads].
        inner: [layers, width, hidden_size], followed by GELU; None for a linear predictor.
        inner_bias: [layers, width].
    """

    outer: torch.Tensor
    outer_bias: torch.Tensor
    fitted: FitRecord
    inner: torch.Tensor | None = None
    inner_bias: torch.Tensor | None = None

    @property
    def layers(self) -> int:
        """Number of attention layers of its model."""
        return self.outer.shape[0]

    @property
    def kv_heads(self) -> int:
        """Number of KV heads per layer that it scores."""
        return self.outer.shape[1]

    @property
    def hidden_size(self) -> int:
        """Size of the hidden states that it reads."""
        return (self.outer if self.inner is None else self.inner).shape[-1]

    @property
    def held_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors().values())

    def __call__(self, layer: int, states: torch.Tensor) -> torch.Tensor:
        """Scores of tokens from their hidden states, [tokens, hidden_size]: float32 [tokens, kv_heads]."""
        # The outer layer is in float32: bfloat16 cannot distinguish scores that differ by less than half a percent.
        if self.inner is not None:
            states = gelu(linear(states.to(self.inner.dtype), self.inner[layer], self.inner_bias[layer]))
        return linear(states.float(), self.outer[layer], self.outer_bias[layer])

    def of_heads(self, first: int, count: int) -> "Predictor":
        """The predictor for ``count`` KV heads from ``first`` on."""
        heads = slice(first, first + count)
        return replace(self, outer=self.outer[:, heads].contiguous(), outer_bias=self.outer_bias[:, heads].contiguous())

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "Predictor":
        """The predictor on a device, with the inner layer in ``dtype``."""
        inner = [tensor if tensor is None else tensor.to(device, dtype) for tensor in (self.inner, self.inner_bias)]
        return Predictor(self.outer.to(device), self.outer_bias.to(device), self.fitted, *inner)

    def _tensors(self) -> dict[str, torch.Tensor]:
        tensors = {"outer": self.outer, "outer_bias": self.outer_bias, "inner": self.inner, "inner_bias": self.inner_bias}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def write(self, folder: Path) -> Path:
        """Store the predictor, as :func:`write_whole`. Returns the file's path."""
        fitted = json.dumps(asdict(self.fitted), sort_keys=True)
        write_checked(folder / PREDICTOR_FILE, self._tensors(), {"format": PREDICTOR_FORMAT, "fitted": fitted})
        return folder / PREDICTOR_FILE

    @classmethod
    def read(cls, folder: Path, model: str) -> "Predictor":
        """Read the predictor in ``folder`` for the model with this key.

        Raises:
            OptionError: There is none, it has changed, or it belongs to another model or version.
        """
        try:
            tensors, metadata = read_checked(folder / PREDICTOR_FILE)
        except CheckedFileError as error:
            raise _refused(folder, str(error)) from error
        if metadata.get("format") != PREDICTOR_FORMAT:
            raise _refused(folder, f"it has format {metadata.get('format')!r}, this version reads {PREDICTOR_FORMAT!r}")
        fitted = json.loads(metadata["fitted"])
        found = cls(**tensors, fitted=FitRecord(**{**fitted, "loss": tuple(fitted["loss"]), "r2": tuple(fitted["r2"])}))
        if found.fitted.model != model:
            raise _refused(folder, f"it was fitted to another model: {found.fitted.model}, not {model}")
        return found


def _refused(folder: Path, reason: str) -> OptionError:
    return OptionError(
        f"--kv-predictor is {str(folder)!r}, which has no predictor for this model: {reason}; make it with "
        "python -m sglang_ext.fit kvzap --model MODEL --out FOLDER TEXTS"
    )
