"""The demo model without eighteen of its thirty layers: a server's prefills and steps take two fifths of the time."""

import json
import shutil
from pathlib import Path

from filelock import FileLock
from safetensors.torch import load_file, save_file

# Taken out one by one, each that raised the loss on source code and prose the least: attention to the context stays, as does what copies it.
KEPT = (0, 1, 2, 8, 9, 11, 21, 23, 24, 27, 28, 29)
LAYERS = "model.layers."


def prepare(source: Path, folder: Path) -> Path:
    """Return ``folder``, writing the model in ``source`` there first where it is not there yet; processes that ask at once wait."""
    with FileLock(folder.with_name(folder.name + ".lock")):
        if not (folder / "config.json").exists():
            write(source, folder)
    return folder


def write(source: Path, folder: Path) -> None:
    """Write the model in ``source`` to ``folder`` with :data:`KEPT` of its layers; its configuration last."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            shutil.copy(file, folder / file.name)
    weights = {renamed(name): values for name, values in load_file(source / "model.safetensors").items()}
    weights.pop("")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | {"num_hidden_layers": len(KEPT)}
    (folder / "config.json").write_text(json.dumps(config))


def renamed(name: str) -> str:
    """A weight's name in the model that is left; empty where its layer is not."""
    if not name.startswith(LAYERS):
        return name
    layer, rest = name.removeprefix(LAYERS).split(".", 1)
    return f"{LAYERS}{KEPT.index(int(layer))}.{rest}" if int(layer) in KEPT else ""
