"""Gluon kernels for NVIDIA tensor cores: decode attention over packed blocks (packed_blocks.py, integer_blocks.py) and prefill on codes."""
