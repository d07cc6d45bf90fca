"""What a prefill tells SGLang's scheduler, and when."""

from contextlib import nullcontext
from types import SimpleNamespace

import torch

from sglang_ext.managers.spec_decode import draft as module
from sglang_ext.mem_cache.compressed.queries import RecordedRows


def test_lengths_of_a_prefill_are_known_before_it_runs(monkeypatch):
    """Else the scheduler would wait for its end before it prepares the next round, and show the first token later."""
    seen = []
    result = SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=torch.zeros(1, 4)))

    def forward(batch, is_verify):
        assert is_verify
        seen.append("forward")
        return result

    sampled = SimpleNamespace(tokens=torch.tensor([3]))
    monkeypatch.setattr(module.RowSampler, "from_rows", lambda *args: SimpleNamespace(draw=lambda logits, positions: sampled))
    penalties = SimpleNamespace(penalize_prefill=lambda batch, logits: seen.append("penalized"))
    worker = SimpleNamespace(
        queries=SimpleNamespace(recording=lambda rows: nullcontext()),
        target_worker=SimpleNamespace(forward_batch_generation=forward),
        model_runner=None,
        server_args=SimpleNamespace(kv_prefill="exact"),
        requests=SimpleNamespace(admit=lambda req, matched: SimpleNamespace(fallback=0, seed=5, row=1)),
        compressed_kv=SimpleNamespace(method=lambda row: SimpleNamespace(compressor=SimpleNamespace(window=0)), get=lambda row: None),
    )
    reqs, lengths = [SimpleNamespace(req_pool_idx=1, grammar=None, sampling_params=SimpleNamespace(max_new_tokens=1))], torch.tensor([7])
    batch = SimpleNamespace(reqs=reqs, prefix_lens=[0], extend_lens=[7], seq_lens=lengths, return_logprob=False)
    found = module.prefill(worker, batch, penalties, on_publish=lambda lengths: seen.append(lengths.tolist()))
    assert seen == [[7], "forward", "penalized"]
    assert found.next_token_ids.tolist() == [3] and found.new_seq_lens.tolist() == [7]


def test_requests_for_no_token_draw_none(monkeypatch):
    # As SGLang, which tells the log-probabilities that were asked for, and none of a token that nobody gets.
    output, seen = SimpleNamespace(next_token_logits=torch.zeros(2, 4)), []
    monkeypatch.setattr(module, "sampling_batch", lambda batch, rows, device, logprobs: [row.request for row in rows])
    penalties = SimpleNamespace(penalize_prefill=lambda batch, logits: None)
    worker = SimpleNamespace(model_runner=SimpleNamespace(compute_logprobs_only=lambda *given: seen.append(given)))
    none = SimpleNamespace(max_new_tokens=0)
    reqs, states = [SimpleNamespace(grammar=None, sampling_params=none)] * 2, [SimpleNamespace(fallback=0, seed=5)] * 2
    batch = SimpleNamespace(reqs=reqs, seq_lens=torch.tensor([7, 9]), return_logprob=True)
    tokens = module._first_tokens(worker, batch, states, SimpleNamespace(logits_output=output), penalties)
    assert tokens.tolist() == [0, 0] and seen == [(output, [0, 1])]


def test_a_request_for_no_token_whose_grammar_advances_over_the_token_after_its_prompt_draws_one(monkeypatch):
    drawn = SimpleNamespace(tokens=torch.tensor([3, 4]))
    monkeypatch.setattr(module.RowSampler, "from_rows", lambda *given: SimpleNamespace(draw=lambda logits, positions: drawn))
    worker, penalties = SimpleNamespace(model_runner=None), SimpleNamespace(penalize_prefill=lambda batch, logits: None)
    none = SimpleNamespace(max_new_tokens=0)
    reqs = [SimpleNamespace(grammar=each, sampling_params=none) for each in (None, object())]
    batch = SimpleNamespace(reqs=reqs, seq_lens=torch.tensor([7, 9]), return_logprob=False)
    result = SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=torch.zeros(2, 4)))
    states = [SimpleNamespace(fallback=0, seed=5)] * 2
    assert module._first_tokens(worker, batch, states, result, penalties).tolist() == [3, 4]


def test_the_queries_of_all_are_kept():
    reqs = [SimpleNamespace(req_pool_idx=row) for row in (1, 2)]
    batch = SimpleNamespace(reqs=reqs, prefix_lens=[0, 40], extend_lens=[7, 5])
    assert tuple(module._recorded_queries(batch)) == (RecordedRows(1, 0, 7, 0), RecordedRows(2, 7, 12, 40))
