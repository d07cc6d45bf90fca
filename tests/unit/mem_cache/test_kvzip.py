"""Documents' scores: found by the tokens that a prompt begins with, checked, and ranked beside those of an online method."""

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from sglang_ext.core import OptionError
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressors import ContextKV, Part
from sglang_ext.mem_cache.compressors.catalogue import create
from sglang_ext.mem_cache.compressors.kvzip import (
    MIN_MATCH,
    KVzip,
    ScoreFile,
    ScoreFileError,
    ScoreIndex,
    ScoredDocument,
    StoredScores,
    document_hashes,
    write_scores,
)
from sglang_ext.mem_cache.compressors.attention_scores import SinkRecent
from sglang_ext.mem_cache.scores import model_folder, model_key

LAYERS, HEADS, DIM = 2, 2, 4
TOKENS = list(range(1000, 1200))


def store(folder, tokens=TOKENS, model="m", layers=LAYERS, seed=0):
    """A document's file, and its scores as they are stored."""
    document = ScoredDocument.from_tokens(tokens, model, "kvzip", {"chunk": 64})
    scores = torch.rand(layers, HEADS, len(tokens), generator=torch.Generator().manual_seed(seed))
    return write_scores(folder, document, scores), scores[..., : document.tokens].half()


def index(folder):
    return ScoreIndex.open(folder, "kvzip", "m", LAYERS, HEADS)


def context(prompt, tokens):
    """A context of so many tokens, without queries."""
    generator = torch.Generator().manual_seed(tokens)
    keys, values = ([torch.randn(tokens, HEADS, DIM, generator=generator) for _ in range(LAYERS)] for _ in range(2))
    buffers = KVBuffers((0, 1), (0.5, 0.5), tuple(keys), tuple(values))
    nothing = torch.empty(LAYERS, 0, HEADS, DIM), torch.empty(0, dtype=torch.int64)
    return ContextKV(buffers, torch.arange(tokens), *nothing, prompt=prompt)


@given(st.lists(st.integers(0, 2**31), max_size=80), st.integers(0, 79), st.integers(1, 9))
def test_a_changed_token_changes_the_hashes_of_its_page_and_of_all_after_it(tokens, place, change):
    changed = [token + change * (i == place) for i, token in enumerate(tokens)]
    same = [a == b for a, b in zip(document_hashes(tokens), document_hashes(changed))]
    assert same == [place >= len(tokens) or page < place // 16 for page in range(len(tokens) // 16)]


def test_a_prompt_gets_the_scores_of_the_pages_that_it_shares_with_the_document_it_shares_most_with(tmp_path):
    _, scores = store(tmp_path)
    _, of_longer = store(tmp_path, TOKENS[:160] + list(range(80)), seed=1)
    found = index(tmp_path)
    assert torch.equal(found.match([*TOKENS, 5, 6, 7]), scores)
    assert torch.equal(found.match(TOKENS[:160] + list(range(50))), of_longer[..., :208])
    assert torch.equal(found.match(TOKENS[: MIN_MATCH + 15]), scores[..., :MIN_MATCH])


@pytest.mark.parametrize(
    "prompt", [TOKENS[1:], TOKENS[: MIN_MATCH - 1], [], [0, *TOKENS]], ids=["shifted", "short", "empty", "prefixed"]
)
def test_a_prompt_that_does_not_begin_with_a_document_has_none(tmp_path, prompt):
    store(tmp_path)
    assert index(tmp_path).match(prompt) is None


def change_scores(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (change_scores, "checksum differs"),
        (lambda path: path.write_bytes(path.read_bytes()[:-40]), "cannot be read"),
        (lambda path: path.unlink(), "cannot be read"),
    ],
    ids=["changed", "cut", "gone"],
)
def test_a_file_that_changed_under_a_running_server_is_said_once_and_served_by_the_online_method(tmp_path, caplog, harm, reason):
    path, _ = store(tmp_path)
    method = KVzip(SinkRecent(), index(tmp_path))
    harm(path)
    for _ in range(2):
        assert method.for_context(context(TOKENS, 200)).name == "sink-recent"
    assert caplog.text.count(reason) == 1 and path.name in caplog.text


def test_a_rank_chooses_by_the_scores_of_its_own_heads(tmp_path):
    _, scores = store(tmp_path)
    chosen = KVzip(SinkRecent(), index(tmp_path), slice(1, 2)).for_context(context(TOKENS, scores.shape[-1]))
    assert torch.equal(chosen.stored, scores[:, 1:2])


