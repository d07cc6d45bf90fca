"""Soak test: mixed traffic for minutes, with a check of every answer."""
