"""Builds the decode loop that the flags ask for."""

import logging
from typing import TYPE_CHECKING

import torch

from sglang_ext import options
from sglang_ext.managers import full_tier
from sglang_ext.managers.draft_length import DraftLength, FixedLength
from sglang_ext.managers.pace import Pace
from sglang_ext.managers.spec_decode.loop import DecodeLoop
from sglang_ext.managers.spec_decode.round import RoundPlanner
from sglang_ext.managers.spec_decode.steps import Steps
from sglang_ext.managers.spec_decode.turns import OnDevice
from sglang_ext.managers.spec_decode.verifier import Verifier

if TYPE_CHECKING:
    from sglang_ext.managers.worker import KVWorker

logger = logging.getLogger(__name__)


def decode_loop(worker: "KVWorker") -> DecodeLoop:
    """That of a worker whose views are built, told in the log with what it serves."""
    args, steps = worker.server_args, Steps(worker)
    turns, policy = full_tier.offloading(worker) if options.offloads(args) else (OnDevice(), None)
    longest = options.longest_draft(args)
    planner = RoundPlanner(worker.views, turns, worker.stride - 1, longest, worker.lossy, worker.queries.open_to)
    auto = args.kv_draft_length == "auto"
    lengths = DraftLength(longest, options.verify_widths(args)) if auto else FixedLength(longest)
    pace = Pace(lengths, torch.device(worker.model_runner.device), worker.metrics, worker.ranks)
    logger.info("sglang-ext: --kv-mode %s, %s, draft length %s", args.kv_mode, worker.methods, args.kv_draft_length)
    return DecodeLoop(worker, pace, steps, Verifier(worker, steps, worker.captured.full, worker.simulation), planner, policy)
