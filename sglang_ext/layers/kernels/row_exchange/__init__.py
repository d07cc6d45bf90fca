"""Kernels that send rows of K and V from a cache rank to an inference rank on another GPU. Selected rows that the compressed KV lacks
replace rows that it no longer needs. mem_cache/compressed/row_exchange.py does the same in PyTorch.

- `send_rows.py`, on the cache rank: finds arriving and leaving rows among the marked tokens. Writes K, V and their targets to the
  exchange buffer.

- `receive_rows.py`, on the inference rank: copies the rows to the slots of the compressed KV if the reply is applied. Updates its record.

A *move* is an index in the compressed KV and the position of the token whose row is stored there. In an exchange buffer, a *pair* is a
layer and a KV head, counted layer by layer. In marks, a pair is a layer and a request (selection/exact_logits.py:load_pair).
"""
