"""The plugin's only entry point."""


def register() -> None:
    """Placeholder until the arguments exist."""
