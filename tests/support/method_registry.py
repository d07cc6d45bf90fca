"""Keeps methods that a test registers out of other tests."""

from collections.abc import Iterator

import pytest

from sglang_ext.config import method_options
from sglang_ext.mem_cache.compressors import catalogue, registry


@pytest.fixture
def own_methods() -> Iterator[None]:
    """For tests that name methods of users' own: afterwards only the built-in ones are registered."""
    registered = [(known, dict(known)) for known in (registry.COMPRESSORS, registry.QUANTIZERS)]
    yield
    for known, before in registered:
        known.clear()
        known.update(before)
    registry.USER_METHODS.clear()
    for cached in (catalogue.parse, catalogue._numbers, registry._registered, method_options._offers):
        cached.cache_clear()
