"""Checks whether this machine can serve with sglang-ext: ``python -m sglang_ext.doctor``."""
