"""Sampling parameters of a batch, row by row."""

from types import SimpleNamespace

import torch
import torch._dynamo
from held_entries import held_entries
from sglang.srt.layers import sampler
from sglang.srt.runtime_context import get_context
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_ext.managers.spec_decode.sampling import LogitRow, RowSampler, SamplerCache, draw_with_finite_noise, sampling_batch
from sglang_ext.platforms.torch_kernels import murmur_hash32

DISALLOWED = {"token_ids": [3]}


def batch(params, **more):
    """A batch of two requests, of which the second has a logit processor."""
    info = SamplingBatchInfo(
        temperatures=torch.tensor([[0.5], [1.0]]),
        top_ps=torch.tensor([0.9, 1.0]),
        top_ks=torch.tensor([40, 1]),
        min_ps=torch.tensor([0.0, 0.1]),
        is_all_greedy=False,
        is_any_greedy=True,
        need_top_p_sampling=True,
        need_top_k_sampling=True,
        need_min_p_sampling=True,
        vocab_size=8,
        logit_bias=torch.arange(16.0).view(2, 8),
        has_custom_logit_processor=True,
        custom_params=[None, DISALLOWED],
        custom_logit_processor={7: (DisallowedTokensLogitsProcessor(), torch.tensor([False, True]))},
        device="cpu",
    )
    for name, value in more.items():
        setattr(info, name, value)
    reqs = [SimpleNamespace(sampling_params=one, grammar=None) for one in params]
    return SimpleNamespace(sampling_info=info, reqs=reqs)


# Of a batch whose samplings can be used again.
PLAIN = {"logit_bias": None, "has_custom_logit_processor": False, "custom_logit_processor": None}
PARAMS = (SamplingParams(temperature=0.5, top_p=0.9, top_k=40), SamplingParams(temperature=0, min_p=0.1))


def test_each_row_has_the_parameters_and_the_noise_of_its_request():
    info = sampling_batch(batch(PARAMS), [LogitRow(0, 11), LogitRow(0, 11)], torch.device("cpu"), False).sampling_info
    assert info.temperatures.tolist() == [[0.5], [0.5]]
    assert info.sampling_seed.tolist() == [11, 11]
    assert torch.equal(info.logit_bias, torch.arange(8.0).repeat(2, 1))
    assert (info.need_top_k_sampling, info.need_min_p_sampling, info.is_all_greedy) == (True, False, False)


def test_a_logit_processor_comes_along_with_its_own_request_only():
    drafting = sampling_batch(batch(PARAMS), [LogitRow(0, 11), LogitRow(0, 11)], torch.device("cpu"), False).sampling_info
    assert not drafting.has_custom_logit_processor and drafting.custom_logit_processor is None
    own = sampling_batch(batch(PARAMS), [LogitRow(1, None)], torch.device("cpu"), False).sampling_info
    (processor, mask), = own.custom_logit_processor.values()
    assert own.has_custom_logit_processor and mask.tolist() == [True]
    assert processor(torch.zeros(1, 8), own.custom_params)[0, 3] == float("-inf")


def kept(asked, cache, states, width=2, requests=(0, 1)):
    asked.seq_lens = torch.tensor([5, 6])
    return cache.get(asked, states, requests, width, {}, False)


def of_drafting() -> list[SimpleNamespace]:
    return [SimpleNamespace(seed=11, fallback=0) for _ in range(2)]


def test_a_sampling_is_used_again_while_the_same_requests_run():
    params, states = (SamplingParams(temperature=0), SamplingParams(temperature=1.0)), of_drafting()
    asked, cache = batch(params, **PLAIN), SamplerCache(model_runner=None)
    first = kept(asked, cache, states)
    assert kept(asked, cache, states) is first
    assert kept(asked, cache, states, width=1) is not first and kept(asked, cache, states) is first
    some = kept(asked, cache, states, requests=(1,))
    assert some.groups[0].rows == [0, 1] and kept(asked, cache, states, requests=(1,)) is some is not kept(asked, cache, states, requests=(0,))
    # A retracted request comes back with another state, and other noise.
    assert kept(asked, cache, [*of_drafting()[:1], states[1]]) is not first


def test_what_depends_on_the_output_is_made_anew():
    asked, cache, states = batch(PARAMS), SamplerCache(model_runner=None), of_drafting()
    assert kept(asked, cache, states) is not kept(asked, cache, states)
    grammatical = batch((SamplingParams(temperature=0), SamplingParams(temperature=0)), **PLAIN)
    assert kept(grammatical, cache, states) is kept(grammatical, cache, states)
    grammatical.reqs[1].grammar = object()
    assert kept(grammatical, cache, states) is not kept(grammatical, cache, states)


