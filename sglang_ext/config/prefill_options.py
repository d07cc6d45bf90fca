"""The flag ``--kv-prefill``: whether prompts attend to exact or to quantized keys and values."""

from sglang_ext.config.disaggregation_options import quantized_transfer_settings
from sglang_ext.config.options import BACKEND
from sglang_ext.config.rules import Refusal
from sglang_ext.mem_cache.compressors import catalogue

EXACT, QUANTIZED = PREFILL_MODES = ("exact", "quantized")
# Devices on which prompts can attend to quantized KV.
DEVICES = ("cpu", "cuda")
CONFLICTS = (
    Refusal(
        "--kv-compressor {args.kv_compressor}",
        lambda args: catalogue.parse(args.kv_compressor) not in {(None, name) for name in catalogue.partitioned()},
        "prompts attend to all tokens, quantized and multiplied as integers", f"pass --kv-compressor {' or '.join(catalogue.partitioned())}",
    ),
    Refusal("--kv-mode verified", lambda args: args.kv_mode != "lossy", "its outputs are those of exact prompts", "pass --kv-mode lossy"),
    Refusal(
        "--device {args.device}", lambda args: args.device not in DEVICES,
        f"prompts can attend to quantized KV on {' and '.join(DEVICES)}", "pass --device cpu", needs_device=True,
    ),
    Refusal(
        "--disaggregation-mode {args.disaggregation_mode}",
        lambda args: args.disaggregation_mode != "null" and not quantized_transfer_settings(args),
        "transferred KV does not say how it was computed", f"pass --disaggregation-transfer-backend {BACKEND}", needs_device=True,
    ),
)  # fmt: skip
"""Combinations in which prompts cannot attend to quantized KV."""
