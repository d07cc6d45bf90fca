"""The demo model with eight of its thirty layers and a third of its vocabulary: a server's prefills and steps take a quarter of the time."""

import json
import shutil
from pathlib import Path

from filelock import FileLock
from safetensors.torch import load_file, save_file

# The others were removed one by one, each time the one whose removal raised the loss on source code and prose the least. It is no good
# model, but answers depend on the context: half of its greedy tokens change where only the last 50 tokens are seen.
KEPT = (0, 1, 8, 11, 21, 24, 27, 29)
# Tokens. A BPE tokenizer numbers its tokens in the order of its merges, so the first tokens and their merges are a tokenizer too. Three
# ranks divide them, and SGLang pads them to a multiple of 64.
VOCABULARY = 64 * 3 * 85
LAYERS = "model.layers."
EMBEDDINGS = "model.embed_tokens.weight"


def prepare(source: Path) -> Path:
    """Return the folder of the small model of the model in ``source``, beside it. Write it first if it is missing; other processes wait."""
    folder = source.with_name(f"{source.name}-{len(KEPT)}-layers-{VOCABULARY}-tokens")
    with FileLock(folder.with_name(folder.name + ".lock")):
        if not (folder / "config.json").exists():
            write(source, folder)
    return folder


def write(source: Path, folder: Path) -> None:
    """Write the small model to ``folder``; its configuration last."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.name not in ("config.json", "model.safetensors", "tokenizer.json"):
            shutil.copy(file, folder / file.name)
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    model = tokenizer["model"]
    model["vocab"] = {token: number for token, number in model["vocab"].items() if number < VOCABULARY}
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in model["vocab"]]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    weights = {rename(name): values for name, values in load_file(source / "model.safetensors").items()}
    weights.pop("")
    weights[EMBEDDINGS] = weights[EMBEDDINGS][:VOCABULARY].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | {"num_hidden_layers": len(KEPT), "vocab_size": VOCABULARY}
    (folder / "config.json").write_text(json.dumps(config))


def rename(name: str) -> str:
    """The name of a weight in the small model; empty for a layer that is removed."""
    if not name.startswith(LAYERS):
        return name
    layer, rest = name.removeprefix(LAYERS).split(".", 1)
    return f"{LAYERS}{KEPT.index(int(layer))}.{rest}" if int(layer) in KEPT else ""
