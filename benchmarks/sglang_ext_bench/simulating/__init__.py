"""Simulation of verified decoding with full KV in host memory, without a model."""
