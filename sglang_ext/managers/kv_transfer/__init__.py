"""Progressive transfer of KV under SGLang's prefill-decode disaggregation: anchors first, residuals when no anchor waits.

    settings.py       what both ends must agree on, and the refusal that names what differs
    wire.py           the messages, their bounds and their bytes
    page_hashes.py    names of pages by the tokens up to their end
    limits.py         sizes and times of a link
    endpoints.py      where links listen, what killed servers left there, and the keys of links between machines
    pacing.py         a token bucket
    outgoing_queue.py     the sender's rooms: what goes next, and who is told
    connection.py     one connection until it breaks, as each end knows it
    link.py           the sender's end: a thread that goes from connection to connection
    incoming_rooms.py     the receiver's rooms: what of each has arrived, checked and written, until its end
    assembly.py       parts of pages put together from frames
    link_server.py    the receiver's end: a thread that reads all links, and one that writes
    link_metrics.py   what either end tells on /metrics
    prompt_queries.py        a prompt's newest queries, which compressors choose by
    arriving_full_kv.py       requests that decode before all of their KV is here
    timeline.py       what became of requests, and when, for benchmarks

A **room** is one request on its way (SGLang's ``bootstrap_room``). A **part** is what travels as one: of one page of the
codec and one range of layers, the anchor's bytes or the residual's; or the room's auxiliary record. Parts travel in frames.
A link is the data plane alone: SGLang's control plane tells the decode side's endpoint to the prefill side.
"""
