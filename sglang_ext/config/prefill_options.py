"""The flag ``--kv-prefill``: whether prompts attend to exact or to quantized keys and values."""

from typing import TYPE_CHECKING

from sglang_ext.config.disaggregation_options import quantized_transfer_settings
from sglang_ext.config.options import BACKEND, check_allowed
from sglang_ext.core import OptionError
from sglang_ext.mem_cache.compressors import catalogue

if TYPE_CHECKING:
    from sglang_ext.arguments import KVServerArgs

EXACT, QUANTIZED = PREFILL_MODES = ("exact", "quantized")
# Devices on which prompts can attend to quantized KV.
DEVICES = ("cpu", "cuda")


def resolve(args: "KVServerArgs") -> None:
    """Refuse combinations in which prompts cannot attend to quantized KV.

    Raises:
        OptionError: Names the flag, its value and the remedy.
    """
    check_allowed("--kv-prefill", args.kv_prefill, PREFILL_MODES)
    if args.kv_prefill == EXACT:
        return
    drops, packs = catalogue.parse(args.kv_compressor)
    if drops is not None or packs not in catalogue.partitioned():
        raise OptionError(
            f"--kv-prefill is {QUANTIZED} with --kv-compressor {args.kv_compressor}; prompts attend to all tokens, quantized and "
            f"multiplied as integers: pass --kv-compressor {' or '.join(catalogue.partitioned())}, or --kv-prefill {EXACT}"
        )
    if args.kv_mode != "lossy":
        raise OptionError(
            f"--kv-prefill is {QUANTIZED} with --kv-mode {args.kv_mode}, whose outputs are those of exact prompts: pass --kv-mode lossy, "
            f"or --kv-prefill {EXACT}"
        )


def check_resolved(args: "KVServerArgs") -> None:
    """Refuse a device or a role that does not support it, after SGLang selected the device.

    Raises:
        OptionError: Names it, and the remedy.
    """
    if args.kv_prefill == EXACT:
        return
    if args.device not in DEVICES:
        raise OptionError(
            f"--device is {args.device} with --kv-prefill {QUANTIZED}; prompts can attend to quantized KV on {' and '.join(DEVICES)}: "
            f"pass --kv-prefill {EXACT}, or --device cpu"
        )
    if args.disaggregation_mode != "null" and not quantized_transfer_settings(args):
        raise OptionError(
            f"--disaggregation-mode is {args.disaggregation_mode} with --kv-prefill {QUANTIZED}; transferred KV does not say how it was "
            f"computed: pass --kv-prefill {EXACT}, or --disaggregation-transfer-backend {BACKEND}"
        )
