"""Anchor and residual of KV (Lynx): the most significant bits of each number, and the remaining bits.

The format, in PyTorch. Tests check the kernels against these files::

    levels.py          values of codes, and the bounds between them
    scales.py          mean and range of a chunk of 32 tokens
    layout.py          layout of a page's two streams
    planes.py          codes of 2 to 6 bits, as bit planes
    bins.py            exact residuals: the index of a number among those with its code
    pytorch_codec.py   both streams of a page

The interface::

    codec.py           pages as two streams, with kernels or with pytorch_codec.py
    page_tensors.py    tensors whose pages are encoded together
    triton_codec.py    kernel launches

The Triton kernels::

    tiles.py           parts that the other kernels share
    quads.py           the registers of a thread
    chunk_scales.py    scales.py inside kernels
    encode_tiles.py    write anchors and 8-bit residuals
    decode_tiles.py    decode anchors and 8-bit residuals into a pool
    exact_tiles.py     write and read exact residuals
    residual_pages.py  pages in host memory (mem_cache/host_tier/residuals.py)
"""
