"""Commands that run beside a server, and the helpers that they share."""

ROLES = ("prefill", "decode")
"""Roles of the two servers in prefill-decode disaggregation."""


class CommandError(Exception):
    """A command cannot run. The message names the cause and the remedy."""
