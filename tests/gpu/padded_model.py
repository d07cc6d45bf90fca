"""The demo model with heads of zeros between its own: the same answers, and heads that two ranks can share."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def write(source: Path, target: Path) -> Path:
    """Write the model in ``source`` to ``target``, with twice the heads; the folder."""
    config = json.loads((source / "config.json").read_text())
    names = ("num_attention_heads", "num_key_value_heads", "hidden_size")
    heads, kv_heads, hidden = (config[name] for name in names)
    dim = hidden // heads
    weights = load_file(source / "model.safetensors")
    for name, values in weights.items():
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            groups = values.view(kv_heads, -1, hidden)
            weights[name] = torch.stack([groups, torch.zeros_like(groups)], 1).reshape(-1, hidden).contiguous()
        elif name.endswith("o_proj.weight"):
            groups = values.view(hidden, kv_heads, -1)
            weights[name] = torch.stack([groups, torch.zeros_like(groups)], 2).reshape(hidden, -1).contiguous()
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            shutil.copy(file, target / file.name)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    config |= {"num_attention_heads": 2 * heads, "num_key_value_heads": 2 * kv_heads, "head_dim": dim}
    (target / "config.json").write_text(json.dumps(config))
    return target
