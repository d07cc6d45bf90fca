"""Anchor and residual of KV (Lynx): codec.py is the interface, layout.py, scales.py and pytorch_codec.py define the format in PyTorch."""
