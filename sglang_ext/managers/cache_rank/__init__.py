"""Cache ranks: processes beside the inference rank that hold requests' keys, and choose the tokens of their next steps (AsyncSpade).

protocol.py has what both sides say, shared_memory.py where both write, key_store.py and selection_server.py the cache rank, process.py its start and end,
link.py one rank as the inference rank sees it, leases.py whose keys it holds, choices.py what of it becomes copies.
"""
