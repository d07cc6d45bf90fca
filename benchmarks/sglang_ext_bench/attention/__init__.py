"""Attention of one layer, without a server and a model: how long it takes, what it reads, and how far off it is, by how KV is kept."""
