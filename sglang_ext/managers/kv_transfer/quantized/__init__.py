"""Prompts that travel as the codes of their copies, in mode lossy (HACK, arXiv 2502.03589, section 6).

    prompt_codec.py    pages of such a prompt's room, packed and written
    decode_side.py   which prompts come so, and the copies that they are written to
    packed_prompts.py such prompts that wait at the prefill server for room elsewhere
"""
