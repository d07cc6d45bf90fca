"""Kernels of token selection (select_tokens.py), and of Quest's page selection, launched by attention (quest_pages.py).

- `exact_logits.py`: rotates queries to later positions; logits of queries with the pool's keys, and normalizers of each chunk of a context.
- `quantized_keys.py`: the same logits with quantized keys, and the quantization of keys.
- `select_tokens.py`: computes scores from the logits, marks the highest, and writes the marked tokens.
"""
