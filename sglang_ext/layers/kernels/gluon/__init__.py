"""Kernels in Gluon, for NVIDIA's tensor cores: decode attention over packed blocks (packed.py)."""
