"""SGLang's transfer backend ``progressive``: its connection classes over the links of the room above.

    pool_buffers.py   the pool and the auxiliary records, from the pointers that SGLang hands to transfer backends
    page_codec.py     what a codec of pages does
    raw_codec.py      pages as they are
    host_blocks.py    host memory for pages that wait for a link
    lynx_codec.py     pages as anchor and residual
    codecs.py         which of them serves
    control.py        messages of SGLang's control plane: where a room goes, and that it ended
    compatibility.py      what two servers must have alike, and endpoints of links
    handshakes.py     prefill: matches the senders and the receivers of rooms
    decode_peers.py           prefill: the link to a decode rank, and the threads that encode pages and put them into the link
    room_encoder.py      prefill: one room on its way out
    room_writer.py  decode: one room on its way in
    prefill_servers.py  decode: the prefill servers that are known, fetched in background threads
    manager.py        one a rank: owns these parts, receives control messages
    sender.py         SGLang's side of a room that is sent
    receiver.py       SGLang's side of a room that is received

A request is a **room** on both sides. The decode side allocates slots, registers the room with its ``LinkServer`` and sends
metadata to the prefill side, which opens the room on its link, encodes page after page, and gives SGLang the KV back once all
of a room is in the link's own buffers. These are bounded: where residuals fill them, pages wait in the pool for theirs, and
anchors of all rooms go on.
"""
