"""Prefill-decode disaggregation: options that cannot be combined with it, the settings that both ends of a link share, and whether a
transfer backend works on this machine.

Both roles accept the same methods. The prefill server computes a prompt's KV, SGLang's transfer backend transfers it, and the decode server
compresses it, drafts and verifies.
"""

from importlib import import_module
from importlib.util import find_spec

from sglang_ext.config.method_options import drop_methods, offered_methods
from sglang_ext.config.options import BACKEND, RAW, has_progressive_transfer
from sglang_ext.config.rules import KVServerArgs, Refusal, at_most_one, refuse_if_set
from sglang_ext.core import CODES_PREFIX
from sglang_ext.mem_cache.compressors import catalogue

REFERENCES = ("exact", "int8", RAW)


def packs_all(args: KVServerArgs) -> str | None:
    """The first method of the server that packs all tokens. None if there is none."""
    return next((offer.quant_method for offer in offered_methods(args) if offer.quant_method and offer.drop_method is None), None)


ROLE_REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "--disaggregation-mode decode --kv-compressor kvzap",
        lambda args: args.disaggregation_mode == "decode" and catalogue.KVZAP in drop_methods(args),
        "it predicts scores when a prompt is computed, and they are not transferred with its KV",
        "use another method there, for example snapkv",
    ),
    refuse_if_set("disaggregation_decode_enable_radix_cache", "SGLang refuses it with any speculation"),
    refuse_if_set("disaggregation_decode_enable_offload_kvcache", "it stores pages of a prefix tree that does not account for compressed slots"),
)

ALIKE = "each rank sends to the rank of the same number"
BOTH_SIDES = "use --tp-size on both sides"
TRANSFER_REFUSALS: tuple[Refusal, ...] = (
    at_most_one("dp_size", "data parallelism is untested with it", remedy=BOTH_SIDES),
    *(at_most_one(name, ALIKE, remedy=BOTH_SIDES) for name in ("pp_size", "attn_cp_size", "dcp_size")),
    refuse_if_set("enable_hisparse", "it receives KV in host memory"),
    Refusal(
        "--speculative-algorithm",
        lambda args: args.kv_mode == "full" and args.speculative_algorithm not in (None, "NGRAM"),
        "KV of a draft model is not transferred",
        "leave it out, or use --kv-mode verified",
    ),
)


def quantized_transfer_settings(args: KVServerArgs) -> dict[str, bool | int | str]:
    """Return the settings that both servers must share to transfer prompts as quantized KV. Names begin with ``CODES_PREFIX``.

    {} if prompts are transferred as full KV. Prompts are transferred quantized in mode lossy with a method that packs all tokens: nothing
    there reads the full KV that compressed KV replaces.
    """
    exact = args.enable_deterministic_inference and args.device != "cpu"
    if not has_progressive_transfer(args) or args.kv_mode != "lossy" or args.kv_bench_codec is not None or exact:
        return {}
    packs = packs_all(args)
    if packs is None:
        return {}
    bits, partition = catalogue.code_bits(packs, args.kv_bits), catalogue.partition_size(packs, args.kv_partition)
    block = catalogue.quantizer(packs, bits, partition).block
    said = {"method": packs, "bits": bits, "partition": partition or 0, "block": block, "prefill": args.kv_prefill}
    return {CODES_PREFIX + name: value for name, value in said.items()}


MOONCAKE_TCP = "mooncake_tcp"
# SGLang's transports: the module that each imports, and how to install it. Other ones include what they need, as ours does.
TRANSPORTS = {
    "mooncake": ("mooncake.engine", "pip install mooncake-transfer-engine"),
    MOONCAKE_TCP: ("mooncake.engine", "pip install mooncake-transfer-engine-non-cuda (or mooncake-transfer-engine)"),
    "nixl": ("nixl._api", "pip install nixl"),
    "mori": ("mori.io", "use SGLang's image for AMD's GPUs, which has it"),
    "ascend": ("memfabric_hybrid", "use SGLang's image for Ascend's NPUs, which has it"),
}
# It transfers nothing.
FAKE = "fake"


def transport_obstacle(backend: str) -> str | None:
    """Why a prefill and a decode server cannot transfer KV with this backend here, with the remedy, in one line. None if they can.

    The transport's module is imported, because it may need system libraries.
    """
    if backend == FAKE:
        return f"it moves no KV, and SGLang's prefill servers refuse it: use {BACKEND}"
    if backend not in TRANSPORTS:
        return None
    module, remedy = TRANSPORTS[backend]
    package = module.partition(".")[0]
    if find_spec(package) is None:
        return f"the package {package} is not installed: {remedy}, or use {BACKEND}"
    try:
        import_module(module)
    except (ImportError, OSError) as error:
        said = " ".join(str(error).split())
        return f"{module} does not load ({type(error).__name__}: {said}): install what it lacks, or use {BACKEND}"
    return None
