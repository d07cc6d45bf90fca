"""Test kits that SGLang ships for its own servers. Stock SGLang 0.5.17 passes these on the demo model, so a verified server must.

Each kit is a mixin of a ``unittest.TestCase``, which asks a server by HTTP. Left out are tests of answers' quality, of EAGLE's accept
lengths, of thousands of tokens, and those that want flags of their own.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
from servers import Server

pytestmark = pytest.mark.server

# Tests by the kit's class, with its module and what replaces its default load, which is meant for GPUs.
KITS: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "RegexConstrainedMixin": ("regex_constrained_kit", ("test_regex_generate_email", "test_regex_generate_date"), {}),
    "EBNFConstrainedMixin": ("ebnf_constrained_kit", ("test_ebnf_generate_date",), {}),
    # Not test_json_generate: a model of few layers repeats whitespace up to the longest output. test_verified.py compares a schema with stock.
    "JSONConstrainedMixin": ("json_constrained_kit", ("test_json_invalid",), {}),
    "BasicAPIContractMixin": (
        "basic_api_contract_kit",
        ("test_get_server_info", "test_openai_completion"),
        {},
    ),
    "BasicDecodeCorrectnessMixin": ("basic_decode_correctness_kit", ("test_determinism_temp_zero", "test_max_token_one"), {}),
    "MatchedStopMixin": ("matched_stop_kit", ("test_finish_stop_str", "test_finish_length"), {}),
    "SpecCorrectnessKit": ("spec_server_kits", ("test_first_token_finish",), {}),
    "SpecLogprobKit": (
        "spec_server_kits",
        ("test_logprob_start_len", "test_logprob_spec_v2_match", "test_token_ids_logprob_ragged"),
        # In float32.
        {"logprob_match_delta": 1e-3},
    ),
    "SpecPenaltyKit": ("spec_server_kits", ("test_penalty_mixed",), {}),
    "SpecHiddenStatesKit": ("spec_server_kits", ("test_return_hidden_states",), {}),
    "AbortAllMixin": (
        "abort_timeout_kit", ("test_abort_all",), {"abort_all_num_requests": 6, "abort_all_max_new_tokens": 1000, "abort_all_sleep": 1},
    ),
    "PauseResumeInPlaceMixin": (
        "pause_generation_kit", ("test_pause_resume_in_place",),
        {"pause_num_requests": 4, "pause_max_new_tokens": 100, "pause_duration": 1},
    ),
}  # fmt: skip


def kit_case(server: Server, kit: str, test: str) -> Any:
    """One test of a kit, bound to a server."""
    module, _, load = KITS[kit]
    # Only tests of quality read data sets, but their modules are imported with all others.
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, "datasets", without_data_sets())
        mixin = getattr(import_module(f"sglang.test.kits.{module}"), kit)
        base = import_module("sglang.test.server_fixtures.spec_eagle_fixture").SpecEagleServerBase
    model = server.request("model_info")["model_path"]
    bound = {"base_url": server.url, "model": model, "process": Running(server), "_tokenizer": None, **load}
    return getattr(type(kit, (mixin, base), bound)(test), test)


def without_data_sets() -> ModuleType:
    module = ModuleType("datasets")
    module.load_dataset = None
    return module


class Running:
    """What kits ask of a server's process."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def poll(self) -> int | None:
        """None while it runs, as ``subprocess.Popen.poll``."""
        return None if self.server.running else 1


@pytest.mark.parametrize(("kit", "test"), [(kit, test) for kit, (_, tests, _) in KITS.items() for test in tests])
def test_what_stock_passes_a_verified_server_passes(kit: str, test: str, verified: Server) -> None:
    kit_case(verified, kit, test)()
    assert verified.alive()
