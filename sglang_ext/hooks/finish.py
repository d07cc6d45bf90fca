"""An output ends where it would if its tokens came one at a time.

For tokens that come together, SGLang looks for the length first, then for stop strings in the order in
which they were given, then for stop tokens: of two ends it may take the later one.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.session.session_controller import Session


def end_at_first(original: Callable, req: "Req", new_accepted_len: int = 1) -> None:
    """Hook around ``update_finish_state``: look for an end after each new token.

    Tokens after the end stay in ``output_ids``, as their KV is in the pool; ``finished_len`` excludes
    them. An abort that came meanwhile ends what has no end of its own.
    """
    if new_accepted_len <= 1 or req.finished():
        original(req, new_accepted_len)
        return
    abort, req.to_finish = req.to_finish, None
    newest = req.output_ids[-new_accepted_len:]
    del req.output_ids[-new_accepted_len:]
    count = 0
    while count < new_accepted_len and not req.finished():
        req.output_ids.append(newest[count])
        original(req, 1)
        count += 1
    if abort and not req.finished():
        req.to_finish = abort
        original(req, 1)
    elif req.finished() and req.finished_len is None:
        req.finished_len = len(req.output_ids)
    req.output_ids.extend(newest[count:])


def go_on_from_end(original: Callable, session: "Session", req: "TokenizedGenerateReqInput", *args, **more) -> "Req":
    """Hook around ``Session.create_req``: a turn goes on from where the one before ended.

    SGLang takes all of that one's ``output_ids``, which hold what was accepted after its end; nobody else reads these by now.
    """
    node = session.req_nodes.get(req.session_params.rid)
    if node is not None and node.req.finished() and node.req.finished_len is not None:
        del node.req.output_ids[node.req.finished_len :]
    return original(session, req, *args, **more)
