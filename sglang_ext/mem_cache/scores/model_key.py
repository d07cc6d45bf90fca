"""A key of a model's weights, to tell which scores are its own, without reading all of them."""

import json
from hashlib import blake2b
from pathlib import Path

from sglang_ext.core import OptionError

# The first kind that there is counts.
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
# What is downloaded of a model by name.
NEEDED = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
# Of each file of weights: pieces that are read, evenly spread, and bytes of one. Training changes all weights.
PIECES, PIECE_BYTES = 64, 4096
# What a config says of how it was written, not of the model.
VOLATILE = ("transformers_version", "torch_dtype", "dtype", "use_cache")


def model_key(folder: Path) -> str:
    """32 hexadecimal digits from the config in a model's folder, and from names, sizes and pieces of its files of weights."""
    digest = blake2b(digest_size=16)
    config = json.loads((folder / "config.json").read_text())
    kept = {name: value for name, value in config.items() if not name.startswith("_") and name not in VOLATILE}
    digest.update(json.dumps(kept, sort_keys=True).encode())
    # Of several kinds one: what was downloaded of the others depends on who did it.
    kinds = (sorted(folder.glob(pattern)) for pattern in WEIGHTS)
    for file in next(filter(None, kinds), ()):
        digest.update(f"/{file.name}/{file.stat().st_size}/".encode())
        _add_pieces(digest, file)
    return digest.hexdigest()


def model_folder(model: str, revision: str | None = None, download: bool = False) -> Path:
    """The folder of a model's files.

    Args:
        model: a Hugging Face folder or name.
        revision: of a name; None for its default.
        download: whether files of a name that are not here yet are fetched.

    Raises:
        OptionError: there is no such folder, and no files of that name.
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
