"""Flags: what they may be, what follows from them, what is refused and why."""
