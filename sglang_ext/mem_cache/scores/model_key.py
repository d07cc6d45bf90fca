"""A key of a model's weights that identifies matching scores, computed without reading all weights."""

import json
from hashlib import blake2b
from pathlib import Path

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
    """The folder of a model's files.

    Args:
        model: A Hugging Face folder or name.
        revision: Revision of a name; None for the default.
        download: Whether to download missing files of a name.

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
