"""Attention over rows that begin with a copy: in PyTorch, and as SGLang backends with graphs of their own on a GPU."""
