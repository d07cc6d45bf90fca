"""Baselines that benchmarks compare sglang-ext with. The served package does not import them: a server loads one only if a flag names it.

Codecs of KV transfer, for ``--kv-bench-codec``:

    quantized_codec.py   pages of quantized numbers: 16 bits, 8 bits by token and head or by page, 4 bits in groups
    quantizers.py        the quantizers of these numbers
    cachegen.py          differences of neighboring tokens, coarser in later layers, entropy coded
    unsplit_codec.py     Lynx codes of 8 or 4 bits in one stream

Selectors, for ``--kv-compressor``:

    tova.py              scores by the query of the step before, equally in all heads of a layer
    true_query.py        scores by the query of the step itself
    scoring_inputs.py    the interface of scores
    scorings.py          a table of all scores that selection is compared with; no server needs it

Options of ``sglang-ext-bench`` take the short names of :data:`CODECS` and :data:`SELECTORS`. A server's flags take the classes.
"""

_PACKAGE = __name__

CODECS: dict[str, str] = {
    "bf16": f"{_PACKAGE}.quantized_codec:Bfloat16Codec",
    "int8": f"{_PACKAGE}.quantized_codec:Int8Codec",
    "int8-tensor": f"{_PACKAGE}.quantized_codec:Int8TensorCodec",
    "int4": f"{_PACKAGE}.quantized_codec:Int4Codec",
    "cachegen": f"{_PACKAGE}.cachegen:CacheGenCodec",
    "lynx-int8": f"{_PACKAGE}.unsplit_codec:LynxInt8Codec",
    "lynx-int4": f"{_PACKAGE}.unsplit_codec:LynxInt4Codec",
}
"""Values of ``--kv-bench-codec`` by the short name of the codec. No codec restores the pool's values, so outputs are not meaningful."""
SELECTORS: dict[str, str] = {
    "tova": f"{_PACKAGE}.tova:Tova",
    "true-query": f"{_PACKAGE}.true_query:TrueQuery",
}
"""Values of ``--kv-compressor`` by the short name of the method. Both are served on a CPU only."""


def served_method(name: str) -> str:
    """The value of ``--kv-compressor`` for a method that a benchmark's option names; ``name`` itself if it is no baseline."""
    return SELECTORS.get(name, name)
