"""Attention over rows that begin with compressed KV: in PyTorch, and on a GPU as SGLang backends with their own CUDA graphs."""
