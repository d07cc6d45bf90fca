"""Measurements on real SGLang servers and on single kernels: ``sglang-ext-bench``."""
