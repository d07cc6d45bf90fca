"""The methods that this process serves: as the flags name them, with what they read of the model and of files."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_ext.config.method_choice import place_of
from sglang_ext.config.method_options import Offer, offers
from sglang_ext.layers.attention.of_model import an_attention, is_attention
from sglang_ext.managers import compression
from sglang_ext.mem_cache.compressed.rotary import Rotary, rotary_of
from sglang_ext.mem_cache.compressed.slot_scores import SlotScores
from sglang_ext.mem_cache.compressors.catalogue import Method

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_ext.arguments import KVServerArgs


@dataclass(frozen=True)
class ServedMethods:
    """The methods that requests may ask for, the one of those that ask for none first.

    Attributes:
        offers: as requests name them.
        methods: what each does, in the same order.
        scores: predicted, by slot; None where no method reads them.
        rotary: the model's rotary embedding; None where no method needs it.
    """

    offers: tuple[Offer, ...]
    methods: tuple[Method, ...]
    scores: SlotScores | None = None
    rotary: Rotary | None = None

    @classmethod
    def of(cls, args: "KVServerArgs", model_runner: "ModelRunner", layers: Sequence[int]) -> "ServedMethods":
        """Those that the flags ask for.

        Args:
            args: the server's.
            model_runner: the target's.
            layers: indices of its attention layers.

        Raises:
            OptionError: a method lacks what it reads, or it is of another model.
        """
        kv_heads, rank = an_attention(model_runner.model).tp_k_head_num, model_runner.ps.tp_rank
        scores = compression.slot_scores_of(args, layers, kv_heads, rank)
        offered, methods = offers(args), compression.methods_of(args, len(layers), kv_heads, rank, scores)
        rotary = None
        for offer, method in zip(offered, methods):
            if method.needs_rotary:
                rotary = rotary_of(model_runner.model, is_attention, offer.name)
        return cls(offered, methods, scores, rotary)

    @property
    def window(self) -> int:
        """Of the newest queries, how many a method scores keys by at most."""
        return max(method.compressor.window for method in self.methods)

    def place(self, req: "Req") -> int:
        """Place of the method that a request asks for."""
        # The frontend refuses names that are none.
        return place_of(self.offers, req.sampling_params.custom_params) or 0

    def __str__(self) -> str:
        return ", ".join(f"compressor {offer.name} with budget {offer.budget}" for offer in self.offers)
