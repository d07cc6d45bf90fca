"""The methods that the flags ask for, and what they read from files."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_ext.config.method_options import offers
from sglang_ext.core import OptionError
from sglang_ext.mem_cache.compressed.copy_method import CopyMethod
from sglang_ext.mem_cache.compressed.formats.kv_format import KVFormat
from sglang_ext.mem_cache.compressed.formats.unpacked import Unpacked
from sglang_ext.mem_cache.compressed.slot_scores import SlotScores
from sglang_ext.mem_cache.compressors import Compressor, catalogue
from sglang_ext.mem_cache.compressors.catalogue import Method, create
from sglang_ext.mem_cache.compressors.kvzap import KVzap
from sglang_ext.mem_cache.compressors.kvzip import KVzip
from sglang_ext.mem_cache.scores.index import ScoreIndex
from sglang_ext.mem_cache.scores.model_key import model_folder, model_key
from sglang_ext.mem_cache.scores.predictor import Predictor

if TYPE_CHECKING:
    from sglang_ext.arguments import KVServerArgs


def check_files(args: "KVServerArgs") -> None:
    """Look at stored scores and at the predictor before the model is loaded.

    Raises:
        OptionError: no scores are of the model; the predictor is missing, has changed, or is of another model.
    """
    if any(offer.drops == KVzip.name for offer in offers(args)):
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


def slot_scores_of(args: "KVServerArgs", layers: Sequence[int], kv_heads: int, rank: int) -> SlotScores | None:
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
    return any(offer.drops == KVzap.name for offer in offers(args))


def _predictor(args: "KVServerArgs") -> Predictor:
    return Predictor.read(Path(args.kv_predictor), model_key(model_folder(args.model_path, args.revision)))


def methods_of(
    args: "KVServerArgs", layers: int, kv_heads: int, rank: int, scores: SlotScores | None
) -> tuple[Method, ...]:
    """The methods that a server offers, in the order of :func:`offers`, with stored or predicted scores where they read them.

    Args:
        args: the server's.
        layers: of the model.
        kv_heads, rank: as for :func:`slot_scores_of`.
        scores: by slot.

    Raises:
        OptionError: scores are asked for, and the model has no files to tell whose they are.
    """
    found: list[Method] = []
    # Methods that differ in budget or packing read the same scores.
    compressors: dict[str, Compressor] = {}
    for offer in offers(args):
        each = catalogue.method(offer.compressor, args.kv_bits if offer.packs else None)
        name = each.compressor.name
        if name not in compressors:
            compressors[name] = each.compressor
            if name == KVzap.name:
                # Without host memory no score is ever unknown.
                compressors[name] = KVzap(scores, create(args.kv_online_compressor) if args.kv_host_gb else None)
            elif name == KVzip.name:
                compressors[name] = _kvzip(args, layers, kv_heads, rank)
        found.append(replace(each, compressor=compressors[name]))
    return tuple(found)


def copy_methods(
    args: "KVServerArgs", methods: tuple[Method, ...], page_size: int, form: KVFormat
) -> tuple[CopyMethod, ...]:
    """How ``methods``, those of :func:`methods_of`, make copies of this format in a pool with such pages."""
    plain, made = Unpacked(page_size), []
    for offer, each in zip(offers(args), methods, strict=True):
        packing = form.placement(each, plain)
        made.append(CopyMethod(each.compressor, offer.budget, packing, offer.name, offer.packs or "", offer.suffix))
    return tuple(made)


def _kvzip(args: "KVServerArgs", layers: int, kv_heads: int, rank: int) -> KVzip:
    index, total = _score_index(args, layers), args.get_model_config().get_total_num_kv_heads()
    first = rank * total // args.tp_size
    return KVzip(create(args.kv_online_compressor), index, slice(first, first + kv_heads))


def _score_index(args: "KVServerArgs", layers: int) -> ScoreIndex:
    key = model_key(model_folder(args.model_path, args.revision))
    return ScoreIndex.open(Path(args.kv_scores), KVzip.name, key, layers, args.get_model_config().get_total_num_kv_heads())
