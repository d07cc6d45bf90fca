"""Sampled answers: stock's tokens where there is a seed, stock's distribution where there is none."""

from itertools import product

import numpy as np
import pytest
from scipy.stats import binomtest, chisquare
from servers import Server

pytestmark = pytest.mark.server

# Tokens that are likely everywhere in the text: "," and three words. The bias leaves no others.
TOKENS = (28, 253, 260, 284)
BIAS = {"logit_bias": {str(token): 100.0 for token in TOKENS}, "ignore_eos": True}
TRIPLES = list(product(TOKENS, repeat=3))
SAMPLES = 256
# A correct server fails one run in 10,000.
LEAST_P = 1e-4
EXPECTED_IN_CELL = 5


@pytest.mark.parametrize(
    "params",
    [{"temperature": 0.8, "sampling_seed": 11}, {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "sampling_seed": 5}],
    ids=["plain", "top-p-top-k"],
)
def test_seeded_sampling_gives_stocks_tokens(stock, verified, prompts, params):
    body = {"sampling_params": {"max_new_tokens": 20, "ignore_eos": True, **params}}
    expected, found = stock.ask_all(prompts[:2], 1, **body), verified.ask_all(prompts[:2], 2, **body)
    assert [r["output_ids"] for r in found] == [r["output_ids"] for r in expected]
    assert all(r["meta_info"]["kv_accepted"] > 0 for r in found)


def probabilities(stock: Server, prompt: list[int], temperature: float) -> np.ndarray:
    """Stock's probability of each of :data:`TRIPLES` after ``prompt``: float [64]."""
    starts = [start for length in range(3) for start in product(TOKENS, repeat=length)]
    answers = stock.ask(
        input_ids=[[*prompt, *start] for start in starts],
        sampling_params={"temperature": temperature, "max_new_tokens": 1, **BIAS},
        return_logprob=True,
        token_ids_logprob=[list(TOKENS)] * len(starts),
    )
    step = {}
    for start, answer in zip(starts, answers):
        for logprob, token, _ in answer["meta_info"]["output_token_ids_logprobs"][0]:
            step[*start, token] = np.exp(logprob)
    return np.array([step[t[:1]] * step[t[:2]] * step[t] for t in TRIPLES])


def p_value(counts: np.ndarray, probability: np.ndarray) -> float:
    """Of Pearson's chi-square test, with the rarest cells taken together."""
    expected = probability / probability.sum() * counts.sum()
    rare = expected < EXPECTED_IN_CELL
    merged = [np.append(values[~rare], values[rare].sum()) for values in (counts, expected)]
    return float(chisquare(*merged).pvalue)


def test_unseeded_sampling_has_stocks_distribution(stock, paged, prompts):
    prompt = prompts[0][:177]  # a whole number of pages and one token: the cache has all but that one
    probability = probabilities(stock, prompt, 1.0)
    assert probability.sum() == pytest.approx(1, abs=1e-3)
    params = {"temperature": 1.0, "max_new_tokens": 4, "n": SAMPLES // 4, **BIAS}
    answers = [answer for _ in range(4) for answer in paged.ask(input_ids=prompt, sampling_params=params)]
    drafts, accepted = (sum(r["meta_info"][name] for r in answers) for name in ("kv_drafts", "kv_accepted"))
    assert drafts > SAMPLES and 0 < accepted < drafts, "drafts must be both right and wrong to show anything"

    drawn = [TRIPLES.index(tuple(r["output_ids"][:3])) for r in answers]
    assert p_value(np.bincount(drawn, minlength=len(TRIPLES)), probability) > LEAST_P
    # Neighbours are equal as often as independent ones are.
    equal = sum(a == b for a, b in zip(drawn[::2], drawn[1::2]))
    assert binomtest(equal, SAMPLES // 2, float(np.sum(probability**2))).pvalue > LEAST_P
    # The test has power: it refuses as many samples of a slightly cooler stock.
    cooler = probabilities(stock, prompt, 0.7)
    sample = np.random.default_rng(0).multinomial(SAMPLES, cooler / cooler.sum())
    assert p_value(sample, probability) < LEAST_P
