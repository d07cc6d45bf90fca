"""Cache ranks on GPUs of their own, beside an inference rank on a GPU: they hold the keys of its requests, in lossy full KV.

arena.py has the memory that both map, mapped_arena.py how the cache rank sees it, device_rank.py the cache rank, rank_steps.py what of its
choices becomes copies, at_rank.py what is known of each request there, device_start.py where they run and what they are told. What else
they say to each other is protocol.py's.
"""
