"""Decode throughput and latency of stock SGLang and of verified decoding, and the limits of memory bandwidth."""
