"""What the two roles of prefill-decode disaggregation (``--disaggregation-mode``) cannot be combined with, each with reason and remedy.

Both roles take the same methods: the prefill server computes a prompt's KV, SGLang's transfer backend moves it, and the decode
server makes copies of it, drafts and verifies.
"""

from typing import TYPE_CHECKING

from sglang_ext.config.method_options import offers
from sglang_ext.config.refusal import Refusal, switched_on
from sglang_ext.mem_cache.compressors.kvzap import KVzap

if TYPE_CHECKING:
    from sglang_ext.arguments import KVServerArgs


def _decodes(args: "KVServerArgs") -> bool:
    return args.disaggregation_mode == "decode"


def _prefills(args: "KVServerArgs") -> bool:
    return args.disaggregation_mode == "prefill"


ROLES: tuple[Refusal, ...] = (
    Refusal(
        "--disaggregation-mode decode --kv-host-gb",
        lambda args: _decodes(args) and bool(args.kv_host_gb),
        "a server that only decodes keeps no prefixes, and full KV leaves the device by nodes of the prefix tree",
        "leave out --kv-host-gb there; the prefill server takes it",
    ),
    Refusal(
        "--disaggregation-mode decode --kv-compressor kvzap",
        lambda args: _decodes(args) and any(offer.drops == KVzap.name for offer in offers(args)),
        "it predicts scores where a prompt is computed, and they do not travel with its KV",
        "use another method there, for example snapkv",
    ),
    Refusal(
        "--disaggregation-mode prefill --kv-full-tier",
        lambda args: _prefills(args) and args.kv_full_tier != "device",
        "a server that only prefills has no running requests whose full KV could leave the device",
        "leave out --kv-full-tier there",
    ),
    Refusal(
        "--disaggregation-decode-enable-radix-cache",
        switched_on("disaggregation_decode_enable_radix_cache"),
        "SGLang refuses it with any speculation",
        "leave it out",
    ),
    Refusal(
        "--disaggregation-decode-enable-offload-kvcache",
        switched_on("disaggregation_decode_enable_offload_kvcache"),
        "it stores pages by a prefix tree that does not know compressed slots",
        "leave it out",
    ),
)
