"""Rows of K and V that a cache rank on another GPU sends: of what it chose those that a copy lacks, in the place of what the copy needs no
more (mem_cache/compressed/row_exchange.py has the same in PyTorch).

send_rows.py has the kernels of the cache rank, which find, of tokens that are marked, what comes and what goes, and write K, V and where
they go to an arena of the inference rank's GPU; receive_rows.py those of the inference rank, which copy them to the slots of the copy, and to
its record, where the answer was taken. A *move* is a place of a copy and the position of the token whose row comes there. In an arena a
*pair* is a layer and a KV head, counted layer by layer; of what is marked it is a layer and a request (selection/exact_logits.py:load_pair).
"""
