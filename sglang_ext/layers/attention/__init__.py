"""Attention backends for verifications, prompts, and draft steps over compressed KV."""
