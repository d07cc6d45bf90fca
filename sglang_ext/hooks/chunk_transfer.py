"""Chunks of a prompt leave a prefill server while the next one is computed.

SGLang's overlapped loop launches a forward, has what its scheduler then does on the device wait for it, and sends the chunk of the forward
before: it reads in which slots that lies, behind the one that was just launched, by a copy that keeps every other thread of the process from
the device. So a chunk would be sent one forward late, and while a forward runs none would be encoded.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

# The attribute of SGLang's scheduler that holds an event of its stream: what it did on the device before the newest launch.
LAUNCH_EVENT_ATTRIBUTE = "kv_before_launch"


def note_launch(original: Callable, scheduler: "Scheduler") -> None:
    """Hook around ``Scheduler._apply_war_barrier``, which follows each launch: what the scheduler did before does not wait for it."""
    if torch.cuda.is_available():
        setattr(scheduler, LAUNCH_EVENT_ATTRIBUTE, torch.cuda.current_stream().record_event())
    original(scheduler)


def send_kv_chunk(original: Callable, scheduler: "Scheduler", req: "Req", last_chunk: bool = False, end_idx: int | None = None) -> None:
    """Hook around ``send_kv_chunk``: slots of a chunk that others follow are read beside the forward that was launched.

    Those of the last one are not, nor those of a prefix that was found in the cache: the scheduler has placed them since, behind that
    forward. They are waited for before the copy. To SGLang a chunk whose forward may still run is such a prefix of the next one, which
    would be launched only once that is over: it goes with its result, which follows the launch. Where no forward was launched after the one
    whose results are looked at, there is nothing to wait for.
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
