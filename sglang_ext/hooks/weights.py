"""Refuses updates of weights that fail: the client gets status 400 with the reason, and the server keeps running.

SGLang's scheduler ends when the handler of an update raises an error. Examples are an uninitialized group, a tensor of another shape, and
bytes that are no tensors. SGLang also asserts that the prefix cache could be flushed, which needs an idle server.
"""

from collections.abc import Callable

import torch.distributed
from sglang.srt.managers import io_struct
from sglang.srt.managers.io_struct import BaseReq, UpdateWeightsFromIPCReqInput, UpdateWeightsFromTensorReqInput
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

# Updates whose handler in SGLang ends with a barrier of all ranks.
UPDATES_WITH_BARRIER = UpdateWeightsFromIPCReqInput, UpdateWeightsFromTensorReqInput


def refuse_update(original: Callable, manager: SchedulerWeightUpdaterManager, recv_req: BaseReq) -> BaseReq:
    """Hook around the handlers of ``SchedulerWeightUpdaterManager``: answer with the reason where SGLang's handler raises.

    ``recv_req``, a ``...ReqInput``, is the same on all ranks. The returned ``...ReqOutput`` is a failure on all ranks if the update failed
    on one, since they would compute with different weights.
    """
    if getattr(recv_req, "flush_cache", False) and not manager.is_fully_idle():
        return _failed(
            recv_req,
            "a request runs or waits, and flush_cache is true, which needs an idle server; try again when no request is left (POST "
            "/abort_request with abort_all ends all), or pass flush_cache false to keep what was computed with the old weights",
        )
    try:
        outcome = original(manager, recv_req)
    except Exception as error:  # Whatever unpickling, a model's loader or a process group raises.
        outcome = _failed(
            recv_req,
            f"{str(error) or repr(error)} ({type(error).__name__}). The server keeps running. If it loaded some weights before this error, "
            "load all of them again",
        )
        if isinstance(recv_req, UPDATES_WITH_BARRIER):
            torch.distributed.barrier(group=manager.tp_cpu_group)
    ranks = torch.distributed.get_world_size(group=manager.tp_cpu_group)
    failures: list[str | None] = [None if outcome.success else outcome.message] * ranks
    if ranks > 1:
        torch.distributed.all_gather_object(failures, failures[0], group=manager.tp_cpu_group)
    failure = next((f"rank {rank}: {message}" for rank, message in enumerate(failures) if message is not None), None)
    return outcome if failure is None or not outcome.success else _failed(recv_req, failure)


def _failed(recv_req: BaseReq, reason: str) -> BaseReq:
    name = type(recv_req).__name__
    outcome: type = getattr(io_struct, name.replace("ReqInput", "ReqOutput"))
    return outcome(success=False, message=f"{name.removesuffix('ReqInput')} failed: {reason}.")
