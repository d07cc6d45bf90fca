"""What becomes of a request whose stream has ended, as the client was answered or has gone.

SGLang aborts it two seconds later, by its id, in case the client has gone. The id may be another request's by then, as of a client that
sends again what failed, and would get an abort for it.
"""

import asyncio
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from fastapi import BackgroundTasks

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

# As SGLang waits.
SECONDS = 2.0


def abort_unfinished(original: Callable, manager: "TokenizerManager", obj: "GenerateReqInput") -> BackgroundTasks:
    """Hook around ``TokenizerManager.create_abort_task``: what was not finished when the stream ended is aborted, and nothing else.

    Args:
        original: SGLang's own, which is not called.
        manager: of the server.
        obj: the request that is streamed.
    """
    tasks = BackgroundTasks()
    tasks.add_task(_abort, manager, obj)
    return tasks


async def _abort(manager: "TokenizerManager", obj: "GenerateReqInput") -> None:
    # A request has its ids once SGLang has begun to look at it; one that it refused may have none.
    rids = [obj.rid] if isinstance(obj.rid, str) else obj.rid or []
    unfinished = {rid: manager.rid_to_state[rid] for asked in rids for rid in _there(manager, asked)}
    await asyncio.sleep(SECONDS)
    for rid, state in unfinished.items():
        if manager.rid_to_state.get(rid) is state:
            manager.abort_request(rid)


def _there(manager: "TokenizerManager", rid: str) -> Iterator[str]:
    """Under which ids a request is there: its own, and once it was expanded to several answers (n > 1) those of these, in its place."""
    for each in (rid, *manager.logical_rid_to_child_rids.get(rid, ())):
        if each in manager.rid_to_state:
            yield each
