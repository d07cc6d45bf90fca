"""Keys of all slots of the KV pool in 8 or 4 bits, used for scoring only (``--kv-score-bits``).

Each forward quantizes the keys that it wrote, in all layers at once, after its last layer has attended. This happens in the same CUDA
graph, on the model's stream, for the same slots, whichever request computes them. A prefix hit therefore finds the codes. A slot that is
used again gets new codes. The codes of a draft token's exact key replace those of its draft key. No record is needed of how far a
request's keys are quantized.

A selection on a second stream waits for the forward before it, and reads slots of tokens that no forward writes. The cost is one launch
per step, and a share of the keys' bytes in prefill. Keys loaded from host memory are quantized when the prefix tree inserts them. Keys
from another server would have no codes, so the combination is refused (config/selection_options.py).
"""

from collections.abc import Sequence

import torch

from sglang_ext.mem_cache.compressed.key_derived_data import KeyDerivedData
from sglang_ext.mem_cache.selection.scoring_keys import QuantizedKeys, KeyQuantizer, KeySpec


class SlotCodes(KeyDerivedData):
    """Codes of all slots.

    Args:
        keys: Keys of the pool's attention layers, [slots, kv_heads, head_dim] each.
        layer_ids: Index of each layer in the model.
        bits: 8 or 4.

    Attributes:
        held: The codes, indexed by slot.
    """

    def __init__(self, keys: Sequence[torch.Tensor], layer_ids: Sequence[int], bits: int):
        super().__init__(layer_ids)
        (slots, heads, dim), device = keys[0].shape, keys[0].device
        self.held = QuantizedKeys(KeySpec(len(keys), heads, dim, keys[0].dtype, bits), slots, device)
        self._coder = KeyQuantizer(keys, self.held)
        self.compile_kernels(device)

    def write(self, slots: torch.Tensor) -> None:
        """Quantize the keys of the slots, as :meth:`KeyDerivedData.write`."""
        self._coder.code(slots)
