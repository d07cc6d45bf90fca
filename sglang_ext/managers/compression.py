"""The method that the flags ask for."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_ext.compressor_options import parse_compressor
from sglang_ext.mem_cache.compressors import Method, create, method
from sglang_ext.mem_cache.compressors.kvzip import KVzip
from sglang_ext.mem_cache.scores.index import ScoreIndex
from sglang_ext.mem_cache.scores.model_key import model_folder, model_key

if TYPE_CHECKING:
    from sglang_ext.arguments import KVServerArgs


def method_of(args: "KVServerArgs", layers: int, kv_heads: int) -> Method:
    """The method of ``--kv-compressor``, with stored scores where it reads them.

    Args:
        args: the server's.
        layers, kv_heads: of the model.

    Raises:
        OptionError: scores are asked for, and the model has no files to tell whose they are.
    """
    found = method(args.kv_compressor, args.kv_bits)
    if parse_compressor(args.kv_compressor)[0] != KVzip.name:
        return found
    key = model_key(model_folder(args.model_path, args.revision))
    index = ScoreIndex.open(Path(args.kv_scores), KVzip.name, key, layers, kv_heads)
    return replace(found, compressor=KVzip(create(args.kv_online_compressor), index))
