"""The methods that this process serves: as the flags name them, with what they read of the model and of files."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sglang_ext.config import selection_options
from sglang_ext.config.method_options import OfferedMethod, methods, offered_methods
from sglang_ext.core import OptionError
from sglang_ext.layers.attention.model_layers import first_attention_layer, is_attention
from sglang_ext.mem_cache.compressed.compression_method import CompressionMethod
from sglang_ext.mem_cache.compressed.layouts.pages import PagePointerLayout
from sglang_ext.mem_cache.compressed.layouts.ragged_heads import RaggedHeadLayout
from sglang_ext.mem_cache.compressed.layouts.base import KVLayout, PlainLayout, ExchangedRowLayout, PlainSlots
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import QuantizedLayout, Packing
from sglang_ext.mem_cache.compressed.layouts.pointers import PointerLayout, Pointers
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.page_extremes import PageExtremes
from sglang_ext.mem_cache.compressed.rotary import Rotary, find_rotary
from sglang_ext.mem_cache.compressed.slot_scores import SlotScores
from sglang_ext.mem_cache.compressors import Compressor
from sglang_ext.mem_cache.compressors.catalogue import MethodSpec, create
from sglang_ext.mem_cache.compressors.each_step.quest import Quest
from sglang_ext.mem_cache.compressors.kvzap import KVzap
from sglang_ext.mem_cache.compressors.kvzip import KVzip
from sglang_ext.mem_cache.compressors.spade import Spade
from sglang_ext.mem_cache.scores.index import ScoreIndex
from sglang_ext.mem_cache.scores.model_key import model_folder, model_key
from sglang_ext.mem_cache.scores.predictor import Predictor

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_ext.arguments import KVServerArgs


@dataclass(frozen=True)
class ServedMethods:
    """The methods that requests may ask for, the one of those that ask for none first.

    Attributes:
        offered_methods: as requests name them.
        methods: what each does, in the same order.
        scores: predicted, by slot; None where no method reads them.
        rotary: the model's rotary embedding; None where no method needs it.
        first_head: of the model's KV heads, the first that this rank holds.
    """

    offered_methods: tuple[OfferedMethod, ...]
    methods: tuple[MethodSpec, ...]
    scores: SlotScores | None = None
    rotary: Rotary | None = None
    first_head: int = 0

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
        kv_heads, rank = first_attention_layer(model_runner.model).tp_k_head_num, model_runner.ps.tp_rank
        scores = load_slot_scores(args, layers, kv_heads, rank)
        offered, methods = offered_methods(args), methods_of(args, len(layers), kv_heads, rank, scores)
        rotary = None
        for offer, method in zip(offered, methods):
            if method.needs_rotary:
                rotary = find_rotary(model_runner.model, is_attention, offer.name)
        return cls(offered, methods, scores, rotary, first_kv_head(args, rank))

    @property
    def window(self) -> int:
        """Of the newest queries, how many a method scores keys by at most."""
        return max(method.compressor.window for method in self.methods)

    @property
    def every(self) -> int:
        """Steps between two choices by the queries of steps, at most; 0 where no method chooses so."""
        return max(method.compressor.every for method in self.methods)

    def layout(self, adaptive: bool, buffers: KVBuffers, page_size: int, token_table: torch.Tensor, rows: bool = False) -> KVLayout:
        """The format of their copies; at most one packs tokens, or leads into full KV and is alone.

        Captured graphs read what rows begin with, so that this comes before any is captured.

        Args:
            adaptive: whether heads keep different numbers of tokens.
            buffers: the pool's.
            page_size: slots that the pool hands out together.
            token_table: int32 [rows, width], with the draft rows.
            rows: whether cache ranks send the rows of chosen tokens, in the place of pointers.

        Raises:
            ValueError: heads of this size cannot be packed so.
        """
        quantizer = next((method.quantizer for method in self.methods if method.quantizer is not None), None)
        if quantizer is not None:
            return QuantizedLayout.for_table(Packing.for_pool(quantizer, buffers, page_size, self.rotary), token_table)
        if rows:
            return ExchangedRowLayout()
        pointing = next((method.compressor for method in self.methods if method.compressor.points), None)
        if pointing is not None:
            pointers = Pointers.for_pool(buffers, page_size)
            if not isinstance(pointing, Quest) or not pointing.in_attention:
                return PointerLayout.for_table(pointers, token_table)
            extremes = PageExtremes(buffers.keys, buffers.layer_ids, pointing.scoring.page)
            return PagePointerLayout.of_pool(pointers, token_table, extremes, pointing)
        return RaggedHeadLayout.of(buffers, len(token_table)) if adaptive else PlainLayout()


def check_files(args: "KVServerArgs") -> None:
    """Look at stored scores and at the predictor before the model is loaded.

    Raises:
        OptionError: no scores are of the model; the predictor is missing, has changed, or is of another model.
    """
    if any(offer.drop_method == KVzip.name for offer in offered_methods(args)):
        config = args.get_model_config()
        if _score_index(args, config.num_hidden_layers).empty:
            raise OptionError(
                f"--kv-scores is {args.kv_scores!r}, in which no scores are of the model {args.model_path}: write them with "
                f"python -m sglang_ext.precompress --model {args.model_path} --out {args.kv_scores} DOCUMENTS, or pass "
                f"--kv-compressor {args.kv_online_compressor} and leave --kv-scores out"
            )
    if not _predicts(args):
        return
    predictor, config = _predictor(args), args.get_model_config()
    found = predictor.layers, predictor.kv_heads, predictor.hidden_size
    wanted = config.num_hidden_layers, config.get_total_num_kv_heads(), config.hidden_size
    if found != wanted:
        raise OptionError(
            f"--kv-predictor {args.kv_predictor} has {found} layers, KV heads and inputs, the model {wanted}: make it again with "
            "python -m sglang_ext.fit kvzap"
        )


def load_slot_scores(args: "KVServerArgs", layers: Sequence[int], kv_heads: int, rank: int) -> SlotScores | None:
    """Predicted scores of a rank's KV heads; None where no compressor reads them.

    Args:
        args: the server's.
        layers: indices of the model's attention layers.
        kv_heads: of this rank.
        rank: of ``--tp-size``; where there are more ranks than heads, neighbours have the same.

    Raises:
        OptionError: the predictor is missing, has changed, or is of another model.
    """
    if not _predicts(args):
        return None
    predictor = _predictor(args)
    return SlotScores(predictor.of_heads(rank * predictor.kv_heads // args.tp_size, kv_heads), layers)


def _predicts(args: "KVServerArgs") -> bool:
    return any(offer.drop_method == KVzap.name for offer in offered_methods(args))


def _predictor(args: "KVServerArgs") -> Predictor:
    return Predictor.read(Path(args.kv_predictor), model_key(model_folder(args.model_path, args.revision)))


def methods_of(args: "KVServerArgs", layers: int, kv_heads: int, rank: int, scores: SlotScores | None) -> tuple[MethodSpec, ...]:
    """The methods that a server offers, in the order of :func:`offered_methods`, with stored or predicted scores where they read them.

    Args:
        args: the server's.
        layers: of the model.
        kv_heads, rank: as for :func:`load_slot_scores`.
        scores: by slot.

    Raises:
        OptionError: scores are asked for, and the model has no files to tell whose they are.
    """
    found: list[MethodSpec] = []
    # Methods that differ in budget or packing read the same scores.
    compressors: dict[str, Compressor] = {}
    for each in methods(args):
        name = each.compressor.name
        if name not in compressors:
            compressors[name] = each.compressor
            if name == KVzap.name:
                # Without host memory no score is ever unknown.
                compressors[name] = KVzap(scores, create(args.kv_online_compressor) if args.kv_host_gb else None)
            elif name == Spade.name:
                compressors[name] = selection_options.spade(args)
            elif each.compressor.every:
                compressors[name] = selection_options.stepping(args, name)
            elif name == KVzip.name:
                compressors[name] = _kvzip(args, layers, kv_heads, rank)
        found.append(replace(each, compressor=compressors[name]))
    return tuple(found)


def copy_methods(args: "KVServerArgs", methods: tuple[MethodSpec, ...], page_size: int, layout: KVLayout) -> tuple[CompressionMethod, ...]:
    """How ``methods``, those of :func:`methods_of`, make copies of this format in a pool with such pages."""
    plain, made = PlainSlots(page_size), []
    for offer, each in zip(offered_methods(args), methods, strict=True):
        packing = layout.slot_layout(each, plain)
        made.append(CompressionMethod(each.compressor, offer.budget, packing, offer.name, offer.quant_method or "", offer.suffix, args.kv_sparse_from))
    return tuple(made)


def _kvzip(args: "KVServerArgs", layers: int, kv_heads: int, rank: int) -> KVzip:
    index, first = _score_index(args, layers), first_kv_head(args, rank)
    return KVzip(create(args.kv_online_compressor), index, slice(first, first + kv_heads))


def first_kv_head(args: "KVServerArgs", rank: int) -> int:
    """Of the model's KV heads, the first that a rank of ``--tp-size`` holds."""
    return rank * args.get_model_config().get_total_num_kv_heads() // args.tp_size


def _score_index(args: "KVServerArgs", layers: int) -> ScoreIndex:
    key = model_key(model_folder(args.model_path, args.revision))
    return ScoreIndex.open(Path(args.kv_scores), KVzip.name, key, layers, args.get_model_config().get_total_num_kv_heads())
