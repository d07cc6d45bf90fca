"""SGLang with the plugin loaded, as each of its processes has it; a tiny model."""

from hypothesis import settings
from method_registry import own_methods  # noqa: F401
from model_fixtures import plugin, tiny  # noqa: F401

# How long an example takes says how busy the machine is.
settings.register_profile("without deadlines", deadline=None)
settings.load_profile("without deadlines")
