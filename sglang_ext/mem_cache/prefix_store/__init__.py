"""A store of prefixes that servers share, and that survives them: the backends that hold its objects."""
