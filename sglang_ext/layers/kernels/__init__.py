"""Triton kernels, each with its launcher; plain PyTorch serves where Triton is not."""
