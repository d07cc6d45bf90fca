"""Compile kernels for an NVIDIA GPU where there is none: ``compile_checks.py [--all]``. Types that the interpreter lets pass fail here.

Without ``--all``, the first quarter of each list of shapes is compiled, at least one. ``make matrix`` passes ``--all``.
"""

import re
import subprocess
import sys
import tempfile
from unittest.mock import patch

import torch
import triton
from hand_over_checks import Pair
from marked_helpers import written
from packed_helpers import packed_pool, pool_by
from prefill_checks import FIRST_HEAD, LAYER, Batch
from rank_checks import rank_of
from triton.backends.compiler import GPUTarget
from triton.runtime._async_compile import FutureKernel
from triton.runtime.jit import JITFunction

from sglang_ext.layers.kernels import per_head_decode, key_scores, quantized_keys, exchange_kernels, gpu_launch, kv_copies, row_exchange, quest_pages
from sglang_ext.layers.kernels.select_tokens import SelectionContexts, mark_tokens
from sglang_ext.layers.kernels.key_scores import rotate_queries
from sglang_ext.layers.kernels.quantized_keys import quantize_keys, QuantizedKeyTensors
from sglang_ext.layers.kernels.packed import integer_prefill, pack_blocks, packed_decode
from sglang_ext.layers.kernels.packed.prompt_codes import PromptCodes, prompt_codes
from sglang_ext.layers.kernels.lynx import triton_codec as codec, residual_pages
from sglang_ext.layers.kernels.lynx.layout import PageLayout, PageTensors
from sglang_ext.managers.cache_rank.protocol import Attached, BLOCK, Lease, SelectionRequest
from sglang_ext.mem_cache.compressed.layouts.pointers import PagePointerLayout, PointerLayout, Pointers, as_pointers
from sglang_ext.mem_cache.compressed.layouts.ragged_heads import RaggedHeadLayout
from sglang_ext.mem_cache.compressed.key_derived_data import PageExtremes
from sglang_ext.mem_cache.compressors.catalogue import quantizer
from sglang_ext.mem_cache.compressors.step_selectors import Quest
from sglang_ext.mem_cache.host_tier.page_copies import ResidualPages
from sglang_ext.mem_cache.selection.scoring_keys import QuantizedKeys, KeySpec

KINDS = (("lynx", 2), ("hack", 4), ("int8", 8), ("kivi", 4), ("kivi", 2), ("turboquant", 4), ("lynx", 4), ("hack", 2))
# Blocks to pack: method, bits, channels of a head, numbers of a pool.
PACKED = (
    ("kivi", 4, 128, torch.bfloat16), ("turboquant", 2, 64, torch.bfloat16), ("int8", 8, 128, torch.float32), ("hack", 2, 64, torch.float16),
    ("rotatekv", 4, 128, torch.bfloat16), ("lynx", 4, 128, torch.bfloat16), ("kivi", 2, 64, torch.float16), ("turboquant", 4, 128, torch.float32),
    ("lynx", 2, 64, torch.float32), ("hack", 4, 128, torch.bfloat16),
)  # fmt: skip
# Blocks for the Gluon kernel: method, bits, channels of a head, queries that share a KV head.
TILES = (("kivi", 4, 128, 4), ("int8", 8, 64, 1), ("kivi", 2, 128, 8), ("int4", 4, 128, 16))
# Dtypes of pages to encode and decode. Encoding takes 5 to 15 s of a core to compile.
CODECS = (torch.bfloat16, torch.float16, torch.float32)
# Blocks whose integers it multiplies: bits, channels of a head, partition, queries that share a KV head.
INTEGERS = ((4, 128, 64, 4), (2, 128, 128, 3), (4, 64, 64, 1), (2, 128, 64, 4), (2, 128, 64, 8), (4, 128, 128, 4))


