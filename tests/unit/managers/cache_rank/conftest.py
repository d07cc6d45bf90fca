"""Fixtures of the cache ranks' tests."""

from forked_rank import forked_ranks  # noqa: F401
