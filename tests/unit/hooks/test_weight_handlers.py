"""Updates of weights that fail are refused on all ranks, and end none of them."""

import multiprocessing
from types import SimpleNamespace

import pytest
import torch.distributed
from sglang.srt.managers.io_struct import (
    InitWeightsUpdateGroupReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromTensorReqInput,
    UpdateWeightsFromTensorReqOutput,
)

from sglang_ext.hooks.weights import refuse_update

TENSORS = UpdateWeightsFromTensorReqInput(serialized_named_tensors=[b""])


def rank_outcome(rank, folder, outcomes, failing):
    """One of two ranks updates its weights; those of ``failing`` raise before SGLang's handler waits for the others."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=2)
    manager = SimpleNamespace(is_fully_idle=lambda: True, tp_cpu_group=torch.distributed.group.WORLD)

    def handler(manager, recv_req):
        if rank in failing:
            raise KeyError("model.norm.weight")
        torch.distributed.barrier()
        return UpdateWeightsFromTensorReqOutput(success=True, message="Success")

    outcome = refuse_update(handler, manager, TENSORS)
    outcomes.put((rank, outcome.success, outcome.message))


@pytest.mark.parametrize("failing", [(), (1,), (0, 1)])
def test_all_ranks_refuse_an_update_that_one_of_them_cannot_carry_out(tmp_path, failing):
    # Forked: loading SGLang anew takes longer than all else.
    context = multiprocessing.get_context("fork")
    outcomes = context.SimpleQueue()
    ranks = [context.Process(target=rank_outcome, args=(rank, tmp_path, outcomes, failing)) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(60)
        assert each.exitcode == 0
    found = sorted(outcomes.get() for _ in ranks)
    assert [success for _, success, _ in found] == [not failing] * 2
    assert all("model.norm.weight" in message for _, _, message in found if failing)


@pytest.fixture
def alone(tmp_path):
    """The manager of a single rank that is not idle."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield SimpleNamespace(is_fully_idle=lambda: False, tp_cpu_group=torch.distributed.group.WORLD)
    torch.distributed.destroy_process_group()


def test_an_update_that_has_to_flush_the_cache_is_refused_before_it_begins_where_a_request_runs(alone):
    names = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]]}
    for update in (TENSORS, UpdateWeightFromDiskReqInput(model_path="m"), UpdateWeightsFromDistributedReqInput(**names)):
        outcome = refuse_update(lambda manager, recv_req: pytest.fail("it began"), alone, update)
        assert not outcome.success and "flush_cache" in outcome.message


def test_what_flushes_nothing_does_not_wait_for_requests(alone):
    group = InitWeightsUpdateGroupReqInput(master_address="a", master_port=1, rank_offset=0, world_size=1)
    done = SimpleNamespace(success=True, message="")
    assert refuse_update(lambda manager, recv_req: done, alone, group) is done
