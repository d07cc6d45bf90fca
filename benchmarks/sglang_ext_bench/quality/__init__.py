"""Quality of compressed KV: lossy and verified servers against stock, and attention outputs."""
