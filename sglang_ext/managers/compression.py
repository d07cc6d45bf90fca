"""The compressor that the flags ask for, and what it reads from files."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_ext.mem_cache.compressors import Compressor, create
from sglang_ext.mem_cache.compressors.kvzap import KVzap
from sglang_ext.mem_cache.compressors.kvzip import KVzip
from sglang_ext.mem_cache.scores.index import ScoreIndex
from sglang_ext.mem_cache.scores.model_key import model_folder, model_key
from sglang_ext.mem_cache.scores.predictor import Predictor
from sglang_ext.mem_cache.slot_scores import SlotScores
from sglang_ext.options import OptionError

if TYPE_CHECKING:
    from sglang_ext.arguments import KVServerArgs


def check_files(args: "KVServerArgs") -> None:
    """Look at the predictor before the model is loaded.

    Raises:
        OptionError: it is missing, has changed, or is of another model.
    """
    if args.kv_compressor != KVzap.name:
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
    if args.kv_compressor != KVzap.name:
        return None
    predictor = _predictor(args)
    return SlotScores(predictor.of_heads(rank * predictor.kv_heads // args.tp_size, kv_heads), layers)


def _predictor(args: "KVServerArgs") -> Predictor:
    return Predictor.read(Path(args.kv_predictor), model_key(model_folder(args.model_path, args.revision)))


def compressor_of(args: "KVServerArgs", layers: int, kv_heads: int, scores: SlotScores | None) -> Compressor:
    """The compressor of ``--kv-compressor``, with stored or predicted scores where it reads them.

    Args:
        args: the server's.
        layers, kv_heads: of the model.
        scores: by slot.

    Raises:
        OptionError: scores are asked for, and the model has no files to tell whose they are.
    """
    if args.kv_compressor == KVzap.name:
        # Without host memory no score is ever unknown.
        return KVzap(scores, create(args.kv_online_compressor) if args.kv_host_gb else None)
    if args.kv_compressor != KVzip.name:
        return create(args.kv_compressor)
    key = model_key(model_folder(args.model_path, args.revision))
    index = ScoreIndex.open(Path(args.kv_scores), KVzip.name, key, layers, kv_heads)
    return KVzip(create(args.kv_online_compressor), index)
