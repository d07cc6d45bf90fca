"""A key of a model's weights, to tell which scores are its own, without reading all of them."""

import json
from hashlib import blake2b
from pathlib import Path

from sglang_ext.options import OptionError

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
# Of each file of weights: pieces that are read, evenly spread, and bytes of one. Training changes all weights.
PIECES, PIECE_BYTES = 64, 4096
# What a config says of how it was written, not of the model.
VOLATILE = ("transformers_version", "torch_dtype", "dtype", "use_cache")


def model_key(model: str, revision: str | None = None) -> str:
    """32 hexadecimal digits from a model's config, and from names, sizes and pieces of its files of weights.

    Args:
        model: a Hugging Face folder, or a name whose files were downloaded before.
        revision: of a name; None for its default.

    Raises:
        OptionError: there is no such folder, and no files of that name.
    """
    folder = _folder(model, revision)
    digest = blake2b(digest_size=16)
    config = json.loads((folder / "config.json").read_text())
    kept = {name: value for name, value in config.items() if not name.startswith("_") and name not in VOLATILE}
    digest.update(json.dumps(kept, sort_keys=True).encode())
    for file in sorted(file for pattern in WEIGHTS for file in folder.glob(pattern)):
        digest.update(f"/{file.name}/{file.stat().st_size}/".encode())
        _add_pieces(digest, file)
    return digest.hexdigest()


def _add_pieces(digest: blake2b, file: Path) -> None:
    last = max(0, file.stat().st_size - PIECE_BYTES)
    with file.open("rb") as weights:
        for piece in range(PIECES):
            weights.seek(last * piece // (PIECES - 1))
            digest.update(weights.read(PIECE_BYTES))


def _folder(model: str, revision: str | None) -> Path:
    if (Path(model) / "config.json").exists():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError) as error:
        raise OptionError(
            f"--model-path {model} is no folder with a config.json, and no model of that name was downloaded: stored scores "
            "belong to a model's files; pass its folder"
        ) from error
