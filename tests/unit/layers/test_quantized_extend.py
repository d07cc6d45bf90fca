"""On a GPU prompts' attention is a kernel's, and all else SGLang's own; here PyTorch stands in for the kernel."""

from types import SimpleNamespace

import pytest
import torch

from sglang_ext.core import OptionError
from sglang_ext.layers.attention import quantized_prefill
from sglang_ext.layers.attention.quantized_prefill import QuantizedExtend, QuantizedPrefill
from sglang_ext.layers.kernels.packed.integer_prefill import check_prefill
from sglang_ext.layers.kernels.packed.prompt_codes import PromptCodes, PromptBatch
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressors.integer_quantizers import Hack

DIM, HEADS, QUERY_HEADS, LAYER, WIDTH = 64, 2, 4, 3, 200
ROWS, KNOWN, LENGTHS = [4, 1, 2], [0, 100, 5], [150, 140, 30]


class World:
    """A backend of SGLang's with a pool, and prompts of three requests; ``asked``: what the kernel was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        drawn = torch.Generator().manual_seed(0)
        self.pools = [torch.randn(1000, HEADS, DIM, generator=drawn) for _ in "kv"]
        self.table = torch.randperm(5 * WIDTH, generator=drawn).view(5, WIDTH).int()
        self.written: list[tuple[object, ...]] = []
        pool = SimpleNamespace(
            get_key_buffer=lambda layer: self.pools[0], get_value_buffer=lambda layer: self.pools[1],
            set_kv_buffer=lambda *given: self.written.append(given),
        )  # fmt: skip
        self.backend = SimpleNamespace(forward_extend=lambda q, k, v, layer, batch, **more: "exact")
        runner = SimpleNamespace(
            attn_backend=self.backend, token_to_kv_pool=pool, req_to_token_pool=SimpleNamespace(req_to_token=self.table),
            model_config=SimpleNamespace(num_attention_heads=QUERY_HEADS), server_args=SimpleNamespace(tp_size=1), dtype=torch.float32,
        )  # fmt: skip
        packing = Packing.for_pool(Hack(4), KVBuffers((LAYER,), (0.1,), *((pool,) for pool in self.pools)), 1)
        self.prefill, self.asked = QuantizedPrefill(packing, 0), []
        monkeypatch.setattr(quantized_prefill, "integer_prefill", self._in_pytorch)
        QuantizedExtend(runner, self.prefill).install()
        assert self.asked.pop().lengths == [69], "compiled at the start"
        self.seeds = {row: torch.arange(length, dtype=torch.int32) for row, length in zip(ROWS, LENGTHS)}
        self.batch = SimpleNamespace(extend_prefix_lens_cpu=KNOWN, extend_seq_lens_cpu=[b - a for a, b in zip(KNOWN, LENGTHS)], out_cache_loc="new slots")
        self.queries = torch.randn(sum(LENGTHS) - sum(KNOWN), QUERY_HEADS, DIM, generator=drawn)

    def _in_pytorch(self, prompts: PromptBatch, queries, keys, values, layer, first_head, scaling) -> torch.Tensor:
        self.asked.append(prompts)
        prefill, found, start = QuantizedPrefill(prompts.packing, first_head), [], 0
        with prefill.computing_prompts(prompts.seeds):
            for row, known, length in zip(prompts.rows, prompts.known, prompts.lengths):
                slots = self.table[row, :length].long()
                found.append(prefill.attend(layer, row, queries[start : start + length - known], keys, values, slots, scaling))
                start += length - known
        return torch.cat(found)

    def attend(self, queries: torch.Tensor, **layer) -> torch.Tensor:
        wanted = SimpleNamespace(
            layer_id=LAYER, tp_q_head_num=QUERY_HEADS, qk_head_dim=DIM, v_head_dim=DIM, scaling=0.1, sliding_window_size=-1, logit_cap=0.0,
            xai_temperature_len=-1, k_scale=None, v_scale=None,
        )  # fmt: skip
        vars(wanted).update(layer)
        return self.backend.forward_extend(queries.flatten(1), "k", "v", wanted, self.batch, save_kv_cache=True)


def test_prompts_attend_to_codes_in_groups_that_have_room_and_the_rest_to_kv_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    assert world.attend(world.queries) == "exact" and not world.written
    with world.prefill.computing_prompts(world.seeds):
        found = world.attend(torch.cat([world.queries, torch.ones(3, QUERY_HEADS, DIM)]))
        world.attend(world.queries)
    assert [prompts.rows for prompts in world.asked] == [[4], [1, 2]] * 2 
    assert [(where.loc, keys, values) for _, where, keys, values, *_ in world.written] == [("new slots", "k", "v")] * 2
    assert world.asked[0] is world.asked[2], "made once for all layers"
    start = 0
    for row, known, length in zip(ROWS, KNOWN, LENGTHS):
        with world.prefill.computing_prompts(world.seeds):
            mine = world.queries[start : start + length - known]
            expected = world.prefill.attend(LAYER, row, mine, *world.pools, world.table[row, :length].long(), 0.1)
        assert torch.allclose(found[start : start + len(mine)], expected.flatten(1), atol=1e-6)
        start += len(mine)
    assert not found[start:].any(), "nobody's"
    stored = {1: torch.arange(20)}
    with world.prefill.computing_prompts(world.seeds, stored):
        world.attend(world.queries)
    assert all(prompts.stored is stored for prompts in world.asked[-2:]), "the kernel reads what lies in the pool"
    assert world.attend(world.queries) == "exact"


@pytest.mark.parametrize(("wanted", "named"), [({"logit_cap": 30.0}, "a cap of logits"), ({"sliding_window_size": 128}, "a window")])
def test_layers_that_want_more_are_refused(monkeypatch: pytest.MonkeyPatch, wanted: dict[str, float], named: str) -> None:
    world = World(monkeypatch)
    with world.prefill.computing_prompts(world.seeds), pytest.raises(ValueError, match=f"{named}, which prompts that attend to codes lack"):
        world.attend(world.queries, **wanted)


@pytest.mark.parametrize(
    ("pool", "named"), [(torch.zeros(1, 1, 96), "keys have 96 channels a head"), (torch.zeros(1, 1, 64).double(), "keys as torch.float64")]
)
def test_pools_that_kernels_do_not_take_are_refused(pool: torch.Tensor, named: str) -> None:
    packing = Packing.for_pool(Hack(4), KVBuffers((0,), (0.1,), *((torch.zeros(1, 1, 64),) for _ in "kv")), 1)
    with pytest.raises(OptionError, match=named + ".*: pass --kv-prefill exact"):
        check_prefill(packing, pool, pool)


@pytest.mark.parametrize(("dim", "partition"), [(128, 64), (64, 32), (128, 128), (128, 32)])
def test_the_plan_of_memory_counts_what_codes_take(dim: int, partition: int) -> None:
    packing = Packing.for_pool(Hack(4, partition=partition), KVBuffers((0,), (0.1,), *((torch.zeros(1, 2, dim),) for _ in "kv")), 1)
    made = PromptCodes.empty(packing, 2, 3, torch.device("cpu"))
    assert sum(part.nbytes for part in made) == 2 * 3 * packing.block_tokens * PromptCodes.token_bytes(dim, dim, partition)
