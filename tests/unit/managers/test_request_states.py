"""What the worker knows of a request while it runs, what is told of it, and the seed of the noise that its drafts share with their
verification.
"""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_ext.config.method_options import OfferedMethod
from sglang_ext.core import RequestState
from sglang_ext.managers.spec_decode.request_states import STOCK_DEFAULT_SEED, RequestStates, meta_info_fields, write_counters, noise_seed, restore_counters
from sglang_ext.mem_cache.compressors import catalogue

ARGS = SimpleNamespace(enable_deterministic_inference=False, random_seed=3)
OFFERS = (OfferedMethod("snapkv", "snapkv", 0.25), OfferedMethod("sink-recent:0.5", "sink-recent", 0.5))


def states():
    return RequestStates(ARGS, OFFERS)


def request(rid="a", row=2, asked=None, **params):
    custom = None if asked is None else {"kv_compressor": asked}
    return SimpleNamespace(
        rid=rid, req_pool_idx=row, origin_input_ids=[5, 6, 7], extra_key="a salt", output_ids=[8],
        input_embeds=None, positional_embed_overrides=None, sampling_params=SamplingParams(custom_params=custom, **params),
        grammar=None, custom_logit_processor=None, return_hidden_states=False, spec_cap_lens_histogram=[],
    )  # fmt: skip


def test_later_chunks_of_a_prompt_are_the_same_request():
    known, req = states(), request()
    first = known.admit(req, 16)
    assert known.admit(req, 48) is first and first.cached_prompt_len == 16
    assert known.states_of(SimpleNamespace(reqs=[req])) == [first]


def test_a_row_that_was_given_back_is_another_request():
    known = states()
    first = known.admit(request("a"), 0)
    known.forget(2)
    known.forget(2)
    second = known.admit(request("b"), 0)
    assert (second.rid, second.row) == ("b", 2) and second.seed != first.seed


def test_a_request_is_compressed_by_the_method_that_it_asks_for():
    known = states()
    known.admit(request("a", 1), 0)
    known.admit(request("b", 2, asked="sink-recent:0.5"), 0)
    assert (known.get(1).method, known.get(2).method) == (0, 1)
    assert known.get(2).prompt == [5, 6, 7] and known.get(2).namespace == "a salt"


@pytest.mark.parametrize("given", ["input_embeds", "positional_embed_overrides"])
def test_what_kv_depends_on_is_not_known_where_embeddings_take_the_place_of_tokens(given):
    known, req = states(), request()
    setattr(req, given, [[0.5, 1.0]])
    known.admit(req, 0)
    assert known.get(2).namespace is None


def test_a_row_may_be_nobodys():
    known = states()
    state = known.admit(request("a", 1), 0)
    assert [known.get(row) for row in (0, 1)] == [None, state]
    known.forget(1)
    assert known.get(1) is None


def test_a_new_request_is_expected_to_be_like_those_before_it_with_its_method():
    known = states()
    first = known.admit(request("a", 1), 0)
    hopeful = first.acceptance.probability
    for _ in range(50):
        known.count_verify(first, 8, 0)
    assert known.admit(request("b", 2), 0).acceptance.probability < hopeful / 2
    assert known.admit(request("c", 3, asked="sink-recent:0.5"), 0).acceptance.probability == pytest.approx(hopeful)


def test_in_deterministic_mode_noise_is_the_requests_own_seed_or_stocks():
    deterministic = SimpleNamespace(enable_deterministic_inference=True, random_seed=3)
    assert noise_seed(request(sampling_seed=11), deterministic, 1) == 11
    assert noise_seed(request(sampling_seed=0), deterministic, 1) == 0
    assert noise_seed(request(), deterministic, 1) == STOCK_DEFAULT_SEED


def test_else_noise_differs_by_request_and_agrees_between_ranks():
    samples = [noise_seed(request(f"a_{n}", sampling_seed=11), ARGS, n) for n in range(1, 5)]
    assert len(set(samples)) == 4, "samples of one request, which bring one seed, are not alike"
    found = [noise_seed(request(rid), ARGS, admitted) for rid in "ab" for admitted in (1, 2)]
    assert len(set(found)) == 4 and all(0 <= seed < 1 << 63 for seed in found)
    assert found[0] == noise_seed(request("a"), ARGS, 1)
    assert found[0] != noise_seed(request("a"), SimpleNamespace(**{**vars(ARGS), "random_seed": 4}), 1)


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), max_size=10),
    st.integers(0, 7),
    st.sampled_from(("", *catalogue.dropping())),
)
def test_meta_info_survives_the_trip_through_sglangs_counters(verifies, fallback, compressor):
    state = RequestState(rid="r", row=1, seed=0, fallback=fallback)
    for offered, accepted in verifies:
        state.count_verify(offered, min(offered, accepted))
    state.compressor = catalogue.number(compressor)
    req = SimpleNamespace(spec_cap_lens_histogram=[])
    write_counters(req, state)
    fields = meta_info_fields(req.spec_cap_lens_histogram)
    assert fields["kv_verifies"] == len(verifies) == sum(fields["kv_accept_histogram"])
    assert fields["kv_drafts"] == sum(k * n for k, n in enumerate(fields["kv_offer_histogram"]))
    assert fields["kv_accepted"] == sum(k * n for k, n in enumerate(fields["kv_accept_histogram"]))
    assert fields["kv_compressor"] == (compressor or None)
    resumed = RequestState(rid="r", row=2, seed=0)
    restore_counters(req, resumed)
    assert resumed.offer_histogram == state.offer_histogram and resumed.accepted == state.accepted
