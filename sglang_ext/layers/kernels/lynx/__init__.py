"""Anchor and residual of KV (Lynx): the most significant bits of each number, and the remaining bits.

The format, in PyTorch. Tests check the kernels against these files::

    layout.py          layout of a page's two streams, values of codes, tensors whose pages are encoded together
    scales.py          mean and range of a chunk of 32 tokens
    pytorch_codec.py   both streams of a page: bit planes of codes, and exact residuals

The interface::

    codec.py           pages as two streams, with kernels or with pytorch_codec.py
    triton_codec.py    kernel launches, and the kernel that decodes anchors and 8-bit residuals into a pool

The Triton kernels::

    tiles.py           parts that the other kernels share
    chunk_scales.py    scales.py inside kernels
    encode_tiles.py    write anchors and 8-bit residuals
    exact_tiles.py     write and read exact residuals
    residual_pages.py  pages in host memory (mem_cache/host_tier/page_copies.py)
"""
