"""Interfaces of compression methods, the checks of what they return, and the registry."""