def some(cases, everything):
    """All ``cases``, or the first quarter of them, rounded up."""
    return cases if everything else cases[: (len(cases) + 3) // 4]


class Hopper:
    """Triton's driver of a machine with one."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compile_only(compiled):
    """Let launches compile, and note the kernels' names and what they became."""
    triton.runtime.driver.set_active(Hopper())
    run = JITFunction.run

    def compiling(self, *args, grid, warmup, **kwargs):
        made = run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append((self.__name__, made))
        return made

    JITFunction.run = compiling


def decode(name, bits, dim, group):
    """Attend to packed copies of one request; answers them, and its table and row."""
    return attend(packed_pool(name, bits, 2, 75, heads=1, dim=dim, dtype=torch.bfloat16), group)


def attend(pool, group):
    """The same, of a pool that is there."""
    dim = pool.packing.keys.dim
    table, rows = torch.zeros(2, len(pool.row), dtype=torch.int32), torch.tensor([1])
    buffers, slots = (pool.buffers.keys[0], pool.buffers.values[0]), torch.zeros(2, dtype=torch.int32)
    packed_decode.packed_decode(pool.packing, torch.zeros(1, group, dim).bfloat16(), *buffers, table, rows, rows, slots, 0.1)
    return pool, table, rows


def check_tiles(compiled, everything):
    """The Gluon kernel keeps everything in registers: nothing is stored to shared memory, and a number or two at most spill."""
    for name, bits, dim, group in some(TILES, everything):
        decode(name, bits, dim, group)
        kernel, made = compiled[-2]
        counts = {part: len(re.findall(rf"\b{part}\b", made.asm["sass"])) for part in ("HMMA", "STS", "LDSM")}
        assert kernel == "packed_splits_gluon" and counts.pop("HMMA") > 0
        # With two columns of tiles some registers are too few. What a program needs at its end only may wait in memory.
        if group <= 8:
            assert not any(counts.values()) and stack_bytes(made) <= 16, (name, bits, dim, group, counts, stack_bytes(made))


def check_integers(compiled, everything):
    """So does the one that multiplies integers: whatever layouts change to and from is in the registers already."""
    for bits, dim, partition, group in some(INTEGERS, everything):
        attend(pool_by(quantizer("hack", bits, partition), 2, 75, heads=1, dim=dim, dtype=torch.bfloat16), group)
        kernel, made = compiled[-2]
        counts = {part: len(re.findall(rf"\b{part}\b", made.asm["sass"])) for part in ("IMMA", "STS", "LDSM")}
        assert kernel == "integer_splits_gluon" and counts.pop("IMMA") > 0
        assert not any(counts.values()) and stack_bytes(made) <= 16, (bits, dim, partition, group, counts, stack_bytes(made))


def stack_bytes(made):
    """Bytes of memory that a thread has for what registers cannot hold."""
    return _used(made, "STACK")


def registers(made):
    """Of a thread."""
    return _used(made, "REG")


def _used(made, what):
    """What a kernel takes; long ones are cut off in what Triton disassembles."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return int(re.search(rf"{what}:(\d+)", usage)[1])


def check_packing(compiled, everything):
    """Packing keeps all in registers, and of a pool of 16 bits two programs fit on a processor."""
    for name, bits, dim, dtype in some(PACKED, everything):
        pool = packed_pool(name, bits, 2, 0, heads=2, dim=dim, dtype=dtype)
        kept, slots = torch.zeros(1, 2, 128, dtype=torch.int64), torch.zeros(128, dtype=torch.int64)
        seeds = slots.int() if pool.packing.stochastic else None
        pack_blocks.pack_blocks(pool.packing, pool.buffers, kept, slots, slots, seeds)
        for kernel, made in compiled[-2:]:
            assert (kernel, stack_bytes(made)) == ("pack_tiles", 0), (name, bits, dim, dtype)
            assert dtype == torch.float32 or made.metadata.shared <= (113 << 10)


def check_codec(compiled, codecs):
    """What encodes and decodes pages keeps all in registers."""
    for dtype in codecs:
        layout = PageLayout(96, 128, dtype, sinks=4)
        parts, slots = PageTensors.from_tensors([torch.zeros(96, 128, dtype=dtype)]), torch.zeros(96, dtype=torch.int64)
        begin = len(compiled)
        anchors, rests = codec.anchors(parts, layout, slots)
        for rest in (None, list(rests)):
            codec.decode(list(anchors), rest, layout, parts, slots)
        for kernel, made in compiled[begin:]:
            assert stack_bytes(made) == 0, (kernel, dtype)


def check_anchored(compiled, everything):
    """So does what writes pages as residuals of packed blocks, and reads them."""
    cases = ((4, 128, torch.bfloat16), (2, 64, torch.float32), (2, 64, torch.float16), (2, 128, torch.float32))
    for bits, dim, dtype in some(cases, everything):
        pool = packed_pool("lynx", bits, 2, 0, heads=2, dim=dim, dtype=dtype)
        pages = ResidualPages(pool.buffers, pool.packing, 64)
        slots, blocks = torch.zeros(128, dtype=torch.int64), torch.zeros(2, pool.packing.block_slots, dtype=torch.int64)
        rooms, sizes = torch.zeros(2, pages.page_bytes, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
        begin = len(compiled)
        residual_pages.write_pages(pool.buffers, pages.layout, pool.packing, slots, blocks, rooms, sizes)
        residual_pages.read_pages(pool.buffers, pages.layout, pool.packing, rooms, sizes, slots, blocks)
        residual_pages.read_pages(pool.buffers, pages.layout, pool.packing, rooms, sizes, slots, None)
        for kernel, made in compiled[begin:]:
            assert stack_bytes(made) == 0, (kernel, bits, dim, dtype, stack_bytes(made))


def check_prefill(compiled, everything):
    """Prompts' products of integers are those of tensor cores, with weights from registers; few spill, and in partitions of 128 alone."""
    for bits, partition, dim, group in some(((4, 64, 128, 4), (4, 128, 128, 5), (2, 64, 64, 1)), everything):
        batch = Batch(bits, partition, dim, 1, group, 1, torch.bfloat16, ((0, 200),), "cpu")
        given = batch.queries, batch.keys, batch.values
        made = prompt_codes(batch.prompts, *given[1:], LAYER, FIRST_HEAD)
        integer_prefill.attend(batch.prompts, made, *given, 0.1, kernel="tiles")
        (codes, first), (tiles, second) = compiled[-2:]
        assert (codes, tiles) == ("quantize_prompts", "prefill_tiles") and stack_bytes(first) <= 32 * (partition == 128)
        assert "wgmma.mma_async.sync.aligned.m64n" in second.asm["ptx"] and ".s32.s8.s8" in second.asm["ptx"]
        assert stack_bytes(second) <= 104 * (partition == 128), (bits, partition, dim, group, stack_bytes(second))


def check_specialized_prefill(compiled, everything):
    """On Hopper warps with different work have registers by it; those that attend keep nearly all in them, and do not wait for each
    product when it begins."""
    for bits, partition, dim, group, dtype in some(((4, 64, 128, 4, torch.bfloat16), (4, 128, 128, 5, torch.float16)), everything):
        batch = Batch(bits, partition, dim, 1, group, 1, dtype, ((0, 200),), "cpu")
        given = batch.queries, batch.keys, batch.values
        codes = PromptCodes.empty(batch.packing, 1, batch.prompts.total, given[0].device)
        integer_prefill.attend(batch.prompts, codes, *given, 0.1, kernel="specialized")
        (tiles, first), (kernel, second) = compiled[-2:]
        ptx, sass = second.asm["ptx"], second.asm["sass"]
        about = partition, dim, stack_bytes(first), stack_bytes(second), second.metadata.shared
        assert (tiles, kernel) == ("prefill_tiles", "prefill_codes") and "s8.s8" not in first.asm["ptx"], about
        assert max(about[2:4]) <= 64 * (partition == 128) and second.metadata.shared <= (227 << 10), about
        assert "setmaxnreg.dec.sync.aligned.u32 \t24;" in ptx and ptx.count("sync.aligned.u32 \t240;") == 2, about
        assert "cp.async.bulk.tensor.2d" in ptx and "cp.async.cg" not in ptx, about
        # The copy engine and tensor cores see barriers and queries, once.
        assert ptx.count("fence.proxy") == 3, about
        # Of both groups: with codes a product for each 32 channels of 64 tokens and one for each 32 tokens, with float16 one for each 64
        # tokens and one; those with which a first step begins come before all steps.
        spans = partition // 64
        expected = (spans * dim + 2 * partition) // 32, spans + 2
        counts = len(re.findall("IGMMA", sass)), len(re.findall("HGMMA", sass))
        assert counts == (2 * expected[0], 2 * expected[1]), counts
        # ptxas lets each product be waited for where it has doubts, of which it only tells who asks.
        assert len(re.findall("WARPGROUP.DEPBAR", sass)) <= 2 * 4, "products are serialized"


def check_choice(compiled, everything):
    """What chooses tokens keeps all in registers, but for little, and leaves room for several programs on a processor."""
    for dim, group, dtype in some(((128, 4, torch.bfloat16), (64, 8, torch.float16), (128, 1, torch.float32)), everything):
        keys, table = torch.zeros(80, 2, dim, dtype=dtype), torch.zeros(2, 80, dtype=torch.int32)
        addresses, one = torch.tensor([keys.data_ptr()]), slice(0, 1)
        # Scores in registers of few threads and of as many as there are, and in memory.
        for targets, length in ((torch.zeros(40, dtype=torch.int64), 70), (None, 70), (None, 32768), (None, 40000)):
            asked = SelectionContexts(table, torch.tensor([[1, 70, 40, 0]]), (length,), (4, 32), targets)
            marked = mark_tokens(torch.zeros(1, 1, 2 * group, dim), addresses, keys, torch.ones(1), asked, one, one)
            if targets is None:
                row_exchange.exchange(marked, torch.zeros(1, 80, dtype=torch.int32), 40, 9)
            written(marked, 40)
            for kernel, made in compiled[-3 - (targets is None) :]:
                about = kernel, dim, group, dtype, length, made.metadata.shared, stack_bytes(made)
                # A program with 64 scores a thread has few registers beside them.
                assert stack_bytes(made) <= 96 * (length == 32768) and made.metadata.shared <= (57 << 10), about
                if kernel in ("mark_top_tokens", "_exchange"):
                    # Of each score of a thread, which has 8 or more, it is told whether it is a number: ptxas leaves out what it takes
                    # for granted, though it be not so of NaN. Of two threads that exchange products none is fused with their sum.
                    assert len(re.findall(r"ISETP\.\w+\.U32\S* .*, 0x7f80000[01],", made.asm["sass"])) >= 8, about
                    assert "fma.rn.f32" not in made.asm["ptx"], about


def check_any_requests(compiled):
    """Kernels that choose, and say what comes, are compiled once, whatever the numbers of requests and of tokens that are chosen, and, up
    to a power of two, of tokens among which: a rank that compiles answers nobody."""
    begin, keys = len(compiled), torch.zeros(80, 3, 64, dtype=torch.bfloat16)
    codes = QuantizedKeys(KeySpec(3, 3, 64, torch.bfloat16, 4), 80)
    addresses, coded = torch.full((3,), keys.data_ptr()), QuantizedKeyTensors(codes.codes, codes.words, codes.sizes.group)
    for count, keep, length in ((1, 40, 1025), (2, 39, 1500), (3, 39, 1536), (3, 40, 2047), (3, 40, 2048)):
        table, lengths = torch.zeros(count, length, dtype=torch.int32), tuple(range(length, length - count, -1))
        asked = SelectionContexts(table, torch.tensor([[row, each, keep, 0] for row, each in enumerate(lengths)]), lengths, (4, 32))
        queries, all_of = torch.zeros(count, 3, 9, 64), (slice(0, 3), slice(0, count))
        rotate_queries(queries, (torch.zeros(64), torch.zeros(64), torch.zeros(64, dtype=torch.int64)))
        for by in (None, coded):
            marked = mark_tokens(queries, addresses, keys, torch.ones(3), asked, *all_of, by)
            # Of the first layers and of the next ones, in memory of one piece.
            for out in torch.zeros(2, 3, count, 3, keep, dtype=torch.int32):
                marked.write(out)
            row_exchange.exchange(marked, torch.zeros(count, 9 * keep, dtype=torch.int32), keep, 16)
    found = [(name, id(made)) for name, made in compiled[begin:]]
    assert len(set(found)) == len({name for name, _ in found}) == 6, found


def check_any_length(compiled):
    """What a cache rank compiles when it starts is all that it ever launches to choose, whatever the lengths of contexts."""
    for dtype, bits, rows in ((torch.bfloat16, 16, 9), (torch.float32, 4, 0)):
        pair = Pair("cpu", dtype, dim=32, most=99, fresh=rows)
        begin = len(compiled)
        rank, socket = rank_of(pair, False, "current", bits, blocks=40000 // BLOCK)
        assert isinstance(socket.messages[-1], Attached)
        there = {id(made) for _, made in _compiled(compiled[begin:])}
        forms = {id(made) for name, made in _compiled(compiled[begin:]) if name == "mark_top_tokens"}
        assert len(forms) == 7, forms
        begin, met = len(compiled), set()
        for length in (1, 1024, 1025, 2048, 2049, 4097, 8191, 10000, 16385, 32767, 32768, 32769, 40000):
            ask = SelectionRequest(0, 0, pair.shape.layers, 1, length, min(length, 99), (length,))
            rank._store.lease(Lease(0, 0, (0,) * -(-length // BLOCK)))
            _, launch = rank._answering.prepare([ask], [1])
            launch()
            rank._answering.forget(0)
            met |= {id(made) for name, made in compiled[begin:] if name == "mark_top_tokens"}
        late = [name for name, made in compiled[begin:] if id(made) not in there]
        assert not late and met == forms, (dtype, bits, late)


def _compiled(launches):
    """The same with what became of kernels that threads compiled."""
    return [(name, made.result() if isinstance(made, FutureKernel) else made) for name, made in launches]


def check_early(compiled):
    """What may be launched while the kernel before it ends waits until it has ended, first of all, but for where pointers lead: a request's
    row, how many they are, the slots of theirs, and these."""
    keys, table = torch.zeros(80, 8, 128, dtype=torch.bfloat16), torch.zeros(4, 80, dtype=torch.int32)
    cells, numbers = as_pointers(keys), torch.zeros(2, dtype=torch.int64)
    begins = PointerLayout.for_table(Pointers(cells.shape[-1], 1), table)
    with patch.object(gpu_launch, "capability", lambda tensor: gpu_launch.HOPPER):
        per_head_decode.pointer_decode(begins, torch.zeros(2, 32, 128).bfloat16(), keys, keys, table, numbers, numbers, 0.1, (7, 1))
    at_once = re.compile(r"\b(ld|st|atom|red)\b[.\w]*\.global|cp\.async")
    (_, splits), (_, join) = compiled[-2:]
    of_join, of_splits = (made.asm["ptx"].split("griddepcontrol.wait") for made in (join, splits))
    assert len(of_join) == 2 and not at_once.search(of_join[0]), "join"
    assert not re.search(r"\b(st|atom|red)\b[.\w]*\.global|cp\.async", of_splits[0]), "pointers"
    # Queries, of a part of pointers and of one of exact tokens, each after it has waited, and none before.
    assert [len(re.findall(r"ld\.global\S*\.v", each)) for each in of_splits] == [0, 2, 4], "queries"
    for body in (of_join, of_splits):
        assert "griddepcontrol.launch_dependents" in body[0], "what comes after takes its places early"
    assert stack_bytes(splits) == stack_bytes(join) == 0


def check_overlapped(compiled):
    """Quest's choice lets attention begin once a program knows that it came last, and says of a head that it is chosen once all is written;
    attention asks that before keys and values are on their way."""
    keys, table = torch.zeros(80, 8, 128, dtype=torch.bfloat16), torch.zeros(4, 80, dtype=torch.int32)
    cells, numbers, queries = as_pointers(keys), torch.zeros(2, dtype=torch.int64), torch.zeros(2, 32, 128).bfloat16()
    begins = PagePointerLayout.of_pool(Pointers(cells.shape[-1], 16), table, PageExtremes((keys,), (0,), 16), Quest(in_attention=True))
    with patch.object(gpu_launch, "capability", lambda tensor: gpu_launch.HOPPER):
        quest_pages.point_at_best_pages(begins, 0, queries, cells, table, numbers, numbers)
        per_head_decode.pointer_decode(begins, queries, keys, keys, table, numbers, numbers, 0.1, (7, 1), begins.finished_parts)
    choice, attention = (made.asm["ptx"] for _, made in compiled[-3:-1])
    words = ("atom.global.gpu.acq_rel.add", "griddepcontrol.launch_dependents", "atom.global.gpu.release.exch")
    arrives, lets, done = (choice.index(word) for word in words)
    assert arrives < lets < done and choice.rindex("st.global") < done, "the choice"
    before = attention.split("ld.acquire.gpu.global.b32")
    assert len(before) >= 3 and not re.search(r"cp\.async", before[0]), "attention"
    for kernel, made in compiled[-3:]:
        assert stack_bytes(made) == 0, kernel


def check_pages(compiled, everything):
    """What chooses pages keeps all in registers, of float32 nearly all, few enough that several programs have room on a processor; so does
    what bounds them."""
    for dim, group, dtype in ((128, 4, torch.bfloat16), (64, 3, torch.float16), (80, 1, torch.float32)):
        keys, table = torch.zeros(80, 2, dim, dtype=dtype), torch.zeros(4, 40000, dtype=torch.int32)
        pointers, numbers = Pointers(as_pointers(keys).shape[-1], 16), torch.zeros(2, dtype=torch.int64)
        extremes, begin = PageExtremes((keys,), (0,), 16), len(compiled)
        kv_copies.bound_pages(numbers, keys, numbers, extremes.held, 16)
        # Contexts whose bounds registers hold, and longer ones: for one kind of heads, or for all.
        contexts = ((1, 32768), (1, 40000), (2, 40000))
        for every, width in contexts if everything or dim == 128 else contexts[:1]:
            begins = PagePointerLayout.of_pool(pointers, table, extremes, Quest(every=every, in_attention=True))
            queries = torch.zeros(2, 2 * group, dim, dtype=dtype)
            quest_pages.point_at_best_pages(begins, 0, queries, as_pointers(keys), table[:, :width], numbers, numbers)
        assert compiled[begin][0] == "_bound_pages"
        for kernel, made in compiled[begin:]:
            about = kernel, dim, group, dtype, registers(made), stack_bytes(made)
            # Four programs of four warps.
            assert registers(made) <= 128 and stack_bytes(made) <= 64 * (dtype == torch.float32) and made.metadata.shared <= 8192, about
    # So do other cuts.
    keys, table = torch.zeros(80, 8, 128, dtype=torch.bfloat16), torch.zeros(4, 40000, dtype=torch.int32)
    extremes = PageExtremes((keys,), (0,), 16)
    begins = PagePointerLayout.of_pool(Pointers(as_pointers(keys).shape[-1], 16), table, extremes, Quest(in_attention=True))
    for cut in quest_pages.QUEST_GRIDS[1:]:
        queries = torch.zeros(2, 32, 128, dtype=torch.bfloat16)
        quest_pages.point_at_best_pages(begins, 0, queries, as_pointers(keys), table, numbers, numbers, cut)
        made = compiled[-1][1]
        assert stack_bytes(made) == 0 and made.metadata.shared <= 8192, (cut, registers(made), stack_bytes(made), made.metadata.shared)


def check_coded_choice(compiled, everything):
    """So does what chooses by codes: integers are multiplied as they lie in memory, and the words of scales are there ahead, too."""
    for dim, group, dtype in some(((128, 4, torch.bfloat16), (128, 20, torch.float32), (64, 8, torch.float16)), everything):
        keys, table, one = torch.zeros(80, 2, dim, dtype=dtype), torch.zeros(2, 80, dtype=torch.int32), slice(0, 1)
        addresses = torch.tensor([keys.data_ptr()])
        for bits in (8, 4):
            held = QuantizedKeys(KeySpec(1, 2, dim, dtype, bits), 80)
            quantize_keys(addresses, keys, torch.arange(70), held.codes, held.words, held.sizes.group)
            assert stack_bytes(compiled[-1][1]) == 0
            asked = SelectionContexts(table, torch.tensor([[1, 70, 40, 0]]), (70,), (4, 32))
            coded = QuantizedKeyTensors(held.codes, held.words, held.sizes.group)
            written(mark_tokens(torch.zeros(1, 1, 2 * group, dim), addresses, keys, torch.ones(1), asked, one, one, coded), 40)
            kernel, made = compiled[-3]
            about = dim, group, dtype, bits, made.metadata.shared, stack_bytes(made)
            assert kernel == "_compute_quantized_logits" and "m16n8k32.row.col.satfinite.s32.s8.s8.s32" in made.asm["ptx"], about
            assert "tt.load" not in made.asm["ttgir"].split("scf.for")[1], about
            assert stack_bytes(made) == 0 and made.metadata.shared <= (48 << 10), about


def check_words(compiled):
    """Words that two GPUs share are read and written in an order that both see, and waiting ends by the device's clock."""
    heads, keys = torch.zeros(4, exchange_kernels.LANE_WORDS, dtype=torch.int64), torch.zeros(80, 2, 128, dtype=torch.bfloat16)
    addresses, numbers, slots = torch.zeros(3, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int64), torch.zeros(5, dtype=torch.int64)
    pool, places = torch.zeros(3, 9, 8, 128, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.int64)
    begin, word = len(compiled), 1 << 33
    opened = exchange_kernels.put_queries(heads, torch.zeros(4, 2, 3, 2, 8, 128, dtype=torch.bfloat16), pool, places, numbers)
    exchange_kernels.put_keys(torch.zeros(2, 3, 64, 2, 128, dtype=torch.bfloat16), torch.zeros(2, 3, dtype=torch.int64), addresses, keys, slots)
    exchange_kernels.signal_written(heads, slots, numbers, opened, word)
    hits = exchange_kernels.wait_for_selections(heads, numbers, slots, 0.02)
    commits = torch.zeros(2, exchange_kernels.COMMIT_NUMBERS, dtype=torch.int64)
    table = torch.zeros(2, 80, dtype=torch.int32)
    exchange_kernels.write_selected_pointers(torch.zeros(4, 2, 600, dtype=torch.int32), hits, commits, 100, addresses, keys, table, slots)
    exchange_kernels.pull_blocks(word, word, torch.zeros(2, 3, dtype=torch.int64), 3, 500, 32000, 90000)
    asked = torch.zeros(2, exchange_kernels.QUESTION_NUMBERS, dtype=torch.int64), torch.ones(2, dtype=torch.int32)
    exchange_kernels.gather_rows(word, asked[0], torch.zeros(2, 3, 500, dtype=torch.int32), 500, 1000, (9000, 4000))
    exchange_kernels.push_chosen(torch.zeros(3, 2, 2, 100, dtype=torch.int32), *asked, word, 600)
    exchange_kernels.read_words(word, word, torch.zeros(33, dtype=torch.int64), *asked, word, 0.1)
    exchange_kernels.answer(word, *asked)
    check_rows(compiled, keys, asked, hits, commits, table, slots)
    ptx = {kernel: made.asm["ptx"] for kernel, made in compiled[begin:]}
    assert all("st.release.sys.global.b64" in ptx[kernel] for kernel in ("_signal", "_signal_all", "_answer"))
    assert all("ld.acquire.sys.global.b64" in ptx[kernel] for kernel in ("_open_places", "_await", "_read_words"))
    assert all("%globaltimer" in ptx[kernel] and "st.release" not in ptx[kernel] for kernel in ("_await", "_read_words"))
    # What one warp has seen another has not yet.
    warps = {kernel: made.metadata.num_warps for kernel, made in compiled[begin:]}
    assert {warps[kernel] for kernel in ("_open_places", "_signal", "_signal_all", "_await", "_read_words", "_answer")} == {1}, warps


def check_rows(compiled, keys, asked, hits, commits, table, slots):
    """Rows of K and V on their way: what comes and goes, to the arena, out of it, and of renewed copies."""
    begin = len(compiled)
    tables, rows = (torch.zeros(3, dtype=torch.int64),) * 2, torch.zeros(4, 6, 100, 128, dtype=torch.bfloat16)
    contexts = SelectionContexts(table, torch.zeros(2, 4, dtype=torch.int64), (70, 70), (4, 32))
    queries, all_of = torch.zeros(2, 3, 8, 128), (slice(0, 3), slice(0, 2))
    marked = mark_tokens(queries, tables[0], keys, torch.ones(3), contexts, *all_of)
    comes = row_exchange.exchange(marked, torch.zeros(2, 12288, dtype=torch.int32), 2048, 100)
    row_exchange.push_rows(tables, keys, comes, *asked, (1 << 33,) * 4)
    arrived = torch.zeros(4, 6, dtype=torch.int32), torch.zeros(4, 6, 100, 2, dtype=torch.int32), rows, rows
    row_exchange.commit_rows(arrived, hits, commits, slots[:2], slots, tables, keys, slots)
    row_exchange.move_newest(tables, keys, keys, torch.zeros(3, 2, 32, dtype=torch.int64), slots, slots)
    # Of a key and a value whole vectors.
    for kernel, made in compiled[begin:]:
        if kernel in ("_push_rows", "_commit_rows", "_move_newest"):
            assert made.asm["ptx"].count("st.global.v4.b32") >= 2 and "st.global.b16" not in made.asm["ptx"], kernel


def main(everything):
    compiled = []
    compile_only(compiled)
    packed_decode.has_ptx = quantized_keys.has_ptx = lambda tensor: True
    packed_decode.capability = lambda tensor: gpu_launch.HOPPER
    packed_decode.has_tensor_cores = lambda tensor: False
    for name, bits in some(KINDS, everything):
        pool, table, rows = decode(name, bits, 128, 4)
    packed_decode.has_tensor_cores = lambda tensor: True
    check_tiles(compiled, everything)
    check_integers(compiled, everything)
    cells = RaggedHeadLayout.of(pool.buffers, 2)
    per_head_decode.ragged_decode(cells, 0, torch.zeros(1, 4, 128).bfloat16(), table, rows, rows, 0.1)
    tables, layer = (pool.buffers.key_table, pool.buffers.value_table), (pool.buffers.keys[0], pool.buffers.values[0])
    kv_copies.scatter_cells(*tables, *layer, rows, cells.bounds[0], rows, rows)
    begins = PointerLayout.for_table(Pointers.for_pool(pool.buffers, 1), table)
    per_head_decode.pointer_decode(begins, torch.zeros(1, 4, 128).bfloat16(), *layer, table, rows, rows, 0.1)
    check_packing(compiled, everything)
    check_codec(compiled, some(CODECS, everything))
    check_prefill(compiled, everything)
    check_specialized_prefill(compiled, everything)
    check_anchored(compiled, everything)
    check_choice(compiled, everything)
    check_any_requests(compiled)
    check_any_length(compiled)
    check_early(compiled)
    check_overlapped(compiled)
    check_pages(compiled, everything)
    check_coded_choice(compiled, everything)
    kept = torch.zeros(len(pool.buffers.keys), 1, 70, dtype=torch.int64)
    kv_copies.write_pointers(pool.buffers.key_table, layer[0], kept, rows, rows)
    key_scores.window_scores(torch.zeros(1, 32, 4, 128), pool.buffers.key_table, layer[0], rows, torch.arange(32), 0.1)
    check_words(compiled)
    print(" ".join(name for name, _ in compiled))


if __name__ == "__main__":
    main(everything="--all" in sys.argv[1:])
