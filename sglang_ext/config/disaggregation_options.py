"""Options that cannot be combined with prefill-decode disaggregation (``--disaggregation-mode``) or the transfer backend ``progressive``,
with reason and remedy, and that backend's own flags.

Both roles accept the same methods. The prefill server computes a prompt's KV, SGLang's transfer backend transfers it, and the decode server
compresses it, drafts and verifies.
"""

from typing import TYPE_CHECKING

from sglang_ext.config import benchmark_options
from sglang_ext.config.method_options import offered_methods
from sglang_ext.config.options import BACKEND, RAW, check_allowed, has_progressive_transfer
from sglang_ext.config.refusal import Refusal, above, when_set
from sglang_ext.mem_cache.compressors import catalogue

if TYPE_CHECKING:
    from sglang_ext.arguments import KVServerArgs

# Prefix of link settings about prompts that are transferred quantized.
CODES = "codes."
# Flags that only apply to this backend, in any mode.
TRANSFER_FLAGS = ("kv_reference", "kv_link_gbps", "kv_link_keys", *benchmark_options.TRANSFER_EFFECTS)
REFERENCES = ("exact", "int8", RAW)


def _decodes(args: "KVServerArgs") -> bool:
    return args.disaggregation_mode == "decode"


def _prefills(args: "KVServerArgs") -> bool:
    return args.disaggregation_mode == "prefill"


def _packs_all(args: "KVServerArgs") -> str | None:
    """The first method of the server that packs all tokens. None if there is none."""
    return next((offer.quant_method for offer in offered_methods(args) if offer.quant_method and offer.drop_method is None and offer.budget == 1), None)


ROLES: tuple[Refusal, ...] = (
    Refusal(
        "--disaggregation-mode decode --kv-host-gb",
        lambda args: _decodes(args) and bool(args.kv_host_gb),
        "a server that only decodes keeps no prefixes, and only nodes of the prefix tree can leave the device",
        "leave out --kv-host-gb there; the prefill server takes it",
    ),
    Refusal(
        "--disaggregation-mode decode --kv-compressor kvzap",
        lambda args: _decodes(args) and any(offer.drop_method == catalogue.KVZAP for offer in offered_methods(args)),
        "it predicts scores when a prompt is computed, and they are not transferred with its KV",
        "use another method there, for example snapkv",
    ),
    Refusal(
        "--disaggregation-mode prefill --kv-full-tier",
        lambda args: _prefills(args) and args.kv_full_tier != "device",
        "a server that only prefills has no running requests whose full KV could leave the device",
        "leave out --kv-full-tier there",
    ),
    Refusal(
        "--kv-bench-codec",
        lambda args: has_progressive_transfer(args) and args.kv_bench_codec is not None and args.kv_mode == "lossy" and _packs_all(args) is not None,
        "in mode lossy, prompts are transferred as quantized KV with a method that packs all tokens, which the codec would replace",
        "leave out --kv-bench-codec on both servers, or use --kv-mode verified there",
    ),
    Refusal(
        "--disaggregation-decode-enable-radix-cache",
        when_set("disaggregation_decode_enable_radix_cache"),
        "SGLang refuses it with any speculation",
        "leave it out",
    ),
    Refusal(
        "--disaggregation-decode-enable-offload-kvcache",
        when_set("disaggregation_decode_enable_offload_kvcache"),
        "it stores pages of a prefix tree that does not account for compressed slots",
        "leave it out",
    ),
)

ALIKE = "each rank sends to the rank of the same number"
PROGRESSIVE: tuple[Refusal, ...] = (
    Refusal("--dp-size", above("dp_size", 1), "data parallelism is untested with it", "use --tp-size on both sides"),
    Refusal("--pp-size", above("pp_size", 1), ALIKE, "use --tp-size on both sides"),
    Refusal("--attn-cp-size", above("attn_cp_size", 1), ALIKE, "use --tp-size on both sides"),
    Refusal("--dcp-size", above("dcp_size", 1), ALIKE, "use --tp-size on both sides"),
    Refusal(
        "--enable-hisparse",
        when_set("enable_hisparse"),
        "it receives KV in host memory",
        "leave it out",
    ),
    Refusal(
        "--speculative-algorithm",
        lambda args: args.kv_mode == "full" and args.speculative_algorithm not in (None, "NGRAM"),
        "KV of a draft model is not transferred",
        "leave it out, or use --kv-mode verified",
    ),
)


def quantized_transfer_settings(args: "KVServerArgs") -> dict[str, bool | int | str]:
    """Settings that both ends of a link must share if prompts are transferred quantized, with names that begin with :data:`CODES`.

    {} if none are. Prompts are transferred quantized in mode lossy with a method that packs all tokens: nothing there reads the full KV
    that compressed KV replaces.
    """
    exact = args.enable_deterministic_inference and args.device != "cpu"
    if not has_progressive_transfer(args) or args.kv_mode != "lossy" or args.kv_bench_codec is not None or exact:
        return {}
    packs = _packs_all(args)
    if packs is None:
        return {}
    bits, partition = catalogue.code_bits(packs, args.kv_bits), catalogue.partition_size(packs, args.kv_partition)
    block = catalogue.quantizer(packs, bits, partition).block
    said = {"method": packs, "bits": bits, "partition": partition or 0, "block": block, "prefill": args.kv_prefill}
    return {CODES + name: value for name, value in said.items()}


def check_transfer(args: "KVServerArgs") -> None:
    """Refuse options that cannot be combined with this backend, and unknown references.

    Raises:
        OptionError: Names the option, the reason and the remedy.
    """
    check_allowed("--kv-reference", args.kv_reference, REFERENCES)
    benchmark_options.check_timeline(args)
    for refusal in PROGRESSIVE:
        refusal.check(args, f"--disaggregation-transfer-backend {BACKEND}")
