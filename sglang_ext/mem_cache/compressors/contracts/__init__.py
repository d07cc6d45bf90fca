"""Interfaces of compression methods, checks of their results, and the registry."""
