"""Whose full KV is where, and when it is loaded: reservations, costs, policy."""