def test_what_sglang_counted_is_left_out_and_a_sampling_kept_all_the_same():
    penalized = batch((SamplingParams(temperature=0), SamplingParams(temperature=0)), **PLAIN)
    penalized.sampling_info.acc_additive_penalties = torch.ones(2, 8)
    penalized.sampling_info.acc_scaling_penalties = torch.ones(2, 8)
    cache, states = SamplerCache(model_runner=None), of_drafting()
    made = kept(penalized, cache, states)
    info = made.groups[0].batch.sampling_info
    assert info.acc_additive_penalties is None and info.acc_scaling_penalties is None
    assert kept(penalized, cache, states) is made


def test_so_many_samplings_are_kept_and_no_more():
    asked, states = batch((SamplingParams(temperature=0),) * 2, **PLAIN), of_drafting()
    cache = SamplerCache(model_runner=None, most=3)
    for first in range(1, 20, 3):
        made = {width: kept(asked, cache, states, width=width) for width in range(first, first + 3)}
        assert all(kept(asked, cache, states, width=width) is each for width, each in made.items())
        # A fourth one leaves none of those before.
        kept(asked, cache, states, width=100 + first)
        assert all(kept(asked, cache, states, width=width) is not each for width, each in made.items())
        cache = SamplerCache(model_runner=None, most=3)


def test_nothing_as_large_as_logits_is_kept():
    """A bias has a number for each token of the vocabulary: kept for each row of 64 samplings it would be gigabytes, charged to nobody."""
    plain = {**PLAIN, "logit_bias": torch.arange(16.0).view(2, 8)}
    asked, cache, states = batch((SamplingParams(temperature=0),) * 2, **plain), SamplerCache(model_runner=None), of_drafting()
    empty = held_entries(cache)
    made = kept(asked, cache, states)
    assert made.groups[0].batch.sampling_info.logit_bias.shape == (4, 8)
    assert kept(asked, cache, states) is not made and held_entries(cache) == empty


def test_rows_of_one_route_with_and_without_shared_noise_are_drawn_apart():
    asked = batch((SamplingParams(temperature=1.0), SamplingParams(temperature=1.0)))
    asked.seq_lens = torch.tensor([5, 6])
    made = RowSampler.from_rows(None, asked, [LogitRow(0, None), LogitRow(1, 11), LogitRow(0, None)], False)
    assert [group.rows for group in made.groups] == [[0, 2], [1]]


def seed_of_infinite_noise(position: int, token: int) -> int:
    """A 64-bit seed with which SGLang's hash of this position and token is its largest value."""
    mask = 0xFFFFFFFF
    rotate = lambda x, r: ((x << r) | (x >> (32 - r))) & mask  # noqa: E731
    inverse = lambda factor: pow(factor, -1, 1 << 32)  # noqa: E731
    scrambled = lambda k: rotate(k * 0xCC9E2D51 & mask, 15) * 0x1B873593 & mask  # noqa: E731
    unmixed = lambda h: rotate((h - 0xE6546B64) * inverse(5) & mask, 19)  # noqa: E731
    h = mask
    h ^= h >> 16
    h = h * inverse(0xC2B2AE35) & mask
    h ^= h >> 13 ^ h >> 26
    h = h * inverse(0x85EBCA6B) & mask
    h ^= h >> 16 ^ 16
    h = unmixed(unmixed(h) ^ scrambled(token)) ^ scrambled(position)
    low = scrambled(7)
    before = (rotate(low, 13) * 5 + 0xE6546B64) & mask
    high = rotate((unmixed(h) ^ before) * inverse(0x1B873593) & mask, 17) * inverse(0xCC9E2D51) & mask
    return high << 32 | 7


def test_no_noise_of_ours_draws_a_token_that_has_no_probability(monkeypatch):
    seed, position = torch.tensor([seed_of_infinite_noise(100, 39)]).to(torch.uint64), torch.tensor([100])
    monkeypatch.setattr(sampler, "murmur_hash32", murmur_hash32)
    assert murmur_hash32(seed, position, torch.tensor([39])).item() == 0xFFFFFFFF, "the case is none"
    logprobs = torch.full((1, 64), float("-inf"))
    logprobs[0, [3, 5]] = -0.7
    stocks = lambda *args: "stock's"  # noqa: E731
    deterministic = SimpleNamespace(enable_deterministic_inference=False)
    monkeypatch.setattr(get_context(), "_config_bags", {"exec": SimpleNamespace(deterministic=deterministic)})
    with torch._dynamo.config.patch(disable=True):
        assert draw_with_finite_noise(stocks, logprobs, seed, position).item() in (3, 5)
    deterministic.enable_deterministic_inference = True
    assert draw_with_finite_noise(stocks, logprobs, seed, position) == "stock's", "seeds of requests draw what stock's draw"
