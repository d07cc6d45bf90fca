"""Checks that a model given by path exists. Libraries would otherwise look for the path among the names on the Hub."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_ext.core import OptionError

CONFIGS = ("config.json", "params.json")
"""The second is Mistral's."""


def _is_path(path: Path, model: str) -> bool:
    """Whether it exists, or cannot be a name on the Hub: absolute, or relative to ``.``, ``..`` or ``~``."""
    return path.exists() or path.is_absolute() or model.startswith(("./", "../", "~"))


def find_problem(model: str) -> str | None:
    """Why the path ``model`` contains no model, in one sentence. None if it contains one, or if ``model`` is a name on the Hub."""
    path = Path(model)
    if not _is_path(path, model) and (path.parent == Path(".") or not path.parent.is_dir()):
        return None
    if not path.exists():
        return f"{model}: no such folder"
    if path.is_dir() and not any((path / name).is_file() for name in CONFIGS):
        return f"{model}: this folder has no {CONFIGS[0]}"
    return None


def check_model_folder(model: str) -> None:
    """Refuse a path without a model (``OptionError``), before SGLang queries the Hub for it. A name on the Hub may begin like a folder."""
    found = find_problem(model) if _is_path(Path(model), model) else None
    if found is not None and model.lower() not in ("none", "dummy"):
        raise OptionError(f"--model-path {found}: pass a Hugging Face folder, with its {CONFIGS[0]}, or a name on the Hub")


def unreadable_model(model: str, error: OSError) -> OptionError:
    """Create the error for a model whose config SGLang could not read. ``error`` is that of Hugging Face's library."""
    why = str(error).strip().split("\n")[0].removesuffix(".")
    where = "" if Path(model).exists() else f"there is no such folder in {Path.cwd()}, and as a name on the Hub "
    return OptionError(
        f"--model-path {model}: {where}it cannot be read: {why}. Pass a Hugging Face folder, with its {CONFIGS[0]}, or the name of a model "
        "that the Hub lets you load, for example Qwen/Qwen3-0.6B"
    )


def read_config(folder: Path) -> dict[str, Any]:
    """A model's ``config.json``. Raises ``OptionError`` if the folder has none, or if it is no JSON object."""
    try:
        found = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise OptionError(f"--model {folder} has no config.json that can be read ({error}): pass a Hugging Face folder") from error
    if not isinstance(found, dict):
        raise OptionError(f"--model {folder}: its config.json is no JSON object: pass a Hugging Face folder")
    return found


def kv_shape(config: Mapping[str, Any]) -> tuple[int, int]:
    """KV heads and ``head_dim``, from the values of a ``config.json``."""
    query_heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or query_heads
    return kv_heads, config.get("head_dim") or config["hidden_size"] // query_heads
