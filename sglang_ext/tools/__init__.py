"""Commands beside the server, and what they share."""

ROLES = ("prefill", "decode")
"""Roles of servers that compute prompts and answers apart."""


class CommandError(Exception):
    """A command cannot do its work. The message says what is wrong and what to do."""
