"""Which schedule a server runs: staggered, in lockstep, or rolling."""

import logging
from typing import TYPE_CHECKING

import torch

from sglang_ext import options
from sglang_ext.managers import full_tier
from sglang_ext.managers.checked_drafts import CheckedDrafts
from sglang_ext.managers.draft_length import DraftLength, FixedLength
from sglang_ext.managers.lockstep import Lockstep
from sglang_ext.managers.pace import Pace
from sglang_ext.managers.staggered import Staggered
from sglang_ext.managers.steps import Steps
from sglang_ext.managers.verify_pass import VerifyPass

if TYPE_CHECKING:
    from sglang_ext.managers.worker import KVWorker

logger = logging.getLogger(__name__)


def schedule_of(worker: "KVWorker") -> Staggered | Lockstep:
    """The one that ``--kv-schedule`` asks for, told in the log with what it serves."""
    args = worker.server_args
    schedule = _lockstep(worker) if args.kv_schedule == "lockstep" else Staggered(worker)
    told = args.kv_mode, worker.methods, args.kv_draft_length, args.kv_schedule
    logger.info("sglang-ext: --kv-mode %s, %s, draft length %s, schedule %s", *told)
    return schedule


def _lockstep(worker: "KVWorker") -> Lockstep:
    """The schedule of rounds: rolling where full KV may leave the device."""
    args = worker.server_args
    pace, steps = _pace(worker), Steps(worker)
    verify_pass = VerifyPass(worker, steps, worker.captured.full, worker.simulation)
    if options.offloads(args):
        return full_tier.rolling(worker, pace, steps, verify_pass)
    checked, history = None, worker.requests.history
    if history is not None:
        checked = CheckedDrafts(steps, history, args.kv_ngram_tokens, worker.captured.checks)
    return Lockstep(worker, pace, steps, verify_pass, checked)


def _pace(worker: "KVWorker") -> Pace:
    args = worker.server_args
    longest = options.longest_draft(args)
    auto = args.kv_draft_length == "auto"
    lengths = DraftLength(longest, options.verify_widths(args)) if auto else FixedLength(longest)
    return Pace(lengths, torch.device(worker.model_runner.device), worker.metrics, worker.ranks)
