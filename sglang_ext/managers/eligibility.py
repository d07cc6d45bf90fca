"""Which requests can be drafted and verified exactly; the others are served with full KV.

:data:`SAMPLING_FIELDS` names every field of SGLang's ``SamplingParams`` and what becomes of it, so that
a field that a later SGLang adds is noticed (tests/unit/test_eligibility.py).
"""

from typing import TYPE_CHECKING

from sglang_ext.core import FALLBACK_REASONS
from sglang_ext.managers.spec_decode.grammar import can_roll_back

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

VERIFIED = "verified"
# What a field does to a request: "verified" (drafted, and exact by verification), or the reason for
# which a request that uses it is served with full KV.
SAMPLING_FIELDS: dict[str, str] = {
    "max_new_tokens": VERIFIED,
    "stop": VERIFIED,
    "stop_token_ids": VERIFIED,
    "stop_regex": VERIFIED,
    "temperature": VERIFIED,
    "top_p": VERIFIED,
    "top_k": VERIFIED,
    "min_p": "min-p",
    "frequency_penalty": "penalty",
    "presence_penalty": "penalty",
    "repetition_penalty": "penalty",
    "min_new_tokens": "penalty",
    "n": VERIFIED,
    # Full KV ("grammar") only where the grammar's backend cannot take drafts back.
    "json_schema": VERIFIED,
    "regex": VERIFIED,
    "ebnf": VERIFIED,
    "structural_tag": VERIFIED,
    "ignore_eos": VERIFIED,
    "skip_special_tokens": VERIFIED,
    "spaces_between_special_tokens": VERIFIED,
    "no_stop_trim": VERIFIED,
    "stream_interval": VERIFIED,
    "logit_bias": VERIFIED,
    "sampling_seed": VERIFIED,
    # Read by custom logit processors only.
    "custom_params": VERIFIED,
    "stop_strs": VERIFIED,
    "stop_regex_strs": VERIFIED,
    "stop_str_max_len": VERIFIED,
    "stop_regex_max_len": VERIFIED,
    "is_normalized": VERIFIED,
}


def fallback_reason(req: "Req") -> int:
    """Why a request must be served with full KV, as an index into ``FALLBACK_REASONS``; 0 if not.

    Penalties and ``min_new_tokens`` depend on the tokens before each position, custom logit
    processors on state of their own, some grammar backends cannot take drafts back, and SGLang's
    seeded sampler has no ``min_p``.
    """
    params = req.sampling_params
    if req.grammar is not None and not can_roll_back(req.grammar):
        return FALLBACK_REASONS.index("grammar")
    if (
        params.frequency_penalty
        or params.presence_penalty
        or params.repetition_penalty != 1.0
        or params.min_new_tokens
    ):
        return FALLBACK_REASONS.index("penalty")
    if params.min_p > 0:
        return FALLBACK_REASONS.index("min-p")
    if req.custom_logit_processor is not None:
        return FALLBACK_REASONS.index("custom-logit-processor")
    if req.return_hidden_states:
        return FALLBACK_REASONS.index("hidden-states")
    return 0
