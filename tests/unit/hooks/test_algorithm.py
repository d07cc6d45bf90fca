"""What a round begins with whose requests another server prefilled."""

from types import SimpleNamespace

import pytest
import torch

from sglang_ext.hooks.algorithm import KVVerifiedAlgorithm


class Relay:
    """SGLang's relay, of which only what is written is kept."""

    def __init__(self) -> None:
        self.lengths, self.tokens = None, None

    def publish(self, rows, lengths):
        self.lengths = dict(zip(rows.tolist(), lengths.tolist()))

    def stash(self, rows, payload):
        self.tokens = dict(zip(rows.tolist(), payload.bonus_tokens.tolist()))


def prebuilt(overlap: bool):
    grammar = SimpleNamespace(current_token=None)
    requests = [SimpleNamespace(grammar=grammar, output_ids=[5]), SimpleNamespace(grammar=None, output_ids=[3, 8])]
    rows, lengths = torch.tensor([4, 2]), torch.tensor([100, 70])
    return SimpleNamespace(reqs=requests, enable_overlap=overlap, req_pool_indices=rows, seq_lens=lengths), grammar


@pytest.mark.parametrize("overlap", [False, True])
def test_a_round_begins_with_the_first_tokens_relayed_where_the_loop_overlaps(overlap):
    (batch, _), relay = prebuilt(overlap), Relay()
    between = KVVerifiedAlgorithm.build_disagg_draft_input(None, batch, None, torch.tensor([5, 8]), relay)
    assert between.bonus_tokens.tolist() == [5, 8]
    assert relay.tokens == ({4: 5, 2: 8} if overlap else None)
    assert relay.lengths == ({4: 100, 2: 70} if overlap else None)


def test_a_grammar_says_that_it_has_seen_the_newest_token_so_that_a_retracted_request_does_not_give_it_twice():
    batch, grammar = prebuilt(False)
    KVVerifiedAlgorithm.build_disagg_draft_input(None, batch, None, torch.tensor([5, 8]), Relay())
    assert grammar.current_token == 5
