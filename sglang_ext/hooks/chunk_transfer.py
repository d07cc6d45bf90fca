"""Sends a chunk of a prompt from a prefill server while the next chunk is computed.

SGLang's overlapped loop launches a forward, makes later device work of the scheduler wait for it, and sends the previous forward's chunk.
To send, it reads the chunk's slots with a copy that waits for the new forward, and that blocks the device for all other threads of the
process. So a chunk would be sent one forward late, and no chunk would be encoded during a forward.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

# Attribute of SGLang's scheduler: an event of its stream, after its device work before the last launch.
LAUNCH_EVENT_ATTRIBUTE = "kv_before_launch"


def note_launch(original: Callable, scheduler: "Scheduler") -> None:
    """Hook around ``Scheduler._apply_war_barrier``, which follows each launch: records the scheduler's earlier work."""
    if torch.cuda.is_available():
        setattr(scheduler, LAUNCH_EVENT_ATTRIBUTE, torch.cuda.current_stream().record_event())
    original(scheduler)


def send_kv_chunk(original: Callable, scheduler: "Scheduler", req: "Req", last_chunk: bool = False, end_idx: int | None = None) -> None:
    """Hook around ``send_kv_chunk``: reads the slots of a chunk on a second stream, in parallel with the launched forward.

    This does not apply to the last chunk, nor to a prefix from the cache: the scheduler has written their slots since, after that forward.
    This function waits for them before the copy. SGLang treats a chunk whose forward may still run as a prefix of the next chunk, and would
    launch the next one only after that forward. Such a chunk is sent with its result instead, after the launch. If no forward was launched
    after the one whose results are processed, there is nothing to wait for.
    """
    from sglang_ext.managers.kv_transfer.progressive.sender import ProgressiveSender

    before, sender = getattr(scheduler, LAUNCH_EVENT_ATTRIBUTE, None), req.disagg_kv_sender
    if before is None or not scheduler.result_queue or not isinstance(sender, ProgressiveSender):
        original(scheduler, req, last_chunk, end_idx)
    elif sender.is_sending_prefix and end_idx == req.tmp_end_idx:
        sender.defer_prefix()
    elif last_chunk or sender.is_sending_prefix:
        torch.cuda.current_stream().record_event().synchronize()
        original(scheduler, req, last_chunk, end_idx)
    else:
        with sender.kv_mgr.pool.on_side_stream(before):
            original(scheduler, req, last_chunk, end_idx)
