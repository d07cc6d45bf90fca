"""Fixtures of the benchmarks' tests."""

from method_registry import own_methods  # noqa: F401
from model_fixtures import demo_model, model, plugin, tiny  # noqa: F401
