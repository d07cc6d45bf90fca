"""Kernels that write compressed KV.

gather_kept.py copies the kept tokens of each KV head. scatter_cells.py does so for heads that keep different numbers of tokens, and
stores them head after head. write_pointers.py writes pointers to the kept tokens instead.
"""
