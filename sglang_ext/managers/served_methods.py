"""The compression methods that this process serves, from the flags, with their data from the model and from files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from sglang.srt.mem_cache.memory_pool import KVCache
from sglang.srt.model_executor.model_runner import ModelRunner

from sglang_ext.config import selection_options
from sglang_ext.config.method_options import OfferedMethod, drop_methods, method_specs, offered_methods
from sglang_ext.config.rules import KVServerArgs
from sglang_ext.core import OptionError
from sglang_ext.layers.forward import attention_scaling, first_attention_layer, is_attention
from sglang_ext.mem_cache.compressed.compression_method import CompressionMethod
from sglang_ext.mem_cache.compressed.key_derived_data import KeyDerivedData, PageExtremes, SlotCodes
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.base import ExchangedRowLayout, KVLayout, PlainLayout, PlainSlots, RowCountLayout
from sglang_ext.mem_cache.compressed.rotary import Rotary, find_rotary
from sglang_ext.mem_cache.compressed.slot_scores import SlotScores
from sglang_ext.mem_cache.compressors import Compressor
from sglang_ext.mem_cache.compressors.catalogue import KVZAP, KVZIP, MethodSpec, create
from sglang_ext.mem_cache.compressors.kvzip import KVzap, KVzip, ScoreIndex
from sglang_ext.mem_cache.scores import Predictor, model_folder, model_key


@dataclass(frozen=True)
class ServedMethods:
    """The methods that requests may ask for, as they name them and as specifications. The first one serves requests that ask for none.

    ``scores`` by slot, and the ``rotary`` embedding, are None if no method needs them. ``first_head``: index, among the model's KV heads, of
    the first that this rank holds. ``scaling``: factor on query-key products, by the index of the attention layer in the model.
    """

    offered_methods: tuple[OfferedMethod, ...]
    methods: tuple[MethodSpec, ...]
    scores: SlotScores | None = None
    rotary: Rotary | None = None
    first_head: int = 0
    scaling: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, args: KVServerArgs, model_runner: ModelRunner) -> "ServedMethods":
        """Create the methods that the flags ask for.

        Raises:
            OptionError: A file that a method needs is missing or belongs to another model.
        """
        model, rank = model_runner.model, model_runner.ps.tp_rank
        kv_heads, scaling = first_attention_layer(model).tp_k_head_num, attention_scaling(model)
        scores = load_slot_scores(args, tuple(scaling), kv_heads, rank)
        offered, methods = offered_methods(args), methods_of(args, len(scaling), kv_heads, rank, scores)
        rotary, rotating = None, [offer.name for offer, method in zip(offered, methods) if method.needs_rotary]
        if rotating:
            rotary = find_rotary(model, is_attention, rotating[0])
        return cls(offered, methods, scores, rotary, first_kv_head(args, rank), scaling)

    @property
    def window(self) -> int:
        """Maximum number of newest queries that a method needs to score keys."""
        return max(method.compressor.window for method in self.methods)

    @property
    def selection_interval(self) -> int:
        """Maximum selection interval in steps; 0 if no method selects by the queries of steps."""
        return max(method.compressor.every for method in self.methods)

    def buffers(self, args: KVServerArgs, pool: KVCache) -> tuple[KVBuffers, KeyDerivedData | None]:
        """The layers of SGLang's ``pool``, and the quantized keys of all slots; None if no tokens are selected by them."""
        buffers = KVBuffers.from_pool(pool, self.scaling, self.first_head)
        bits = selection_options.slot_code_bits(args)
        if not bits:
            return buffers, None
        codes = SlotCodes(buffers.keys, buffers.layer_ids, bits)
        return replace(buffers, codes=codes.held), codes

    def layout(self, args: KVServerArgs, buffers: KVBuffers, page_size: int, token_table: torch.Tensor) -> KVLayout:
        """The layout of the compressed KV. At most one method packs tokens, or points to full KV; that one is served alone.

        Captured graphs read the layout's table of rows, so the layout must exist before any graph is captured. ``token_table``: int32 [rows,
        width], with the draft rows.

        Raises:
            ValueError: Heads of this size cannot be packed.
        """
        quantizer = next((method.quantizer for method in self.methods if method.quantizer is not None), None)
        if quantizer is not None:
            from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing, QuantizedLayout

            return QuantizedLayout.for_table(Packing.for_pool(quantizer, buffers, page_size, self.rotary), token_table)
        if selection_options.has_remote_values(args):
            return ExchangedRowLayout()
        pointing = next((method.compressor for method in self.methods if method.compressor.points), None)
        if pointing is not None:
            from sglang_ext.mem_cache.compressed.layouts.pointers import PagePointerLayout, PointerLayout, Pointers

            pointers = Pointers.for_pool(buffers, page_size)
            if not pointing.in_attention:
                return PointerLayout.for_table(pointers, token_table)
            extremes = PageExtremes(buffers.keys, buffers.layer_ids, pointing.page)
            return PagePointerLayout.of_pool(pointers, token_table, extremes, pointing)
        if args.kv_head_budgets == "adaptive":
            from sglang_ext.mem_cache.compressed.layouts.ragged_heads import RaggedHeadLayout

            return RaggedHeadLayout.of(buffers, len(token_table))
        return PlainLayout()


