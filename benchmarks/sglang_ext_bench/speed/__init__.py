"""How fast both decode: throughput, latency, and the limits of memory."""
