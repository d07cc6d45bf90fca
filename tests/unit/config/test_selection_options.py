"""How many tokens are selected for each step, how often and by which query: what the flags may be, and where they say nothing."""

from types import SimpleNamespace

import pytest
from argument_helpers import arguments

from sglang_ext import flag_checks
from sglang_ext.config import selection_options
from sglang_ext.config.refused_options import check_combinations
from sglang_ext.core import OptionError


def spade(**given):
    """Arguments of a server with the method, as they are before anything is resolved."""
    return arguments(kv_compressor="spade", **given)


@pytest.mark.parametrize("mode", ["lossy", "verified"])
@pytest.mark.parametrize(("select", "budget", "most"), [(None, 0.25, 0), (0.125, 0.125, 0), (1, 1.0, 0), (2048.0, 1.0, 2048)])
def test_spade_takes_a_share_or_a_number_of_tokens_in_both_modes(mode, select, budget, most):
    args = spade(kv_mode=mode, kv_select=select, kv_select_every=4, kv_select_by="regressed")
    flag_checks.check_flags(args)
    check_combinations(args)
    made = selection_options.spade(args)
    assert args.kv_budget == budget
    assert (made.most, made.every, made.predictor.name, made.window) == (most, 4, "regressed", 17)
    assert made.each_round == (mode == "verified"), "where nothing is verified, steps alone count"


def test_more_tokens_than_a_context_and_a_gpu_are_refused():
    args = spade(kv_select=4096.0, device="cpu")
    args.get_model_config = lambda: SimpleNamespace(context_len=4097)
    selection_options.check_resolved(args)
    args.get_model_config = lambda: SimpleNamespace(context_len=4096)
    with pytest.raises(OptionError, match="--kv-select is 4096, .* has 4096 tokens: pass a number below that, a share, .*-context-length"):
        selection_options.check_resolved(args)
    args.device = "cuda"
    with pytest.raises(OptionError, match="--device is cuda with --kv-compressor spade; .*on a CPU alone: no second .*verify-guided"):
        selection_options.check_resolved(args)
    args.kv_compressor = "verify-guided"
    selection_options.check_resolved(args)


def test_flags_of_selection_are_named_where_nothing_is_selected(caplog):
    flag_checks.check_flags(arguments(kv_select=0.5, kv_select_every=2))
    assert "--kv-compressor is snapkv, with which --kv-select, --kv-select-every do nothing: pass --kv-compressor spade" in caplog.text
    caplog.clear()
    flag_checks.check_flags(spade(kv_select=0.5, kv_select_every=2))
    assert "do nothing" not in caplog.text
