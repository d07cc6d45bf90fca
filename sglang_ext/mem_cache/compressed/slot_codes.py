"""Keys of all slots of the KV pool in 8 or 4 bits, for scoring alone (``--kv-score-bits``).

A slot's codes are those of the key that is in it. Each forward codes the keys that it wrote, in all layers at once, when its last layer
has attended: in the same CUDA graph, on the stream of the model, to the same slots, whatever request computes them. So a prefix hit finds
them, slots that are used again are coded again, a draft's exact key replaces the codes of the draft's, and nobody has to remember how far
a request's keys are coded. A choice on a second stream waits for the forward before it, and reads slots of tokens that no forward
writes. One launch a step, and a share of the keys' bytes where a prompt is computed. Keys that come back from host memory are coded as the
prefix tree takes them in; those that come from another server would have no codes, and are refused (config/selection_options.py).
"""

from collections.abc import Sequence

import torch

from sglang_ext.mem_cache.compressed.key_sidecar import KeySidecar
from sglang_ext.mem_cache.selection.scoring_keys import QuantizedKeys, KeyQuantizer, KeySpec


class SlotCodes(KeySidecar):
    """Codes of all slots.

    Args:
        keys: of all attention layers of the pool, [slots, kv_heads, head_dim] each.
        layer_ids: index of each layer in the model.
        bits: 8 or 4.

    Attributes:
        held: the codes; a place is a slot.
    """

    def __init__(self, keys: Sequence[torch.Tensor], layer_ids: Sequence[int], bits: int):
        super().__init__(layer_ids)
        (slots, heads, dim), device = keys[0].shape, keys[0].device
        self.held = QuantizedKeys(KeySpec(len(keys), heads, dim, keys[0].dtype, bits), slots, device)
        self._coder = KeyQuantizer(keys, self.held)
        self.compile_kernels(device)

    def write(self, slots: torch.Tensor) -> None:
        """As :meth:`KeySidecar.write`: code the keys."""
        self._coder.code(slots)
