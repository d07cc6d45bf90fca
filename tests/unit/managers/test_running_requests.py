"""A round runs for the unfinished requests of a batch. The tensors that SGLang relays have an entry for each request of the batch."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_ext.managers.spec_decode.decode_loop import decode_unfinished
from sglang_ext.managers.spec_decode.round_result import KVDraftInput, RoundResult

VOCABULARY = 5


def batch_of(*finished):
    """Requests of which some have finished since SGLang built the batch."""
    count = len(finished)
    reqs = [
        SimpleNamespace(
            name=i, finished=lambda done=done: done, return_logprob=i == 0, return_hidden_states=False,
            sampling_params=SamplingParams(temperature=0),
        )
        for i, done in enumerate(finished)
    ]  # fmt: skip
    column = torch.arange(1.0, count + 1)
    info = SamplingBatchInfo(
        temperatures=column[:, None], top_ps=column, top_ks=column.int(), min_ps=column, is_all_greedy=True,
        is_any_greedy=True, need_top_p_sampling=False, need_top_k_sampling=False, need_min_p_sampling=False,
        vocab_size=VOCABULARY, logit_bias=column[:, None].repeat(1, VOCABULARY),
    )  # fmt: skip
    lengths = torch.arange(10, 10 + count)
    return SimpleNamespace(
        reqs=reqs, seq_lens=lengths, seq_lens_cpu=lengths, req_pool_indices=torch.arange(1, count + 1),
        spec_info=KVDraftInput(torch.arange(20, 20 + count)), sampling_info=info, return_logprob=True,
        top_logprobs_nums=list(range(count)), token_ids_logprobs=[None] * count, return_hidden_states=False,
    )  # fmt: skip


def round_of(seen):
    """Decodes a token of each request of the batch that it is given."""

    def decode(batch, on_publish):
        seen.append(batch)
        if on_publish is not None:
            on_publish(batch.seq_lens + 1)
        result = RoundResult.empty(batch.seq_lens)
        result.next_draft_input = KVDraftInput(batch.spec_info.bonus_tokens + 100)
        return result

    return decode


def test_where_all_run_the_batch_is_decoded_as_it_is():
    batch, seen = batch_of(False, False), []
    result = decode_unfinished(round_of(seen), batch, None)
    assert seen == [batch] and result.positions is None


def test_who_finished_is_left_out_and_the_others_keep_their_places():
    batch, seen, published = batch_of(True, False, True, False), [], []
    result = decode_unfinished(round_of(seen), batch, published.append)
    (part,) = seen
    assert [req.name for req in part.reqs] == [1, 3] == result.positions
    assert part.seq_lens.tolist() == part.seq_lens_cpu.tolist() == [11, 13] and part.req_pool_indices.tolist() == [2, 4]
    assert part.sampling_info.temperatures.tolist() == [[2.0], [4.0]] and part.sampling_info.logit_bias[:, 0].tolist() == [2.0, 4.0]
    assert not part.return_logprob, "nobody of them asks for log-probabilities"
    assert len(batch.reqs) == 4 and batch.sampling_info.temperatures.shape == (4, 1), "SGLang's batch stays as it is"
    assert [lengths.tolist() for lengths in published] == [[10, 12, 12, 14]]
    assert result.next_draft_input.bonus_tokens.tolist() == [0, 121, 0, 123]


@pytest.mark.parametrize("published", [[], None], ids=["overlapped", "plain"])
def test_where_nobody_runs_nothing_is_decoded(published):
    batch = batch_of(True, True)
    result = decode_unfinished(lambda *_: 1 / 0, batch, None if published is None else published.append)
    assert result.positions == [] and len(result.accept_lens) == 0
    assert result.next_draft_input.bonus_tokens.tolist() == [0, 0]
    assert published is None or [lengths.tolist() for lengths in published] == [[10, 11]]
