"""An output ends where it would if its tokens came one at a time.

For tokens that come together, SGLang looks for the length first, then for stop strings in the order in
which they were given, then for stop tokens: of two ends it may take the later one. So what follows the first end is cut off before it
looks (rounds.py), and it looks at the last token alone.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def check_finish_at_last_token(original: Callable, req: "Req", new_accepted_len: int = 1) -> None:
    """Hook around ``update_finish_state``: of tokens that come together the last is looked at, as if it came alone.

    None before it ends the output (:func:`count_tokens_to_finish`). An abort that came meanwhile ends what has no end of its own.
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
    """Of ``tokens`` that come together, those up to the first that ends the output. The request stays as it is."""
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
