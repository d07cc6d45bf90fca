"""How slots store compressed KV: plain tokens, quantized blocks, cells of uneven heads, pointers."""
