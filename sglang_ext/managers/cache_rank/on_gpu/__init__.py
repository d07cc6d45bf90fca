"""Cache ranks on GPUs, for an inference rank on a GPU. They hold the keys of its requests, and in mode lossy their full KV.

- `exchange_buffer.py`: memory that both sides map, and the inference rank's access to it.
- `mapped_exchange_buffer.py`: the cache rank's access to it.
- `gpu_launch.py`: starts the ranks. `gpu_client.py`: client on the inference rank. `gpu_requests.py`: state of each request there.
- `interval_tuner.py`: the selection interval. `gpu_counters.py`: counters of the device.
- `gpu_selection_server.py`, `selection_runner.py`, `gpu_keys.py`: the cache rank.

Messages are those of cache_rank/protocol.py.
"""