def check_files(args: KVServerArgs) -> None:
    """Check the stored scores and the predictor before the model is loaded.

    Raises:
        OptionError: There are no scores of the model; or the predictor is missing, has changed, or belongs to another model.
    """
    if KVZIP in drop_methods(args) and _score_index(args, args.get_model_config().num_hidden_layers).empty:
        raise OptionError(
            f"--kv-scores is {args.kv_scores!r}, which has no scores of the model {args.model_path}: write them with "
            f"python -m sglang_ext.precompress --model {args.model_path} --out {args.kv_scores} DOCUMENTS, or pass "
            f"--kv-compressor {args.kv_online_compressor} and leave --kv-scores out"
        )
    if KVZAP not in drop_methods(args):
        return
    predictor, config = _predictor(args), args.get_model_config()
    found = predictor.layers, predictor.kv_heads, predictor.hidden_size
    wanted = config.num_hidden_layers, config.get_total_num_kv_heads(), config.hidden_size
    if found != wanted:
        raise OptionError(
            f"--kv-predictor {args.kv_predictor} has {found} layers, KV heads and inputs, the model {wanted}: make it again with "
            "python -m sglang_ext.fit kvzap"
        )


def load_slot_scores(args: KVServerArgs, layers: Sequence[int], kv_heads: int, rank: int) -> SlotScores | None:
    """Load the predicted scores of a rank's KV heads; None if no compressor reads them. ``layers``: indices in the model.

    Raises:
        OptionError: The predictor is missing, has changed, or belongs to another model.
    """
    if KVZAP not in drop_methods(args):
        return None
    predictor = _predictor(args)
    # If there are more ranks than heads, neighbouring ranks have the same heads.
    return SlotScores(predictor.of_heads(rank * predictor.kv_heads // args.tp_size, kv_heads), layers)


def _predictor(args: KVServerArgs) -> Predictor:
    return Predictor.read(Path(args.kv_predictor), model_key(model_folder(args.model_path, args.revision)))


def _score_index(args: KVServerArgs, layers: int) -> ScoreIndex:
    key = model_key(model_folder(args.model_path, args.revision))
    return ScoreIndex.open(Path(args.kv_scores), KVZIP, key, layers, args.get_model_config().get_total_num_kv_heads())


def methods_of(args: KVServerArgs, layers: int, kv_heads: int, rank: int, scores: SlotScores | None) -> tuple[MethodSpec, ...]:
    """Specifications of the offered methods, in the order of :func:`offered_methods`, with the stored or predicted scores that they read.

    Raises:
        OptionError: A method needs scores, but the model has no files to identify it by.
    """
    found: list[MethodSpec] = []
    # Methods that differ only in budget or packing read the same scores.
    compressors: dict[str, Compressor] = {}
    for each in method_specs(args):
        name = each.compressor.name
        if name not in compressors:
            compressors[name] = each.compressor
            if name == KVZAP:
                # Without host memory all scores are known, so no other compressor is needed.
                compressors[name] = KVzap(scores, create(args.kv_online_compressor) if args.kv_host_gb else None)
            elif each.compressor.every:
                compressors[name] = selection_options.step_method(args)
            elif name == KVZIP:
                first = first_kv_head(args, rank)
                compressors[name] = KVzip(create(args.kv_online_compressor), _score_index(args, layers), slice(first, first + kv_heads))
        found.append(replace(each, compressor=compressors[name]))
    return tuple(found)


def copy_methods(args: KVServerArgs, methods: tuple[MethodSpec, ...], page_size: int, layout: KVLayout) -> tuple[CompressionMethod, ...]:
    """Compression methods that create compressed KV of this layout in a pool with this page size."""
    plain, made = PlainSlots(page_size), []
    for offer, each in zip(offered_methods(args), methods, strict=True):
        is_plain = not isinstance(layout, RowCountLayout) or (each.quantizer is None and not each.compressor.points)
        packing, quant_method = plain if is_plain else layout.layout, offer.quant_method or ""
        made.append(CompressionMethod(each.compressor, offer.budget, packing, offer.name, quant_method, offer.suffix, args.kv_sparse_from))
    return tuple(made)


def first_kv_head(args: KVServerArgs, rank: int) -> int:
    """Index, among the model's KV heads, of the first that a rank of ``--tp-size`` holds."""
    return rank * args.get_model_config().get_total_num_kv_heads() // args.tp_size
