"""Kernels of token selection, launched by select_tokens.py, and of Quest's page selection, launched by attention (quest_pages.py).

- `exact_logits.py`: logits of queries with the pool's keys, and normalizers of each chunk of a context. For quantized keys:
  quantized_keys/quantized_logits.py.
- `token_marks.py`: computes scores from the logits, marks the highest, and writes the marked tokens.
- `rotate_queries.py`: rotates queries to later positions.
"""
