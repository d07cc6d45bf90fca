"""Moves FlashInfer's plans to unpinned memory, so that the host may overwrite a plan at once.

FlashInfer plans a forward on the host: which blocks of a kernel read which part of the KV of which request. It writes the plan to pinned
memory. The device copies it from there when it reaches that forward. If the host is a forward ahead by then, it has overwritten the
plan, and the kernels read parts of KV that do not exist. They run for half a minute and fail with an illegal memory access. SGLang's
scheduler is one forward ahead of the device; a decode round (managers/spec_decode/decode_loop.py) is many forwards ahead.

From unpinned memory, CUDA copies before the call returns (CUDA Runtime API, "API synchronization behavior").
"""

from collections.abc import Iterator

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

# FlashInfer's name of the plan's memory, in all of its wrappers.
PLAN = "_pin_memory_int_workspace_buffer"


def unpin(backend: AttentionBackend) -> int:
    """Let FlashInfer write the plans of ``backend`` to unpinned memory. Returns the number of changed wrappers.

    Call this after the graphs of the backend are captured: each graph has a wrapper of its own.
    """
    wrappers = list(_planned(backend, set()))
    for wrapper in wrappers:
        setattr(wrapper, PLAN, torch.empty_like(getattr(wrapper, PLAN), pin_memory=False))
    return len(wrappers)


def _planned(value: object, seen: set[int]) -> Iterator[object]:
    """FlashInfer's wrappers in a backend, in its nested backends, and in its lists and dictionaries."""
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
