"""SGLang's transfer backend ``progressive``: its connection classes, on top of the links of the parent package.

    pool_buffers.py     the KV pool and the auxiliary records, built from the pointers that SGLang passes to transfer backends
    page_codec.py       interface of a page codec
    raw_codec.py        pages without encoding
    host_blocks.py      host memory for pages that wait for a link
    lynx_codec.py       pages as anchor and residual
    codecs.py           selects the codec
    control.py          control-plane messages: a room's destination, and its end
    compatibility.py    checks that two servers are compatible, and endpoints of links
    handshakes.py       prefill: matches the senders and the receivers of rooms
    decode_peers.py     prefill: the link to a decode rank, and the threads that encode pages and offer them to the link
    room_encoder.py     prefill: one outgoing room
    room_writer.py      decode: one incoming room
    prefill_servers.py  decode: the known prefill servers, fetched in background threads
    manager.py          one per rank: owns these parts, receives control messages
    sender.py           SGLang's interface to an outgoing room
    receiver.py         SGLang's interface to an incoming room

Both sides call a request a **room**. A transfer has four steps:

1. The decode side allocates slots and registers the room with its ``LinkServer``.
2. It sends metadata to the prefill side, which opens the room on its link.
3. The prefill side encodes one page after the other.
4. It returns the request's KV slots to SGLang once the whole room is in the link's own buffers.

These buffers are bounded. When residuals fill them, pages wait in the pool for their residuals, and anchors of all rooms continue.
"""
