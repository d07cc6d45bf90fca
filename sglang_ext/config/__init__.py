"""Flags: allowed values, derived settings, and refusals with their reasons."""
