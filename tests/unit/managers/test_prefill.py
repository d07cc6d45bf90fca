"""What a prefill tells SGLang's scheduler, and when."""

from contextlib import nullcontext
from types import SimpleNamespace

import torch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_ext.managers.spec_decode.draft import prefill
from sglang_ext.mem_cache.compressed.queries import RecordedRows


def batch_of(*prompts, max_new_tokens=1, grammars=(None, None), return_logprob=False):
    """Greedy requests with these numbers of cached tokens and of new ones, in rows from 1 on."""
    params, count = SamplingParams(temperature=0, max_new_tokens=max_new_tokens), len(prompts)
    reqs = [SimpleNamespace(req_pool_idx=row, grammar=grammar, sampling_params=params) for row, (_, grammar) in enumerate(zip(prompts, grammars), 1)]
    ones = torch.ones(count)
    info = SamplingBatchInfo(
        temperatures=ones[:, None], top_ps=ones, top_ks=ones.int(), min_ps=0 * ones, is_all_greedy=True, is_any_greedy=True,
        need_top_p_sampling=False, need_top_k_sampling=False, need_min_p_sampling=False, vocab_size=4,
    )  # fmt: skip
    return SimpleNamespace(
        reqs=reqs, prefix_lens=[cached for cached, _ in prompts], extend_lens=[new for _, new in prompts],
        seq_lens=torch.tensor([sum(prompt) for prompt in prompts]), sampling_info=info, return_logprob=return_logprob,
        top_logprobs_nums=[0] * count, token_ids_logprobs=[None] * count,
    )  # fmt: skip


class Prefills:
    """A worker whose model gives zeros, and whose sampler draws ``drawn``. ``seen`` has what happened, in order."""

    def __init__(self, drawn=()):
        self.seen, self.recorded, self.drawn = [], [], drawn
        self.output = SimpleNamespace(next_token_logits=torch.zeros(max(1, len(drawn)), 4))
        method = SimpleNamespace(compressor=SimpleNamespace(window=32), min_context=1, unit=1)
        self.worker = SimpleNamespace(
            queries=SimpleNamespace(recording=lambda rows: self.recorded.extend(rows) or nullcontext()),
            target_worker=SimpleNamespace(forward_batch_generation=self.forward),
            model_runner=SimpleNamespace(sample=self.sample, compute_logprobs_only=lambda output, batch: self.seen.append((output, batch))),
            server_args=SimpleNamespace(kv_prefill="exact"),
            requests=SimpleNamespace(admit=lambda req, matched: SimpleNamespace(fallback=0, seed=5, row=req.req_pool_idx)),
            compressed_kv=SimpleNamespace(method=lambda row: method, get=lambda row: None, is_refused=lambda row: False),
        )

    def forward(self, batch, is_verify):
        assert is_verify
        self.seen.append("forward")
        return SimpleNamespace(logits_output=self.output)

    def sample(self, output, batch):
        self.seen.append("sampled")
        return torch.tensor(self.drawn)

    def run(self, batch):
        penalties = SimpleNamespace(penalize_prefill=lambda batch, logits: self.seen.append("penalized"))
        return prefill(self.worker, batch, penalties, on_publish=lambda lengths: self.seen.append(lengths.tolist()))


def test_lengths_of_a_prefill_are_known_before_it_runs():
    """Else the scheduler would wait for its end before it prepares the next round, and show the first token later."""
    prefills = Prefills(drawn=[3])
    found = prefills.run(batch_of((0, 7)))
    assert prefills.seen == [[7], "forward", "penalized", "sampled"]
    assert found.next_token_ids.tolist() == found.next_draft_input.bonus_tokens.tolist() == [3] and found.new_seq_lens.tolist() == [7]


def test_requests_for_no_token_draw_none():
    # As SGLang, which tells the log-probabilities that were asked for, and none of a token that nobody gets.
    prefills = Prefills()
    found = prefills.run(batch_of((0, 7), (0, 9), max_new_tokens=0, return_logprob=True))
    assert found.next_token_ids.tolist() == [0, 0]
    *before, (output, asked) = prefills.seen
    assert before == [[7, 9], "forward", "penalized"] and output is prefills.output and asked.batch_size == 2 and asked.return_logprob


def test_a_request_for_no_token_whose_grammar_advances_over_the_token_after_its_prompt_draws_one():
    found = Prefills(drawn=[3, 2]).run(batch_of((0, 7), (0, 9), max_new_tokens=0, grammars=(None, object())))
    assert found.next_token_ids.tolist() == [3, 2]


def test_the_queries_of_all_are_kept():
    prefills = Prefills(drawn=[3, 2])
    prefills.run(batch_of((0, 7), (40, 5)))
    assert prefills.recorded == [RecordedRows(1, 0, 7, 0), RecordedRows(2, 7, 12, 40)]