def test_a_file_that_is_touched_while_it_is_mapped_is_checked_again(tmp_path):
    path, scores = store(tmp_path)
    found = index(tmp_path)
    assert torch.equal(found.match(TOKENS), scores)
    whole = path.read_bytes()
    path.write_bytes(whole[:-600])
    assert found.match(TOKENS) is None
    path.unlink()
    path.write_bytes(whole)
    assert torch.equal(found.match(TOKENS), scores)


def test_files_that_do_not_fit_the_model_are_named_and_not_used(tmp_path, caplog):
    store(tmp_path, model="other")
    store(tmp_path, TOKENS[::-1], layers=3)
    (tmp_path / "notes.safetensors").write_text("no tensors")
    found = index(tmp_path)
    assert found.match(TOKENS) is None and found.match(TOKENS[::-1]) is None
    for reason in ("another model: other, not m", "another layers and KV heads: (3, 2), not (2, 2)", "is not a file of scores"):
        assert reason in caplog.text


def test_a_file_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    monkeypatch.setattr("os.replace", lambda *paths: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        store(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_another_version_is_refused(tmp_path):
    path, _ = store(tmp_path)
    with safe_open(path, "pt") as opened:
        metadata, tensors = opened.metadata(), {name: opened.get_tensor(name) for name in opened.keys()}
    save_file(tensors, path, {**metadata, "format": "0"})
    with pytest.raises(ScoreFileError, match="format '0'.*'1'.*make it again"):
        ScoreFile.read(path)


def test_the_key_of_a_model_depends_on_its_weights_and_config_but_not_on_who_wrote_it(tmp_path):
    def key(weights, config):
        (tmp_path / "model.safetensors").write_bytes(weights)
        (tmp_path / "config.json").write_text(config)
        return model_key(tmp_path)

    first = key(b"abc" * 9999, '{"hidden_size": 4, "transformers_version": "5"}')
    assert first == key(b"abc" * 9999, '{"transformers_version": "6", "hidden_size": 4}')
    assert len({first, key(b"abd" * 9999, '{"hidden_size": 4}'), key(b"abc" * 9999, '{"hidden_size": 5}')}) == 3


def test_a_model_without_files_has_no_key():
    with pytest.raises(OptionError, match="no-such-model is no folder .*pass its folder"):
        model_folder("no-such-model")


@given(st.integers(1, 199), st.integers(1, 60), st.integers(0, 150), st.floats(0.05, 1))
@example(known=1, more=16, start=1, budget=0.1875)
@settings(max_examples=60, deadline=None)
def test_each_part_keeps_its_count_and_what_is_always_kept_comes_first(known, more, start, budget):
    tokens = known + more
    start = min(start, tokens - 1)
    count = max(1, int(budget * (tokens - start)))
    stored = torch.rand(LAYERS, HEADS, known).half()
    stored[..., :4] = float("inf")

    class Online(SinkRecent):
        """Keeps the last tokens in any case."""

        def always(self, context):
            return super().always(context)._replace(newest=min(3, more))

        def scores(self, layer):
            return super().scores(layer).clone().index_fill_(1, torch.arange(tokens - min(3, more), tokens), float("inf"))

    (kept,) = StoredScores(stored, Online()).select(context((), tokens), [Part(start, tokens, count)])
    assert kept.shape == (LAYERS, HEADS, count)
    assert (kept[..., 1:] > kept[..., :-1]).all() and kept.min() >= start and kept.max() < tokens
    # The first four: those that are stored by their scores, others by the online method.
    always = {place for place in (*range(min(4, tokens)), *range(tokens - min(3, more), tokens)) if place >= start}
    if count >= len(always):
        assert all(always <= set(head) for head in kept.flatten(0, 1).tolist())


def test_the_budget_is_shared_in_proportion_to_the_tokens_of_each_method(tmp_path):
    _, scores = store(tmp_path, TOKENS[:192])
    chosen = KVzip(SinkRecent(sinks=0), index(tmp_path)).for_context(context(TOKENS, 256))
    assert chosen.name == "kvzip"
    (kept,) = chosen.select(context(TOKENS, 256), [Part(0, 256, 64)])
    assert ((kept < 192).sum(-1) == 48).all()
    assert torch.equal(kept[..., 48:], torch.arange(240, 256).expand(LAYERS, HEADS, -1)), "the newest"
    assert torch.equal(kept[..., :48], scores.topk(48).indices.sort().values), "those of the file"


def test_without_documents_it_is_the_online_method():
    given_context = context(TOKENS, 200)
    assert create("kvzip").for_context(given_context).name == "snapkv"
    assert KVzip(create("expected-attention")).window == 128 and KVzip(create("expected-attention")).needs_rotary
