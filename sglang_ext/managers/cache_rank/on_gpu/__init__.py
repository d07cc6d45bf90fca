"""Cache ranks on GPUs of their own, beside an inference rank on a GPU: full KV stays there, and they hold keys alone.

arena.py has the memory that both map, device_rank.py the cache rank, rank_steps.py what of its choices becomes copies, device_start.py
where they run and what they are told. What they say to each other beside that is protocol.py's, as on a CPU.
"""
