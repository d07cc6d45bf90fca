"""Verified decoding against stock SGLang, token by token."""
