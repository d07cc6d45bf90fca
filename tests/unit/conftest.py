"""SGLang with the plugin loaded, as each of its processes has it."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def plugin() -> None:
    """Load SGLang's plugins: the arguments class is replaced and the registries are filled."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
