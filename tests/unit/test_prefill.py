"""What a prefill tells SGLang's scheduler, and when."""

from contextlib import nullcontext
from types import SimpleNamespace

import torch

from sglang_ext.managers import prefill as module
from sglang_ext.mem_cache.query_window import Recorded


def test_lengths_of_a_prefill_are_known_before_it_runs(monkeypatch):
    """Else the scheduler would wait for its end before it prepares the next round, and show the first token later."""
    seen = []
    result = SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=torch.zeros(1, 4)))

    def forward(batch, is_verify):
        assert is_verify
        seen.append("forward")
        return result

    sampled = SimpleNamespace(tokens=torch.tensor([3]))
    monkeypatch.setattr(module.Sampling, "of", lambda *args: SimpleNamespace(draw=lambda logits, positions: sampled))
    worker = SimpleNamespace(
        queries=SimpleNamespace(recording=lambda rows: nullcontext()),
        server_args=SimpleNamespace(kv_schedule="lockstep"),
        target_worker=SimpleNamespace(forward_batch_generation=forward),
        model_runner=None,
        requests=SimpleNamespace(admit=lambda req, matched: SimpleNamespace(fallback=0, seed=5)),
        schedule=SimpleNamespace(begin=lambda states, tokens: None),
    )
    reqs, lengths = [SimpleNamespace(req_pool_idx=1, grammar=None)], torch.tensor([7])
    batch = SimpleNamespace(reqs=reqs, prefix_lens=[0], extend_lens=[7], seq_lens=lengths, return_logprob=False)
    found = module.prefill(worker, batch, on_publish=lambda lengths: seen.append(lengths.tolist()))
    assert seen == [[7], "forward"]
    assert found.next_token_ids.tolist() == [3] and found.new_seq_lens.tolist() == [7]


def test_queries_are_kept_but_of_requests_that_lockstep_never_drafts():
    reqs = [SimpleNamespace(req_pool_idx=row, grammar=grammar) for row, grammar in ((1, None), (2, object()), (3, None))]
    batch = SimpleNamespace(reqs=reqs, prefix_lens=[0, 0, 40], extend_lens=[7, 3, 5])
    assert module._to_record(batch, lockstep=True) == (Recorded(1, 0, 7, 0), Recorded(3, 10, 15, 40))
    assert len(module._to_record(batch, lockstep=False)) == 3
