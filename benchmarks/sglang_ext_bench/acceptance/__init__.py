"""Acceptance of drafts, computed with transformers, without a server."""
