"""A server for benchmarks forces acceptance: its arguments, its log and its answers say so."""

import urllib.error

import pytest
from servers import STRICT, greedy

pytestmark = pytest.mark.server

FLAGS = ("--kv-mode", "verified", "--kv-draft-length", "8", "--max-total-tokens", "4096")


@pytest.fixture
def forced(launch):
    """A server on which all drafts are accepted, but for requests that ask otherwise."""
    return launch(*FLAGS, "--kv-bench-acceptance", "1", env=STRICT)


def test_arguments_log_and_each_answer_say_with_which_probability(forced, prompts):
    info = forced.request("server_info")
    assert (info["kv_bench_acceptance"], info["kv_bench_corrupt_loads"]) == (1.0, None)
    assert "--kv-bench-acceptance is 1.0: drafts are accepted by chance, so answers are of no use" in forced.log.read_text()
    bodies = [greedy(24), greedy(24, custom_params={"kv_acceptance": 0}), greedy(1)]
    told = [forced.ask(input_ids=prompts[1], **body)["meta_info"] for body in bodies]
    assert [each["kv_simulated_acceptance"] for each in told] == [1.0, 0.0, 1.0]
    assert told[0]["kv_accepted"] == told[0]["kv_drafts"] > 0 == told[1]["kv_accepted"] < told[1]["kv_drafts"]


@pytest.mark.parametrize("value", ["0.9", 1.5, True])
def test_what_is_no_probability_is_refused_and_the_server_goes_on(forced, prompts, value):
    with pytest.raises(urllib.error.HTTPError) as raised:
        forced.ask(input_ids=prompts[1], **greedy(4, custom_params={"kv_acceptance": value}))
    assert raised.value.code == 400 and "pass a number from 0 to 1" in raised.value.read().decode()
    assert forced.ask(input_ids=prompts[1], **greedy(4))["meta_info"]["completion_tokens"] == 4
