"""Keys in 8 or 4 bits for scoring: how they are coded as they are written, and queries multiplied with them."""
