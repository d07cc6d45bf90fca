"""Anchor and residual of KV (Lynx): codec.py is the interface, layout.py, scales.py, pytorch_codec.py and compact_codec.py define the format."""
