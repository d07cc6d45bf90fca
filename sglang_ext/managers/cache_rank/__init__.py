"""Cache ranks (AsyncSpade): processes that hold the keys of requests and select the tokens that the next decode steps read.

Shared by both sides:

- `protocol.py`: messages. `exchange_buffer.py`: memory that both processes map; `mapped_exchange_buffer.py` is the rank's access to it.

Inference rank:

- `feature.py`: what the worker needs; it starts the ranks. `rank_link.py`: the process of one rank, and the connection to it.
- `leases.py`: the requests at a rank, and their memory there.
- `client.py`: base of the clients. `stepwise_client.py`: ranks on GPUs. `layerwise_client.py`: on CPUs.

Cache rank:

- `__main__.py`, `selection_server.py`: the server loop. `key_store.py`: its blocks of keys and values. `selection_runner.py`: selections.
"""
