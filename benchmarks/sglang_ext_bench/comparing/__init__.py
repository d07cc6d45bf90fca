"""Compares verified decoding with stock SGLang, token by token."""
