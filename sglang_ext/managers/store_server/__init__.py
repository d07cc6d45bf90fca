"""A prefix store of its own process, which many servers use over TCP: ``python -m sglang_ext.store serve``.

    wire.py         messages, their bounds and their encoding
    server.py       the process: one thread reads all clients, others check objects and use the disk
    tcp_backend.py  the client: the backend of ``--kv-store tcp://ADDRESS:PORT``

Sockets, keys and the rate limit are those of links (managers/kv_transfer). Objects are in ``mem_cache/prefix_store/object_cache.py``.

A client asks, and the server answers each request once. No answer has more than 4 MiB, and a client asks for more only when it has read
earlier answers. So a client on a slow link delays no other client, and holds little memory of the server.
"""
