"""SGLang's transfer backend ``progressive``: its connection classes, on top of the links of the parent package.

    pool_buffers.py     the KV pool and the auxiliary records, built from the pointers that SGLang passes, and host memory for pages
    page_codec.py       interface of a page codec, the codec without encoding, and hashes of pages
    lynx_codec.py       pages as anchor and residual
    compatibility.py    pool, codec, settings and endpoint of a rank, and checks that two servers are compatible
    handshakes.py       control messages, and at the prefill server the match of the senders and the receivers of rooms
    rooms.py            an outgoing room at the prefill server, an incoming room at the decode server, and a prompt's newest queries
    decode_peers.py     prefill: the link to a decode rank, and the threads that encode pages and offer them to the link
    manager.py          one per rank: owns these parts, receives control messages; decode: the known prefill servers
    sender.py           SGLang's interface to an outgoing room
    receiver.py         SGLang's interface to an incoming room

Both sides call a request a **room**. A transfer has four steps:

1. The decode side allocates slots and registers the room with its ``LinkServer``.
2. It sends metadata to the prefill side, which opens the room on its link.
3. The prefill side encodes one page after the other.
4. It returns the request's KV slots to SGLang once the whole room is in the link's own buffers.

These buffers are bounded. When residuals fill them, pages wait in the pool for their residuals, and anchors of all rooms continue.
"""
