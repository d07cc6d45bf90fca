"""Which tokens of a context each KV head reads in the next step: coming queries, scores by them, the best. Tensors in, tensors out."""
