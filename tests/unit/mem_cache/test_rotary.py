"""The rotary embedding of SGLang's models is taken back, and averaged over positions, as it was applied."""

from types import SimpleNamespace

import pytest
import torch

from sglang_ext.core import OptionError
from sglang_ext.mem_cache.compressed.rotary import Rotary, find_rotary

DIM, POSITIONS = 32, 3000
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 256}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


class Attention(torch.nn.Module):
    """An attention layer as SGLang's models have it: beside its rotary embedding."""

    def __init__(self, embedding):
        super().__init__()
        self.attn, self.rotary_emb = torch.nn.Identity(), embedding


def model_of(*embeddings):
    return torch.nn.ModuleList(Attention(embedding) for embedding in embeddings)


def found(*embeddings):
    return find_rotary(model_of(*embeddings), lambda module: isinstance(module, torch.nn.Identity), "kvquant")


@pytest.fixture
def rope(monkeypatch):
    """SGLang's own rotary embeddings, made as its models make them."""
    from sglang.srt.layers.rotary_embedding import base
    from sglang.srt.layers.rotary_embedding.factory import get_rope

    execution = SimpleNamespace(deterministic=SimpleNamespace(rl_on_policy_target=None))
    monkeypatch.setattr(base, "get_exec", lambda: execution)
    return get_rope


@pytest.mark.parametrize(
    "options",
    [{}, {"is_neox_style": False}, {"partial_rotary_factor": 0.5}, {"rope_scaling": LLAMA3}, {"rope_scaling": YARN}],
    ids=["neox", "interleaved", "partial", "llama3", "yarn"],
)
def test_queries_are_as_before_sglang_rotated_them_and_the_mean_rotation_is_the_mean_of_its_rotations(rope, options):
    embedding = rope(DIM, DIM, POSITIONS, 10000, dtype=torch.float32, **options)
    rotary = found(embedding, embedding)
    positions = torch.tensor([0, 1, 7, 1000, POSITIONS - 1])
    before = torch.randn(len(positions), 2, DIM, generator=torch.Generator().manual_seed(0))
    after, _ = embedding.forward_native(positions, before.flatten(1).clone(), before.flatten(1).clone())
    after = after.view_as(before)
    # YaRN multiplies what it turns, keys too; that stays.
    turned = 2 * len(rotary.frequencies)
    factor = torch.ones(DIM)
    factor[:turned] = after[0, 0, :turned].norm() / before[0, 0, :turned].norm()
    torch.testing.assert_close(rotary.unrotate(after, positions), before * factor, atol=1e-3, rtol=0)

    by_head, expected = (part.transpose(0, 1) for part in (before * factor, after))
    torch.testing.assert_close(rotary.rotate(by_head, positions), expected, atol=1e-3, rtol=0)

    for count in (2, 0, 1000):
        shifted = positions[:-1] + count
        later, _ = embedding.forward_native(shifted, *[before[:-1].flatten(1).clone() for _ in "qk"])
        torch.testing.assert_close(rotary.rotate_ahead(after[:-1], count), later.view(-1, 2, DIM), atol=1e-3, rtol=0)

    coming = torch.arange(40, 48)
    one = before[:1].expand(8, -1, -1)
    rotated, _ = embedding.forward_native(coming, one.flatten(1).clone(), one.flatten(1).clone())
    mean = before[0] * factor @ rotary.mean_rotation(40, 8, DIM).t()
    torch.testing.assert_close(mean, rotated.view_as(one).mean(dim=0), atol=1e-5, rtol=0)


def test_a_table_in_bfloat16_gives_the_frequencies_too(rope):
    embedding = rope(DIM, DIM, POSITIONS, 10000, dtype=torch.float32)
    exact = found(embedding).frequencies
    rounded = SimpleNamespace(cos_sin_cache=embedding.cos_sin_cache.bfloat16(), is_neox_style=True)
    model = model_of(None)
    model[0].rotary_emb = rounded
    read = find_rotary(model, lambda module: isinstance(module, torch.nn.Identity), "kvquant").frequencies
    torch.testing.assert_close(read, exact, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("tables", "reason"),
    [
        ([None], "none beside its attention layers"),
        ([torch.rand(50, 8), torch.rand(50, 8)], "2 different ones"),
        ([torch.rand(50, 8)], "depend on the position"),
        ([torch.rand(50, 2, 8)], "unknown kind"),
    ],
)
def test_a_model_whose_rotary_embedding_is_not_known_is_refused(tables, reason):
    embeddings = [None if table is None else SimpleNamespace(cos_sin_cache=table, is_neox_style=True) for table in tables]
    model = model_of(*[None] * len(tables))
    for attention, embedding in zip(model, embeddings):
        attention.rotary_emb = embedding
    with pytest.raises(OptionError, match=f"--kv-compressor int8.kvquant .*{reason}.*--kv-compressor snapkv"):
        find_rotary(model, lambda module: isinstance(module, torch.nn.Identity), "int8+kvquant")


def test_rotations_of_one_position_keep_lengths_and_those_of_many_shorten_fast_pairs():
    rotary = Rotary(torch.tensor([1.0, 0.0]))
    alone, many = rotary.mean_rotation(5, 1, 4), rotary.mean_rotation(5, 500, 4)
    torch.testing.assert_close(alone @ alone.t(), torch.eye(4))
    assert many[0].norm() < 0.01 and many[1, 1] == 1
