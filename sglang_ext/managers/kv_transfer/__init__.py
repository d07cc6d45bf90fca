"""Progressive KV transfer for SGLang's prefill-decode disaggregation: anchors first, residuals when no anchor waits.

    feature.py            what the worker needs for it, and requests that decode before all of their KV has arrived
    wire.py               messages, their bounds and their encoding, and settings that both ends must agree on
    limits.py             sizes, timeouts and rates of links
    endpoints.py          addresses that links listen on, cleanup of stale sockets, and keys for links between machines
    outgoing_queue.py     the sender's rooms: order of frames, acknowledgements, retransmissions
    connection.py         one connection until it breaks, at either end, and parts that are partly received
    server_socket.py      the socket of a server: who may connect, and calls of other threads
    link.py               the sender's end: a thread that reconnects when a connection breaks
    incoming_rooms.py     the receiver's rooms: parts received, checked and written, until the room ends
    link_server.py        the receiver's end: one thread reads all links, another writes the parts
    transfer_metrics.py   metrics of both ends on /metrics, and timestamps of each request's transfer for benchmarks
    quantized_transfer.py prompts that are transferred as quantized KV
    progressive/          SGLang's transfer backend on top of links

A **room** is the KV transfer of one request (SGLang's ``bootstrap_room``). A **part** is the unit of transfer: the anchor or the residual
of one page of the codec and one range of layers, or the room's auxiliary record. Parts are sent in frames. A link is the data plane only:
SGLang's control plane sends the decode side's endpoint to the prefill side.
"""
