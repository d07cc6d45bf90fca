"""Prompts that are transferred as quantized KV, in mode lossy (HACK, arXiv 2502.03589, section 6).

    prompt_codec.py     encodes and decodes the pages of such a prompt; prefill: packed prompts that wait for a decode server
    decode_side.py      decode: selects such prompts and allocates their compressed KV
"""
