"""Values that fill no partition: exact, or quantized in each step again."""

import pytest
import torch
from test_bench_quality_attention import AFTER, TinyModel, layers

from sglang_ext.mem_cache.compressors.catalogue import method, quantizer
from sglang_ext_bench.prompts import Prompt
from sglang_ext_bench.quality.attention import (
    TailValues,
    measure_errors,
    relative_errors,
)

PARTITION, TOKENS = 32, 75


@pytest.fixture
def values() -> torch.Tensor:
    return torch.randn(TOKENS, 2, 64, generator=torch.Generator().manual_seed(3))


def states(values: torch.Tensor, requantizes: bool, first: int = 5, bits: int = 2) -> list[torch.Tensor]:
    return list(TailValues(quantizer("hack", bits, PARTITION), values, requantizes).states(first))


def test_only_whole_partitions_are_in_codes_and_stay_as_they_were_quantized_once(values):
    found = states(values, requantizes=False)
    assert [len(each) for each in found] == list(range(5, TOKENS + 1))
    for each in found:
        whole = len(each) // PARTITION * PARTITION
        assert torch.equal(each[whole:], values[whole : len(each)])
        assert torch.equal(each[:whole], found[-1][:whole])
    # Each value is rounded to one of its two neighbors. A partition of a channel has 4 levels.
    steps = found[-1][:PARTITION].amax(0) - found[-1][:PARTITION].amin(0)
    assert (found[-1][:PARTITION] - values[:PARTITION]).abs().le(steps / 3 + 1e-2).all()
    assert all(len(column.unique()) <= 4 for column in found[-1][:PARTITION, 0].T)


def test_without_elimination_all_are_in_codes_and_errors_add_up_until_the_partition_is_full(values):
    once, anew = states(values, False), states(values, True)
    assert all(len(column.unique()) <= 4 for each in anew for column in each[len(each) // PARTITION * PARTITION :, 0].T)
    last = slice(0, PARTITION)
    error = [(each[-1][last] - values[last]).square().mean() for each in (once, anew)]
    assert error[1] > 1.5 * error[0] > 0
    # A full partition does not change.
    assert torch.equal(anew[PARTITION - 5][last], anew[-1][last])


def test_a_code_that_its_scale_still_means_stays(values):
    values[5:PARTITION] = values[:5].mean(0)
    found = states(values[:PARTITION], True)
    # All values are in the range of the first five, so that scale and zero point stay, and dequantized values keep their codes.
    assert torch.allclose(found[-1][:5], found[0][:5], atol=1e-3)


@pytest.mark.parametrize("bits", [4, 2])
def test_errors_of_attention_grow_from_exact_to_requantized_values(bits):
    found = layers(tokens=256 + 40 + AFTER, dim=64)
    chosen = method("hack", bits, PARTITION)
    errors = {
        tail: relative_errors(found, 256 + 40, chosen, 1.0, tail=tail, seeds=torch.arange(296, dtype=torch.int32)).mean()
        for tail in ("exact", "filled", "requantized")
    }
    assert 0 < errors["exact"] < errors["filled"] < errors["requantized"] < 2


def test_before_a_partition_is_full_elimination_leaves_attention_as_it_is_served():
    found = layers(tokens=120 + AFTER, dim=64)
    chosen = method("hack", 4, 64)
    served, filled = (relative_errors(found, 120, chosen, 1.0, tail=tail) for tail in ("exact", "filled"))
    assert torch.allclose(served, filled, atol=1e-5)


def test_methods_without_partitions_are_measured_with_exact_values_alone():
    class Wide(TinyModel):
        """Heads of 32 channels."""

        def __init__(self) -> None:
            from transformers import LlamaConfig, LlamaForCausalLM

            torch.manual_seed(0)
            heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2, "vocab_size": 50}
            self._model = LlamaForCausalLM(LlamaConfig(hidden_size=64, intermediate_size=64, **heads)).eval()

    prompts = [Prompt("a", tuple(index % 50 for index in range(220)))]
    names = ["hack:2 --kv-partition 32", "kivi"]
    found = list(measure_errors(Wide(), prompts, names, [1.0], tokens=6, tails=("exact", "requantized")))
    assert [(each.compressor, each.tail) for each in found] == [(names[0], "exact"), (names[0], "requantized"), ("kivi", "exact")]
    assert found[0].mean < found[1].mean
