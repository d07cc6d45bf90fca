"""Ends an output where it would end if its tokens came one at a time.

For several new tokens, SGLang checks the length first, then stop strings in their given order, then stop tokens. Of two ends it may use
the later one. So rounds.py removes the tokens after the first end before SGLang's check, and the check sees the last token only.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def check_finish_at_last_token(original: Callable, req: "Req", new_accepted_len: int = 1) -> None:
    """Hook around ``update_finish_state``: checks the last of several new tokens, as if it came alone.

    No token before it ends the output (:func:`count_tokens_to_finish`). An abort that arrived in between ends an output that has no other
    end.
    """
    if new_accepted_len <= 1:
        original(req, new_accepted_len)
        return
    abort, req.to_finish = req.to_finish, None
    original(req, 1)
    if abort and not req.finished():
        req.to_finish = abort
        original(req, 1)


def count_tokens_to_finish(req: "Req", tokens: list[int]) -> int:
    """Count the tokens up to the first that ends the output, or all. The request is not changed."""
    before, abort, req.to_finish = len(req.output_ids), req.to_finish, None
    for token in tokens:
        req.output_ids.append(token)
        req.update_finish_state(1)
        if req.finished():
            break
    count = len(req.output_ids) - before
    del req.output_ids[before:]
    req.finished_reason = req.finished_len = None
    req.to_finish = abort
    return count
