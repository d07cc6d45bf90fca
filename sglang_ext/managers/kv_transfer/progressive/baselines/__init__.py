"""Codecs for benchmarks only (``--kv-bench-codec``): baselines that progressive transfer is compared with, over the same links.

    quantized_codec.py   pages of quantized numbers in one stream
    quantizers.py        16 bits, 8 bits by page or by token and head, 4 bits in groups
    cachegen.py          deltas of neighbouring tokens, coarser in later layers, entropy coded
    unsplit_codec.py     Lynx codes of 4 or of 8 bits in one stream

No codec restores the pool's values, so outputs are not meaningful.
"""
