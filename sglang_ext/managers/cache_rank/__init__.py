"""Cache ranks (AsyncSpade): processes that hold the keys of requests and select the tokens that the next decode steps read.

Shared by both sides:

- `protocol.py`: messages. `shared_memory.py`: memory that both processes map.

Inference rank:

- `feature.py`: what the worker needs. `launch.py`, `process.py`: start and end the rank processes. `rank_link.py`: connection to one rank.
- `leases.py`: memory of requests at a rank. `client.py`: base of the clients.
- `cpu_client.py`, `cpu_requests.py`, `step_observer.py`: client for ranks on CPUs. `on_gpu/`: ranks on GPUs.

Cache rank:

- `__main__.py`, `selection_server.py`: the server loop. `key_store.py`: its blocks of keys and values.
"""
