"""Memory of FlashInfer's plans that the host may write again at once.

FlashInfer plans a forward on the host: which blocks of a kernel read which part of whose KV. It writes the plan to
pinned memory, from where the device takes it when it gets to that forward. A host that is a forward further by then has
written the next plan over it, and the kernels read parts of KV that do not exist: they run for half a minute and end in
an illegal memory access. SGLang's scheduler is one forward ahead of the device, a round (managers/spec_decode/decode_loop.py) many.
CUDA copies from memory that is not pinned before the call returns (CUDA Runtime API, "API synchronization behavior").
"""

from collections.abc import Iterator

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

# FlashInfer's name for it, in all of its wrappers.
PLAN = "_pin_memory_int_workspace_buffer"


def unpin(backend: AttentionBackend) -> int:
    """Let FlashInfer write the plans of ``backend`` to memory that is not pinned; of how many wrappers.

    To be called once its graphs are captured: each graph has a wrapper of its own.
    """
    wrappers = list(_planned(backend, set()))
    for wrapper in wrappers:
        setattr(wrapper, PLAN, torch.empty_like(getattr(wrapper, PLAN), pin_memory=False))
    return len(wrappers)


def _planned(value: object, seen: set[int]) -> Iterator[object]:
    """FlashInfer's wrappers in a backend, in those that it is made of, in its lists and dictionaries."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if hasattr(value, PLAN):
        yield value
        return
    inner = ()
    if isinstance(value, AttentionBackend):
        inner = vars(value).values()
    elif isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, list | tuple):
        inner = value
    for part in inner:
        yield from _planned(part, seen)
