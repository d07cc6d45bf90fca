"""Products of codes as integers (HACK, arXiv 2502.03589): in PyTorch, and kernels that decode by them."""
