"""Quantized keys of 8 or 4 bits for scoring: quantization of new keys, and products of queries with quantized keys."""
