"""Checks of kernels against plain PyTorch: ``kernel_checks.py NAME``; interpreted where there is no GPU."""

import os
import sys

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

from sglang_ext.layers.kernels.gather_kept import gather_kept  # noqa: E402
from sglang_ext.layers.kernels.window_scores import window_scores  # noqa: E402


def pools(layers, slots, heads, dim, seed):
    """Key and value buffers of each layer, and their addresses."""
    noise = torch.Generator().manual_seed(seed)
    buffers = [[torch.randn(slots, heads, dim, generator=noise).to(DEVICE) for _ in range(layers)] for _ in "kv"]
    return [(b, torch.tensor([x.data_ptr() for x in b], device=DEVICE)) for b in buffers]


def check_window_scores():
    """Means of softmax attention, over window sizes, groups and lengths around the kernel's blocks."""
    for window, heads, group, dim, tokens in ((32, 2, 3, 64, 1100), (5, 1, 4, 24, 63), (40, 2, 8, 16, 65), (1, 3, 1, 128, 1)):
        (keys, table), _ = pools(2, tokens + 30, heads, dim, window)
        noise = torch.Generator().manual_seed(1)
        slots = torch.randperm(tokens + 30, generator=noise)[:tokens].to(DEVICE)
        window = min(window, tokens)
        queries = torch.randn(2, window, heads * group, dim, generator=noise).to(DEVICE)
        first = tokens - window
        found = window_scores(queries, table, keys[0], slots, first, 0.3)
        for layer in range(2):
            k = keys[layer][slots].double()
            q = queries[layer].double().view(window, heads, group, dim)
            logits = torch.einsum("whgd,thd->hgwt", q, k) * 0.3
            hidden = torch.arange(tokens, device=DEVICE)[None] > torch.arange(first, tokens, device=DEVICE)[:, None]
            expected = logits.masked_fill(hidden, float("-inf")).softmax(-1).mean((1, 2))
            torch.testing.assert_close(found[layer].double(), expected, rtol=1e-4, atol=1e-7)


def check_gather_kept():
    """Copies land in the right layer, head and slot, and nothing else changes."""
    for layers, heads, dim, count in ((2, 3, 64, 40), (3, 1, 24, 33), (1, 2, 128, 1)):
        (keys, key_table), (values, value_table) = pools(layers, 200, heads, dim, count)
        noise = torch.Generator().manual_seed(2)
        order = torch.randperm(200, generator=noise).to(DEVICE)
        sources, targets = order[:100], order[100 : 100 + count]
        kept = torch.stack([torch.randperm(100, generator=noise)[:count] for _ in range(layers * heads)])
        kept = kept.view(layers, heads, count).to(DEVICE)
        expected = [[b.clone() for b in buffers] for buffers in (keys, values)]
        for kind, buffers in zip(expected, (keys, values)):
            for layer in range(layers):
                for head in range(heads):
                    kind[layer][targets, head] = buffers[layer][sources[kept[layer, head]], head]
        gather_kept(key_table, value_table, keys[0], kept, sources, targets)
        for kind, buffers in zip(expected, (keys, values)):
            for layer in range(layers):
                assert torch.equal(kind[layer], buffers[layer])


if __name__ == "__main__":
    {"window_scores": check_window_scores, "gather_kept": check_gather_kept}[sys.argv[1]]()
