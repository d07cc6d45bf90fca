"""Links that carry KV, without a model."""
