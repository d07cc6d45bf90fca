"""Fixtures of the benchmarks' tests."""

from model_fixtures import demo_model, model, plugin, tiny  # noqa: F401
