"""Kernels that pack tokens in 2, 4 or 8 bits, and kernels that attend to packed tokens. The Gluon kernels are in gluon/."""
