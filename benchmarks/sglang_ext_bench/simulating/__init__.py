"""Full KV in host memory, simulated without a model."""
