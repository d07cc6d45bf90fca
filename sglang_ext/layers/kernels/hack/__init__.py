"""Integer products of quantized codes (HACK, arXiv 2502.03589): a PyTorch version, and the kernels for decode and prefill."""
