"""Conditions under which flags have an effect, for the table of flags (flags.py)."""

from typing import TYPE_CHECKING

from sglang_ext.config import options
from sglang_ext.config import selection_options as selection
from sglang_ext.config.method_options import drop_methods
from sglang_ext.config.rules import Condition
from sglang_ext.mem_cache.compressors import catalogue

if TYPE_CHECKING:
    from sglang_ext.arguments import KVServerArgs

BACKEND_OPTION = f"--disaggregation-transfer-backend {options.BACKEND}"
PASS_BACKEND = f"pass {BACKEND_OPTION} with --disaggregation-mode prefill or decode"


def _names_kvzip(args: "KVServerArgs") -> bool:
    return catalogue.KVZIP in drop_methods(args)


HAS_PROGRESSIVE_TRANSFER = Condition(
    BACKEND_OPTION, options.has_progressive_transfer, f"KV is not transferred with {BACKEND_OPTION}", PASS_BACKEND
)
HAS_TIMELINE = Condition(
    f"{BACKEND_OPTION} or --kv-cache-ranks",
    lambda args: options.has_progressive_transfer(args) or (args.kv_mode != "full" and selection.ranks(args) > 0),
    f"there are no cache ranks, and KV is not transferred with {BACKEND_OPTION}",
    f"pass --kv-mode verified --kv-compressor spade --kv-cache-ranks 1, or {PASS_BACKEND}",
)
IS_PREFILL_SERVER = Condition(
    "--disaggregation-mode prefill", lambda args: args.disaggregation_mode == "prefill",
    "--disaggregation-mode is {args.disaggregation_mode}, which only receives", "pass it to the prefill server",
)
IS_VERIFIED = Condition(
    "--kv-mode verified", lambda args: args.kv_mode == "verified", "--kv-mode is {args.kv_mode}, without drafts", "pass --kv-mode verified"
)
BURST_LIMITS_ROUND = Condition(
    "", lambda args: args.kv_max_burst <= options.max_verified_tokens(args),
    lambda args: f"a verification gives at most {options.max_verified_tokens(args)} tokens, fewer than {args.kv_max_burst}",
    lambda args: f"pass at most {options.max_verified_tokens(args)}",
)
HAS_NO_OFFLOAD_OBSTACLE = Condition(
    "--kv-host-gb, --kv-mode verified", lambda args: not any(options.offload_obstacle(args)),
    lambda args: f"all full KV stays on the device, as {options.offload_obstacle(args)[0]}", lambda args: options.offload_obstacle(args)[1],
)
CAN_OFFLOAD_FULL_KV = Condition(
    "--kv-full-tier auto or host", options.can_offload_full_kv,
    "--kv-full-tier is {args.kv_full_tier} and --kv-host-gb {args.kv_host_gb:g}", "pass --kv-full-tier auto and for example --kv-host-gb 16",
)
HAS_SELECTOR = Condition(
    f"--kv-compressor {' or '.join(catalogue.per_step_methods())}", selection.has_selector,
    "--kv-compressor is {args.kv_compressor}", "pass --kv-compressor spade",
)
SELECTS_FEWER_THAN_ALL = Condition(
    "", lambda args: args.kv_select != 1, "--kv-select is 1, the whole context, so that selections leave nothing out",
    "pass a share below 1, for example 0.125, or a number from 2, for example 2048",
)
IS_SPADE = Condition("--kv-compressor spade", selection.is_spade, "--kv-compressor is {args.kv_compressor}", "pass --kv-compressor spade")
HAS_RANKS = Condition("--kv-cache-ranks", lambda args: args.kv_cache_ranks != 0, "--kv-cache-ranks is 0", "pass --kv-cache-ranks 1")
IS_NOT_PREFILL_SERVER = Condition(
    "--disaggregation-mode null or decode", lambda args: args.disaggregation_mode != "prefill",
    "--disaggregation-mode is prefill, which has no decode steps", "pass that to the decode server",
)
HAS_ONLINE_METHOD = Condition(
    "--kv-compressor kvzip or kvzap", lambda args: _names_kvzip(args) or catalogue.KVZAP in drop_methods(args),
    "--kv-compressor is {args.kv_compressor}", f"pass --kv-compressor {catalogue.KVZIP}",
)
NEEDS_ONLINE_METHOD = Condition(
    "", lambda args: _names_kvzip(args) or bool(args.kv_host_gb),
    "--kv-compressor is {args.kv_compressor} and --kv-host-gb 0", "pass --kv-host-gb 16",
)
