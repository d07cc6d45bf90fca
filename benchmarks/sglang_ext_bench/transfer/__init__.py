"""``sglang-ext-bench transfer``: start of decoding, and decode speed, during a KV transfer."""
