"""Selection of the tokens that each KV head reads in the next step: predicted queries, scores, top tokens. Tensors in, tensors out."""
