"""Log lines of a server that is ready: mode, method, and its address with a request to paste."""

import logging
from collections.abc import Callable

from sglang_ext.command_line import sample_request
from sglang_ext.config.method_options import OfferedMethod, offered_methods
from sglang_ext.config.options import BACKEND, QUANTIZED
from sglang_ext.config.rules import KVServerArgs
from sglang_ext.config.selection_options import has_selector, max_selected_tokens, num_cache_ranks, score_bits, selection_interval
from sglang_ext.mem_cache.compressors import catalogue
from sglang_ext.mem_cache.selection.predictors import CurrentQuery
from sglang_ext.mem_cache.selection.scoring_keys import EXACT

logger = logging.getLogger(__name__)

MODE_MEANINGS = {
    "verified": "drafts on compressed KV, verified on full KV: answers are stock's",
    "lossy": "decoding on compressed KV: answers are approximate",
}
IN_8_BITS = "drafts on compressed KV, verified on full KV received in 8 bits (--kv-reference int8): answers are those of such KV"
# For disaggregated servers: the server's role, and how to send requests.
ROLE_MEANINGS = {
    "prefill": "prefill server: it computes prompts, and decode servers generate the answers",
    "decode": "decode server: prompts' KV comes from prefill servers",
}
ASK_ROUTER = "send requests to SGLang's router, which forwards each to a prefill and a decode server"
ON_CPU = "; on a CPU drafting demonstrates correctness, not speed: an answer takes about twice stock's time or more"
CHOOSING_ON_CPU = "; on a CPU selecting tokens demonstrates the method, not speed: an answer may take longer than stock's"


def log_when_ready(
    wait: Callable[..., None], server_args: KVServerArgs, launch_callback: Callable[[], None] | None = None, *rest: object, **named: object
) -> None:
    """Hook around SGLang's wait for the server to be ready: logs three lines after SGLang's own, and then calls ``launch_callback``."""

    def ready() -> None:
        try:
            for line in status_lines(server_args):
                logger.info("sglang-ext: %s", line)
        finally:
            if launch_callback is not None:
                launch_callback()

    wait(server_args, ready, *rest, **named)


def status_lines(args: KVServerArgs) -> tuple[str, str, str]:
    """Mode, method and address of a server, one line each."""
    role = args.disaggregation_mode
    means = MODE_MEANINGS[args.kv_mode]
    if args.kv_mode == "verified" and role != "null" and args.disaggregation_transfer_backend == BACKEND and args.kv_reference == "int8":
        means = IN_8_BITS
    slow = ""
    if args.device == "cpu" and (args.kv_mode == "verified" or has_selector(args)):
        slow = ON_CPU if args.kv_mode == "verified" else CHOOSING_ON_CPU
    methods = ", ".join(f"{offer.name} ({_describe_budget(args, offer)})" for offer in offered_methods(args))
    drafts = f", draft length {args.kv_draft_length}" if args.kv_mode == "verified" else ""
    prompts = ", prompts on quantized KV" if args.kv_prefill == QUANTIZED else ""
    request = sample_request(args.url(), takes_text=not args.skip_tokenizer_init, has_key=bool(args.api_key))
    return (
        f"mode {args.kv_mode}: {means}{slow}",
        f"compressor {methods}{drafts}{prompts}" + (f"; {ROLE_MEANINGS[role]}" if role in ROLE_MEANINGS else ""),
        f"listening on {args.url()}; " + (ASK_ROUTER if role in ROLE_MEANINGS else f"try: {request}"),
    )


def _describe_budget(args: KVServerArgs, offer: OfferedMethod) -> str:
    """The part of a context that a method keeps, its bits, and how tokens are selected if flags set it."""
    most = max_selected_tokens(args)
    found = [f"{most} tokens" if most else f"budget {offer.budget:g}"]
    if offer.quant_method:
        found.append(f"{catalogue.code_bits(offer.quant_method, args.kv_bits)} bits")
        partition = catalogue.partition_size(offer.quant_method, args.kv_partition)
        found += [] if partition is None else [f"partitions of {partition}"]
    # A server that only prefills selects nothing.
    if offer.drop_method not in catalogue.per_step_methods() or args.disaggregation_mode == "prefill":
        return ", ".join(found)
    if selection_interval(args) > 1:
        found.append(f"every {selection_interval(args)} steps")
    if offer.drop_method == catalogue.SPADE:
        if args.kv_select_by != CurrentQuery.name:
            found.append(f"by {args.kv_select_by} queries")
        if (bits := score_bits(args)) != EXACT:
            found.append(f"keys in {bits} bits")
        if count := num_cache_ranks(args):
            found.append(f"{count} cache rank{'s' * (count > 1)}")
    return ", ".join(found)
