"""Triton kernels, each with its launcher. PyTorch code replaces them where Triton is not available."""
