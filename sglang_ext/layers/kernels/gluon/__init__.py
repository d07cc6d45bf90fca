"""Kernels in Gluon, for NVIDIA's tensor cores: decode attention over packed blocks (packed.py), and as integers (integer_blocks.py)."""
