"""Commands that prepare what servers read."""
