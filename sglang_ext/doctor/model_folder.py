"""Whether a model that is named by its path is there: libraries would look for such a path among the names of the Hub."""

from pathlib import Path

CONFIGS = ("config.json", "params.json")
"""The second is Mistral's own."""


def is_path(model: str) -> bool:
    """Whether it can only be a path: absolute, relative to ``.``, ``..`` or ``~``, or in a folder that exists."""
    path = Path(model)
    named = path.is_absolute() or model.startswith(("./", "../", "~"))
    return named or path.exists() or (path.parent != Path(".") and path.parent.is_dir())


def problem(model: str) -> str | None:
    """Why the path ``model`` holds no model, in one sentence; None where it holds one, and of a name on the Hub."""
    path = Path(model)
    if not is_path(model):
        return None
    if not path.exists():
        return f"{model}: no such folder"
    if path.is_dir() and not any((path / name).is_file() for name in CONFIGS):
        return f"{model}: this folder has no {CONFIGS[0]}"
    return None
