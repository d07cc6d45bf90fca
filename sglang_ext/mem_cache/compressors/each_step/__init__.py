"""Methods that select tokens for each step by one of mem_cache/selection/'s scores: their common frame, and Quest."""
