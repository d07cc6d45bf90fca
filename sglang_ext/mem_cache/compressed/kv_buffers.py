"""The layers of SGLang's KV pool: their buffers, and their addresses for kernels over all layers."""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from sglang_ext.device import to_device

if TYPE_CHECKING:
    from sglang_ext.mem_cache.compressed.row_exchange import NewestRows
    from sglang_ext.mem_cache.selection.scoring_keys import QuantizedKeys


@dataclass(frozen=True)
class KVBuffers:
    """Key and value buffers of all attention layers, in the same order.

    Attributes:
        layer_ids: Index of each layer in the model.
        scaling: Factor on query-key products of each layer.
        keys, values: One tensor per layer, [slots, kv_heads, head_dim].
        first_head: Index of the first KV head in the model that the buffers hold.
        codes: Quantized keys of all layers and slots, for scoring; None if the keys themselves are scored.
    """

    layer_ids: tuple[int, ...]
    scaling: tuple[float, ...]
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    first_head: int = 0
    codes: "QuantizedKeys | None" = None

    @classmethod
    def from_pool(cls, pool, scaling: dict[int, float], first_head: int = 0) -> "KVBuffers":
        """The buffers of SGLang's ``pool``. ``scaling`` is by index of the attention layer, ``first_head`` is this rank's."""
        keys, values = (tuple(map(get, scaling)) for get in (pool.get_key_buffer, pool.get_value_buffer))
        return cls(tuple(scaling), tuple(scaling.values()), keys, values, first_head)

    def of_layers(self, layers: slice) -> "KVBuffers":
        """The buffers of some layers, by their index here; without codes."""
        return KVBuffers(self.layer_ids[layers], self.scaling[layers], self.keys[layers], self.values[layers], self.first_head)

    @property
    def on_gpu(self) -> bool:
        """Whether the buffers are on a GPU, where kernels can use them."""
        return self.keys[0].is_cuda

    @cached_property
    def bytes_per_slot(self) -> int:
        """Bytes of keys and values in one slot, over all layers."""
        return sum(buffer[0].numel() * buffer.element_size() for buffer in (*self.keys, *self.values))

    @cached_property
    def key_table(self) -> torch.Tensor:
        """int64 [layers], addresses of the key buffers."""
        return _addresses(self.keys)

    @cached_property
    def value_table(self) -> torch.Tensor:
        """int64 [layers], addresses of the value buffers."""
        return _addresses(self.values)

    @cached_property
    def scaling_table(self) -> torch.Tensor:
        """float32 [layers], :attr:`scaling`."""
        return torch.tensor(self.scaling, dtype=torch.float32, device=self.keys[0].device)

    @cached_property
    def layer_table(self) -> torch.Tensor:
        """int32 [layers], :attr:`layer_ids`."""
        return to_device(self.layer_ids, self.keys[0].device, torch.int32)

    def scoring_keys(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """A layer's keys for scoring, in ``slots``, int64 [tokens]: [tokens, kv_heads, head_dim]; float32 if they are quantized."""
        return self.keys[layer].index_select(0, slots) if self.codes is None else self.codes.read(layer, slots)

    def copy_kept(self, kept: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy each head's ``j``-th kept token to slot ``targets[j]``, int64 [count], in all layers.

        ``kept``, int64 [layers, kv_heads, count], are indices into ``sources``, int64 [tokens], slots of the context.
        """
        if self.on_gpu:
            from sglang_ext.layers.kernels.kv_copies import gather_kept

            gather_kept(self.key_table, self.value_table, self.keys[0], self.values[0], kept, sources, targets)
            return
        heads = torch.arange(kept.shape[1])
        for layer, of_layer in enumerate(kept):
            read = sources[of_layer].t()
            for buffer in (self.keys[layer], self.values[layer]):
                buffer[targets] = buffer[read, heads]

    def move_newest(self, rows: "NewestRows", sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy rows of a context's newest tokens to their places in compressed KV, whose slots are ``targets``, int64 [places].

        ``sources``, int64 [tokens], are the slots of the context. The copied rows are exact there.
        """
        # Cloned: Triton would compile its kernel again for a tensor that is not aligned to 16 bytes.
        newest = sources[rows.first : rows.first + rows.places.shape[-1]].clone()
        if self.on_gpu:
            from sglang_ext.layers.kernels.row_exchange import move_newest

            move_newest((self.key_table, self.value_table), self.keys[0], self.values[0], rows.places, newest, targets)
            return
        heads = torch.arange(rows.places.shape[1])[:, None]
        for layer, places in enumerate(rows.places):
            for buffer in (self.keys[layer], self.values[layer]):
                buffer[targets[places], heads] = buffer[newest[None], heads]


def _addresses(buffers: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return to_device([buffer.data_ptr() for buffer in buffers], buffers[0].device)
