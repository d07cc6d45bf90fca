"""What a compressed KV cache costs in quality, and that verified decoding costs nothing."""
