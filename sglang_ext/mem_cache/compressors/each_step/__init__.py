"""Published methods that select tokens for each step, one per file. They are compared with spade.py."""
