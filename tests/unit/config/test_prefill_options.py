"""Where prompts may attend to codes, and where that is refused."""

import pytest
from argument_helpers import arguments

from sglang_ext import flag_checks
from sglang_ext.core import OptionError

CODES = {"kv_mode": "lossy", "kv_compressor": "hack", "kv_prefill": "quantized"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_prompts_attend_to_codes_on_a_device_that_has_it(device: str) -> None:
    flag_checks.check_flags(args := arguments(**CODES))
    args.device = device
    flag_checks.check_device(args)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_prompts_attend_to_codes_where_the_codes_travel(role: str) -> None:
    flag_checks.check_flags(args := arguments(**CODES, disaggregation_mode=role, disaggregation_transfer_backend="progressive"))
    args.device = "cpu"
    flag_checks.check_device(args)
    args.disaggregation_transfer_backend = "mooncake"
    with pytest.raises(OptionError, match="pass --disaggregation-transfer-backend progressive"):
        flag_checks.check_device(args)
