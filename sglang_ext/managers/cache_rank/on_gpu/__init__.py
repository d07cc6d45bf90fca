"""Cache ranks on GPUs of their own, beside an inference rank on a GPU: they hold the keys of its requests, in lossy full KV.

exchange_buffer.py has the memory that both map, mapped_exchange_buffer.py how the cache rank sees it, gpu_selection_server.py the cache rank, gpu_client.py what of its
choices becomes copies, gpu_requests.py what is known of each request there, gpu_launch.py where they run and what they are told. What else
they say to each other is protocol.py's.
"""
