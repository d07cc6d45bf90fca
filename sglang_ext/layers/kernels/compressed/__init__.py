"""Kernels that write compressed KV.

gather_kept.py copies the kept tokens of each KV head.

scatter_cells.py does the same for heads that keep different numbers of tokens. It stores them head after head.

write_pointers.py writes pointers to the kept tokens instead.
"""
