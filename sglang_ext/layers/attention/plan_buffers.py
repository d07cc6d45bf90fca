"""Memory for FlashInfer's plans of captured steps, several in turn.

FlashInfer writes the plan of a step to pinned memory, from where the device takes it when it gets to that step; it has
one such memory for each graph. Whoever launches a step before the device began the last one must wait, or would
overwrite its plan. With several memories the host may be that many steps ahead.
"""

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

# Steps that may be launched before the device begins the first of them: more than the host's work between two rounds.
AHEAD = 4


class PlanBuffers:
    """The memories of a backend's decode graphs.

    Args:
        wrappers: FlashInfer's, of all graphs; they are planned one at a time.
        count: memories.
    """

    def __init__(self, wrappers: list, count: int = AHEAD):
        self._wrappers = wrappers
        first = wrappers[0]._pin_memory_int_workspace_buffer
        self._buffers = [first, *(torch.empty_like(first, pin_memory=first.is_pinned()) for _ in range(count - 1))]
        self._taken: list[torch.cuda.Event | None] = [None] * count
        self._turn = 0

    @classmethod
    def of(cls, backend: AttentionBackend) -> "PlanBuffers | None":
        """Those of the graphs that SGLang captured with ``backend``; None for one without plans on the host."""
        # With different backends for prefill and decode, SGLang's is one of both.
        decode = getattr(backend, "decode_backend", backend)
        graphs = getattr(decode, "decode_cuda_graph_metadata", None)
        # Backends that plan on the device keep something else under this name.
        by_batch = graphs.values() if isinstance(graphs, dict) else ()
        wrappers = [wrapper for of_batch in by_batch if isinstance(of_batch, list) for wrapper in of_batch]
        return cls(wrappers) if wrappers else None

    def next(self) -> None:
        """The next plan is written to the memory that was used longest ago, once the device took what it held."""
        self._turn = (self._turn + 1) % len(self._buffers)
        taken = self._taken[self._turn]
        if taken is not None:
            taken.synchronize()
        for wrapper in self._wrappers:
            wrapper._pin_memory_int_workspace_buffer = self._buffers[self._turn]

    def written(self, taken: torch.cuda.Event | None) -> None:
        """A plan was written; ``taken`` is set when the device has it."""
        self._taken[self._turn] = taken
