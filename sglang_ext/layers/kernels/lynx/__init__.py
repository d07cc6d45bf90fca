"""Anchor and residual of KV (Lynx): the most significant bits of a number, and the rest.

What is computed, in PyTorch, by which kernels are checked:

    levels.py        what codes mean, and the bounds between them
    scales.py        mean and reach of a chunk of 32 tokens
    layout.py        where things lie in a page's two streams
    planes.py        codes of 2 to 6 bits, in planes of bits
    bins.py          exact residuals: a number's index among those that have its code
    plain.py         both streams of a page

Who calls:

    codec.py         pages as two streams, by kernels or by plain.py
    page_tensors.py         tensors whose pages are coded together
    triton_codec.py       launches

Kernels in Triton:

    tiles.py         pieces that the others share
    quads.py         what a thread has in registers
    chunk_scales.py  scales.py inside kernels
    encode_tiles.py  write anchors, and residuals of 8 bits
    decode_tiles.py  read these into a pool
    exact_tiles.py   write and read exact residuals
    residual_pages.py      pages in host memory (mem_cache/host_tier/residuals.py)
"""
