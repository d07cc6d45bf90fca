"""Cache ranks (AsyncSpade): processes that hold the keys of requests and select the tokens that the next decode steps read.

Shared by both sides:

- `protocol.py`: messages. `exchange_buffer.py`: memory that both processes map; `mapped_exchange_buffer.py` is the rank's access to it.

Inference rank:

- `feature.py`: what the worker needs. `launch.py`, `process.py`: start and end the rank processes. `rank_link.py`: connection to one rank.
- `leases.py`: memory of requests at a rank. `rank_requests.py`: state of a request.
- `client.py`: base of the clients. `stepwise_client.py`, `interval_tuner.py`: ranks on GPUs. `layerwise_client.py`, `timeline.py`: on CPUs.

Cache rank:

- `__main__.py`, `selection_server.py`: the server loop. `key_store.py`: its blocks of keys and values. `selection_runner.py`: selections.
"""
