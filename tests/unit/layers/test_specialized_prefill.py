"""Which prompts the kernels with specialized warps take, what is launched for them, and that their emulator sees who waits for nobody."""

import pytest
import torch
from hopper_emulator import Barrier, Stuck, Turns
from packed_helpers import on_gpu, record_launches
from prefill_checks import Batch

from sglang_ext.layers.kernels.gluon.prefill_steps import PrefillSteps
from sglang_ext.layers.kernels.packed import integer_prefill
from sglang_ext.layers.kernels.packed.prompt_codes import PromptCodes
from sglang_ext.layers.kernels.packed.integer_prefill import STAGES


def batch_of(monkeypatch, partition=64, group=4, capability=(9, 0)):
    batch = Batch(4, partition, 128, 1, group, 1, torch.float16, ((0, 150), (100, 201)), "cpu")
    batch.keys = on_gpu(batch.keys, monkeypatch, capability)
    return batch


def launches(monkeypatch, batch, **asked):
    """Names of what is launched, in order."""
    launched = record_launches(monkeypatch)
    codes = PromptCodes.empty(batch.packing, 1, batch.prompts.total, batch.keys.device)
    integer_prefill.attend(batch.prompts, codes, batch.queries, batch.keys, batch.values, 0.1, **asked)
    # The last argument of the kernel over tiles is where it leaves queries' codes for the other one.
    return ["codes" if name == "prefill_codes" else "tiles" if given[-1] is None else "exact tokens" for name, given in launched]


@pytest.mark.parametrize(
    ("partition", "group", "capability", "taken"),
    [
        (64, 4, (9, 0), True), (128, 1, (9, 0), True), (64, 2, (9, 0), True), (128, 7, (9, 0), True),
        # Half of a program's rows would be nobody's; other partitions; other GPUs, and none.
        (64, 3, (9, 0), False), (32, 4, (9, 0), False), (64, 4, (8, 0), False), (64, 4, (10, 0), False), (64, 4, None, False),
    ],
)  # fmt: skip
def test_prompts_on_hopper_whose_blocks_fill_programs_are_taken(monkeypatch, partition, group, capability, taken):
    batch = batch_of(monkeypatch, partition, group, capability)
    assert integer_prefill.is_supported(batch.prompts, batch.queries, batch.keys) == taken
    assert launches(monkeypatch, batch) == (["exact tokens", "codes"] if taken else ["tiles"])


def test_a_benchmark_gets_the_kernels_that_it_asks_for_or_an_error(monkeypatch):
    batch = batch_of(monkeypatch)
    assert launches(monkeypatch, batch, kernel="tiles") == ["tiles"]
    assert launches(monkeypatch, batch, kernel="specialized") == ["exact tokens", "codes"]
    with pytest.raises(ValueError, match="with 3 query heads a KV head on cpu, which .* does not support: pass 'tiles'"):
        launches(monkeypatch, batch_of(monkeypatch, group=3), kernel="specialized")


def test_what_is_left_of_queries_has_the_bytes_that_are_planned(monkeypatch):
    batch = batch_of(monkeypatch)
    left = integer_prefill.PrefillQueryCodes.empty(batch.queries, PromptCodes.empty(batch.packing, 1, 2, batch.keys.device))
    tokens, heads = batch.queries.shape[:2]
    assert sum(part.nbytes for part in left) == tokens * heads * integer_prefill.PrefillQueryCodes.query_bytes(128, 64)


def test_a_step_has_the_bytes_of_its_parts():
    batch = Batch(4, 64, 128, 1, 4, 1, torch.float16, ((0, 150),), "cpu")
    codes = PromptCodes.empty(batch.packing, 1, 1, batch.keys.device)
    steps = PrefillSteps(64, 128, 128, 1, 4, 64, 4, codes.key_terms.shape[2], codes.value_zeros.shape[2], STAGES[64])
    assert steps.bytes == sum(part.nbytes for part in codes) and steps.stages * steps.bytes < 227 << 10


def barriers(*counts):
    made = [Barrier() for _ in counts]
    for barrier, count in zip(made, counts):
        barrier.begin(count)
    return made


def test_partitions_pass_barriers_in_turn_and_bytes_come_when_someone_waits():
    full, empty = barriers(1, 1)
    memory, seen = torch.zeros(2), []

    def load():
        for step in range(3):
            turns.wait(empty, step % 2 ^ 1)
            full.copies.append((memory, torch.full((2,), float(step))))
            full.expect(8)
            seen.append(float(memory[0]))

    def attend():
        for step in range(3):
            turns.wait(full, step % 2)
            seen.append(float(memory[0]))
            empty.arrive()

    turns = Turns((0, 1))
    turns.run([(load, ()), (attend, ())])
    assert seen == [0, 0, 0, 1, 1, 2]


def test_partitions_that_all_wait_are_an_error_and_so_are_too_many_arrivals():
    (barrier,) = barriers(2)
    turns = Turns((0, 1))
    with pytest.raises(Stuck, match="all partitions wait"):
        turns.run([(lambda: (barrier.arrive(), turns.wait(barrier, 0)), ()), (lambda: None, ())])
    (other,) = barriers(1)
    other.expect(4)
    with pytest.raises(Stuck, match="more arrivals"):
        Turns((0,)).run([(other.arrive, ())])
