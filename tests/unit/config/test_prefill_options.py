"""Where prompts may attend to codes, and where that is refused."""

import pytest
from argument_helpers import arguments

from sglang_ext import flag_checks
from sglang_ext.config import prefill_options
from sglang_ext.core import OptionError

CODES = {"kv_mode": "lossy", "kv_compressor": "hack", "kv_prefill": "quantized"}


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"device": "npu"}, "--device is npu with --kv-prefill quantized; .*on cpu and cuda: pass --kv-prefill exact, or --device cpu"),
        ({"device": "cpu", "disaggregation_mode": "decode"}, "--disaggregation-mode is decode with --kv-prefill quantized; .*: pass --kv-prefill exact"),
    ],
)
def test_codes_are_read_by_prompts_of_one_server_on_a_device_that_has_it(given: dict[str, object], match: str) -> None:
    flag_checks.check_flags(args := arguments(**CODES))
    for name, value in {"device": "cpu", "disaggregation_mode": "null"}.items():
        setattr(args, name, value)
    prefill_options.check_resolved(args)
    args.device = "cuda"
    prefill_options.check_resolved(args)
    for name, value in given.items():
        setattr(args, name, value)
    with pytest.raises(OptionError, match=match):
        prefill_options.check_resolved(args)
    args.kv_prefill = "exact"
    prefill_options.check_resolved(args)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_prompts_attend_to_codes_where_the_codes_travel(role: str) -> None:
    flag_checks.check_flags(args := arguments(**CODES, disaggregation_mode=role, disaggregation_transfer_backend="progressive"))
    args.device = "cpu"
    prefill_options.check_resolved(args)
    args.disaggregation_transfer_backend = "mooncake"
    with pytest.raises(OptionError, match="or --disaggregation-transfer-backend progressive"):
        prefill_options.check_resolved(args)
