"""Full KV in host memory: pages, streams, checksums."""
