"""The forward of an iteration tells SGLang's LoRA layers which adapter each token takes."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.lora.backend.torch_backend import TorchNativeLoRABackend
from sglang.srt.lora.lora_manager import LoRAManager

from sglang_ext.layers import forward
from sglang_ext.platforms.plain_cpu import run_without_pinning

SLOT = {None: 0, "a": 1, "b": 2}
RANKS = {"a": 4, "b": 8}


class Manager(LoRAManager):
    """SGLang's manager with three adapters' slots and no model."""

    def __init__(self):
        self.fetched, self.enable_dp_attention = [], False
        self.max_loras_per_batch = len(SLOT)
        self.lora_backend = TorchNativeLoRABackend(len(SLOT), torch.device("cpu"))
        self.memory_pool = SimpleNamespace(uid_to_buffer_id=SLOT, get_buffer_id=SLOT.get)
        self.loras = {
            name: SimpleNamespace(config=SimpleNamespace(r=rank), scaling=2.0) for name, rank in RANKS.items()
        }

    def fetch_new_loras(self, new_loras, running_loras=frozenset()):
        self.fetched.append(new_loras)


def run_build(adapters, counts, **args):
    """Build the forward of requests that bring ``counts`` tokens each; also the manager it told."""
    manager = Manager()
    runner = SimpleNamespace(
        lora_manager=manager,
        server_args=SimpleNamespace(**{"enable_lora": True, "enable_lora_overlap_loading": False, **args}),
    )
    batch = SimpleNamespace(
        reqs=[SimpleNamespace(lora_id=adapter, rid=str(i)) for i, adapter in enumerate(adapters)],
        return_hidden_states=False,
        spec_algorithm=None,
        sampling_info=None,
    )
    total, lengths = sum(counts), torch.tensor([10 + count for count in counts])
    inputs = forward.ForwardInputs(
        tokens=torch.full((total,), 7), positions=torch.arange(total), slots=torch.arange(total),
        rows=torch.arange(len(counts)), lengths=lengths, lengths_cpu=lengths, counts=list(counts),
    )
    return run_without_pinning(forward.build_forward_batch, runner, batch, inputs), manager


@pytest.mark.parametrize("counts", [[1, 1, 1, 1], [5, 1, 3, 2]], ids=["drafts", "ragged"])
@pytest.mark.parametrize("adapters", [["a", None, "b", "b"], [None, None, None, None]], ids=["mixed", "base"])
def test_each_token_takes_the_adapter_of_its_request(adapters, counts):
    batch, manager = run_build(adapters, counts)
    info = manager.lora_backend.batch_info
    told = torch.repeat_interleave(info.weight_indices_cpu, info.seg_lens_cpu).tolist()
    assert told == [SLOT[adapter] for adapter, count in zip(adapters, counts) for _ in range(count)]
    assert info.has_active_lora == any(adapters)
    assert manager.fetched == [set(adapters)]
    # What the model and attention see stays the batch of requests.
    assert batch.lora_ids == adapters and batch.batch_size == len(counts)
    assert batch.forward_mode.is_target_verify() == (max(counts) > 1)


def test_adapters_that_load_by_themselves_are_not_fetched_again():
    _, manager = run_build(["a", "b"], [2, 1], enable_lora_overlap_loading=True)
    assert manager.fetched == []
    assert manager.lora_backend.batch_info is not None


def test_without_lora_its_manager_is_left_alone():
    _, manager = run_build([None], [2], enable_lora=False)
    assert manager.fetched == [] and manager.lora_backend.batch_info is None
