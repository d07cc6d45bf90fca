"""What a finished request's ``meta_info`` tells about drafting, in the frontend."""

from collections.abc import Callable
from typing import Any

from sglang_ext.config.benchmark_options import probability_of
from sglang_ext.config.method_options import offers
from sglang_ext.hooks.request_checks import sampling_params_of
from sglang_ext.managers.meta_info import describe


def add_kv_fields(original: Callable, manager, meta_info: dict[str, Any], recv_obj, i: int) -> None:
    """Hook around ``_calculate_spec_decoding_metrics``: ``kv_*`` fields of a finished request.

    ``kv_verifies`` verifications that checked drafts, ``kv_drafts`` tokens drafted for them,
    ``kv_accepted`` of these accepted, ``kv_accept_length`` tokens gained per verification (accepted
    drafts and the verifier's own), ``kv_accept_histogram`` and ``kv_offer_histogram`` (element k:
    verifications that accepted, or were offered, exactly k drafts), ``kv_fallback`` why the request
    was last served with full KV, None when it drafted, ``kv_compressor`` the method that made its
    compressed copy, None without one. Where a benchmark forces acceptance, and there alone,
    ``kv_simulated_acceptance``: the probability with which the request's drafts were accepted.
    """
    histograms = recv_obj.spec_cap_lens_histogram
    suffixes = [offer.suffix for offer in offers(manager.server_args)]
    meta_info.update(describe(histograms[i] if histograms else [], suffixes))
    forced = manager.server_args.kv_bench_acceptance
    if forced is not None:
        asked = sampling_params_of(manager, manager.rid_to_state[recv_obj.rids[i]].obj).get("custom_params")
        meta_info["kv_simulated_acceptance"] = probability_of(forced, asked)
