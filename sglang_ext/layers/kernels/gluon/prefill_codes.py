"""Attention of prompts to codes of the blocks before their own, in Gluon for Hopper: the second of the two kernels that
hack/specialized_prefill.py launches. It computes what the loop over steps in hack/prefill_attention.py does, with that one's units.

A program has three roles, and each has warps of its own. Two warp groups attend, with 64 rows each, so that one's products on tensor cores
run beside the other's softmax; one warp lets the copy engine load a step after another, a few ahead. They meet at barriers in shared
memory: a stage is full when its bytes are there, and empty when both groups are done with it. What a group multiplies with it lies in its
registers, so that no thread writes to shared memory what tensor cores read.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from sglang_ext.layers.kernels.hack.prefill_attention import FAR, LOG_LAST, ROUNDED, ROUNDING

# Registers of a thread that attends, and of one that loads: three times 128 threads have 65,536.
ATTENDING, LOADING = gl.constexpr(240), gl.constexpr(24)


@gluon.jit
def _load_codes(sources, stages, full, empty, key_row, token, heads_tokens, steps, F: gl.constexpr):
    """Let a step after another be copied to the stage that both groups are done with."""
    keys, scales, terms, values, numbers, zeros = sources
    of_keys, of_scales, of_terms, of_values, of_numbers, of_zeros = stages
    P: gl.constexpr = F.value.partition
    COUNT: gl.constexpr = F.value.count
    STAGES: gl.constexpr = F.value.stages
    VALUE_DIM: gl.constexpr = F.value.value_dim
    ZEROS: gl.constexpr = F.value.zeros
    for step in range(steps):
        stage = step % STAGES
        mbarrier.wait(empty.index(stage), step // STAGES % 2 ^ 1)
        there = full.index(stage)
        mbarrier.expect(there, gl.constexpr(F.value.bytes))
        part = token // P + step
        for group in gl.static_range(COUNT):
            at = key_row + group * heads_tokens + step * P
            tma.async_copy_global_to_shared(keys, [at, 0], there, of_keys.index(stage * COUNT + group))
        tma.async_copy_global_to_shared(terms, [token + step * P, 0], there, of_terms.index(stage))
        tma.async_copy_global_to_shared(scales, [part, 0], there, of_scales.index(stage))
        tma.async_copy_global_to_shared(values, [part * VALUE_DIM, 0], there, of_values.index(stage))
        tma.async_copy_global_to_shared(numbers, [part, 0], there, of_numbers.index(stage))
        tma.async_copy_global_to_shared(zeros, [part * ZEROS, 0], there, of_zeros.index(stage))


@gluon.jit
def _columns_of(numbers, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """COUNT numbers for each column, one after another in shared memory: of each column one, in all rows' threads."""
    found = numbers.load(LAYOUT)
    if COUNT == 1:
        return (found.reshape(found.shape[1]),)
    else:
        return gl.split(found.reshape(found.shape[1] // COUNT, COUNT))


@gluon.jit
def _in_pairs(codes):
    """As hack/prefill_attention.py's: codes of weights in the order of tokens that values have."""
    ROWS: gl.constexpr = codes.shape[0]
    TOKENS: gl.constexpr = codes.shape[1]
    return codes.reshape(ROWS, TOKENS // 16, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(ROWS, TOKENS)


@gluon.jit
def _scores(codes, scales, terms, of_keys, of_scales, of_terms, stage, F: gl.constexpr):
    """Products of queries with a step's keys, float32 [rows, tokens], of what both groups have of queries and the stage of keys."""
    P: gl.constexpr = F.value.partition
    COUNT: gl.constexpr = F.value.count
    ROWS: gl.constexpr = F.value.rows
    SCORES: gl.constexpr = F.value.scores
    found = gl.full([ROWS, P], 0.0, gl.float32, SCORES)
    found = warpgroup_mma(terms, of_terms.index(stage).permute((1, 0)), found, use_acc=False, is_async=True)
    products = ()
    for group in gl.static_range(COUNT):
        nothing = gl.full([ROWS, P], 0, gl.int32, gl.constexpr(F.value.integers))
        keys = of_keys.index(stage * COUNT + group).permute((1, 0))
        products = products + (warpgroup_mma(codes[group], keys, nothing, use_acc=False, is_async=True),)
    if COUNT == 1:
        found, first = warpgroup_mma_wait(0, (found, products[0]))
        products = (first,)
        # Beside as many products as a step of 128 tokens has, registers would not suffice.
        of_columns = _columns_of(of_scales.index(stage), COUNT, gl.constexpr(F.value.key_scales))
    else:
        of_columns = _columns_of(of_scales.index(stage), COUNT, gl.constexpr(F.value.key_scales))
        found, first, second = warpgroup_mma_wait(0, (found, products[0], products[1]))
        products = first, second
    for group in gl.static_range(COUNT):
        mine = gl.convert_layout(products[group].to(gl.float32), SCORES, assert_trivial=True)
        column = gl.convert_layout(of_columns[group], gl.SliceLayout(0, SCORES), assert_trivial=True)
        found += mine * column[None, :] * scales[group][:, None]
    return found


@gluon.jit
def _own_sums(codes, F: gl.constexpr):
    """Sums of weights' codes, int32 [rows, zeros], that a thread has: of every 16 tokens the same. Float16 holds them exactly."""
    ZEROS: gl.constexpr = F.value.zeros
    summed = gl.sum(codes.reshape(F.value.rows, F.value.partition // ZEROS, ZEROS), 1)
    return gl.convert_layout(summed, gl.constexpr(F.value.weight_sums), assert_trivial=True)


@gluon.jit
def _in_quads(weights, F: gl.constexpr):
    """Sums of weights that each of the four threads with a row has, [rows, 4]."""
    summed = gl.sum(gl.sum(weights.reshape(F.value.rows, F.value.partition // 8, 4, 2), 3), 1)
    return gl.convert_layout(summed, gl.constexpr(F.value.quads), assert_trivial=True)


@gluon.jit
def _add_values(acc, rescale, weights, sums, of_values, of_numbers, of_zeros, stage, F: gl.constexpr):
    """Outputs so far, float32 [rows, channels], times ``rescale``, and a step's values times weights."""
    OUTPUTS: gl.constexpr = F.value.outputs
    nothing = gl.full([F.value.rows, F.value.value_dim], 0, gl.int32, gl.constexpr(F.value.products))
    weights = gl.convert_layout(_in_pairs(weights), gl.constexpr(F.value.weight_codes), assert_trivial=True)
    products = warpgroup_mma(weights, of_values.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
    products = gl.convert_layout(warpgroup_mma_wait(0, (products,)), OUTPUTS, assert_trivial=True)
    # Loaded after the product: before it, registers would not suffice.
    scale, shifts = _columns_of(of_numbers.index(stage), 2, gl.constexpr(F.value.value_numbers))
    scale = gl.convert_layout(scale, gl.SliceLayout(0, OUTPUTS), assert_trivial=True)
    shifts = gl.convert_layout(shifts, gl.SliceLayout(0, OUTPUTS), assert_trivial=True)
    rescale = gl.convert_layout(rescale, gl.SliceLayout(1, OUTPUTS), assert_trivial=True)
    acc = acc * rescale[:, None] + (products.to(gl.float32) * scale[None, :] + shifts[None, :])
    return warpgroup_mma(sums.to(gl.float16), of_zeros.index(stage), acc)


@gluon.jit
def _rows(tile, begin, known, length, first, kv_head, LAYOUT: gl.constexpr, F: gl.constexpr):
    """Which query of all, token by token and then head by head, each row from ``tile`` of a block on is, and whether it is one."""
    row = tile + gl.arange(0, F.value.rows, LAYOUT)
    place = begin + row // F.value.group
    mine = (row < F.value.block * F.value.group) & (place >= known) & (place < length)
    token = (first + place - known).to(gl.int64)
    return token * (F.value.heads * F.value.group) + kv_head * F.value.group + row % F.value.group, mine


@gluon.jit
def _load_queries(codes, scales, terms, where, ROW: gl.constexpr, F: gl.constexpr):
    """Codes and scales of each partition, and what keys' terms are multiplied with, as the products take them."""
    P: gl.constexpr = F.value.partition
    COUNT: gl.constexpr = F.value.count
    CODES: gl.constexpr = F.value.query_codes
    TERMS: gl.constexpr = F.value.query_terms
    found, factors = (), ()
    for group in gl.static_range(COUNT):
        query, mine = _rows(*where, gl.SliceLayout(1, CODES), F)
        at = (query * F.value.dim + group * P)[:, None] + gl.arange(0, P, gl.SliceLayout(0, CODES))[None, :]
        found = found + (gl.load(codes + at, mask=mine[:, None], other=0),)
        query, mine = _rows(*where, ROW, F)
        factors = factors + (gl.load(scales + query * COUNT + group, mask=mine, other=0.0),)
    query, mine = _rows(*where, gl.SliceLayout(1, TERMS), F)
    at = (query * F.value.columns)[:, None] + gl.arange(0, F.value.columns, gl.SliceLayout(0, TERMS))[None, :]
    return found, factors, gl.load(terms + at, mask=mine[:, None], other=0.0)


@gluon.jit
def _attend(where, stages, full, empty, left, out, steps, F: gl.constexpr):
    """Attention of 64 rows to codes, together with what is ``left`` of exact tokens; ``where``: as :func:`_rows` takes it."""
    of_keys, of_scales, of_terms, of_values, of_numbers, of_zeros = stages
    codes, scales, terms, exact = left
    P: gl.constexpr = F.value.partition
    ROWS: gl.constexpr = F.value.rows
    STAGES: gl.constexpr = F.value.stages
    VALUE_DIM: gl.constexpr = F.value.value_dim
    OUTPUTS: gl.constexpr = F.value.outputs
    ROW: gl.constexpr = gl.SliceLayout(1, F.value.scores)
    QUADS: gl.constexpr = F.value.quads
    OUT_ROW: gl.constexpr = gl.SliceLayout(1, OUTPUTS)
    codes, scales, terms = _load_queries(codes, scales, terms, where, ROW, F)
    acc = gl.full([ROWS, VALUE_DIM], 0.0, gl.float32, OUTPUTS)
    best, total = gl.full([ROWS], -1e30, gl.float32, ROW), gl.full([ROWS, 4], 0.0, gl.float32, QUADS)
    unit = best
    for step in range(steps):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES % 2)
        qk = _scores(codes, scales, terms, of_keys, of_scales, of_terms, stage, F)
        most = gl.max(qk, 1)
        best = gl.maximum(best, most)
        new = gl.maximum(most, best - FAR)
        rescale = gl.exp2(unit - new)
        unit = new
        p = gl.exp2(qk - (new - LOG_LAST)[:, None])
        total = total * gl.convert_layout(rescale, gl.SliceLayout(1, QUADS), assert_trivial=True)[:, None] + _in_quads(p, F)
        bits = (p + ROUNDING).to(gl.int32, bitcast=True)
        sums = _own_sums(bits - ROUNDED, F)
        acc = _add_values(acc, rescale, bits.to(gl.int8), sums, of_values, of_numbers, of_zeros, stage, F)
        mbarrier.arrive(empty.index(stage), count=1)
    query, mine = _rows(*where, ROW, F)
    exact = gl.load(exact + query, mask=mine, other=0.0)
    unit -= LOG_LAST
    best = gl.maximum(exact, unit)
    ours, theirs = gl.exp2(unit - best), gl.exp2(exact - best)
    total = gl.convert_layout(gl.sum(total, 1), ROW, assert_trivial=True) * ours + theirs
    ours = gl.convert_layout(ours / total, OUT_ROW, assert_trivial=True)
    theirs = gl.convert_layout(theirs / total, OUT_ROW, assert_trivial=True)
    query, mine = _rows(*where, OUT_ROW, F)
    at = out + (query * VALUE_DIM)[:, None] + gl.arange(0, VALUE_DIM, gl.SliceLayout(0, OUTPUTS))[None, :]
    near = gl.load(at, mask=mine[:, None], other=0.0).to(gl.float32)
    gl.store(at, (acc * ours[:, None] + near * theirs[:, None]).to(out.dtype.element_ty), mask=mine[:, None])


@gluon.jit
def _room(source, STAGES: gl.constexpr):
    """Shared memory for boxes of a descriptor."""
    return gl.allocate_shared_memory(source.dtype, [STAGES, source.block_type.shape[0], source.block_type.shape[1]], source.layout)


@gluon.jit(do_not_specialize=("count", "blocks"))
def prefill_codes(keys, scales, terms, values, numbers, zeros, left, out, requests, count, blocks, F: gl.constexpr):
    """128 rows of a block of one request, which attend to the codes of the blocks before theirs; blocks that read most begin first.

    Args:
        keys, scales, terms, values, numbers, zeros: descriptors of codes (hack/prompt_codes.py), a step of which is a box.
        left: specialized_prefill.py's ``Left``.
        out: [tokens, heads, channels of a value], of exact tokens; then of all.
        requests: what Prompts.numbers are, of ``count`` requests.
        blocks: of all requests.
    """
    P: gl.constexpr = F.value.partition
    BLOCK: gl.constexpr = F.value.block
    SINKS: gl.constexpr = F.value.sinks
    STAGES: gl.constexpr = F.value.stages
    COUNT: gl.constexpr = F.value.count
    # As prefill_tiles counts them: from a block that ends where the sinks do, or before.
    AHEAD: gl.constexpr = (SINKS + BLOCK - 1) // BLOCK
    TILES: gl.constexpr = F.value.tiles
    GROUP: gl.constexpr = F.value.group
    ROWS: gl.constexpr = 2 * F.value.rows
    kv_head, request = gl.program_id(1), gl.program_id(2)
    known, length = gl.load(requests + count + request), gl.load(requests + 2 * count + request)
    block = (length - 1 - SINKS + AHEAD * BLOCK) // BLOCK - gl.program_id(0) // TILES
    tile = gl.program_id(0) % TILES * ROWS
    begin = SINKS + (block - AHEAD) * BLOCK
    # What rows read that are not computed is not loaded.
    some = (begin + gl.minimum(BLOCK, (tile + ROWS - 1) // GROUP + 1) > known) & (begin + tile // GROUP < length)
    steps = gl.where(some, gl.maximum(block - AHEAD, 0) * (BLOCK // P), 0)
    tokens = blocks * BLOCK
    token = kv_head * tokens + gl.load(requests + 4 * count + request) * BLOCK
    key_row = token + kv_head * (COUNT - 1) * tokens
    first = gl.load(requests + 3 * count + request)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    # The copy engine sees the barriers, too.
    fence_async_shared()
    stages = (
        _room(keys, STAGES * COUNT),
        _room(scales, STAGES),
        _room(terms, STAGES),
        _room(values, STAGES),
        _room(numbers, STAGES),
        _room(zeros, STAGES),
    )
    sources = keys, scales, terms, values, numbers, zeros
    upper, lower = (tile, begin, known, length, first, kv_head), (tile + F.value.rows, begin, known, length, first, kv_head)
    gl.warp_specialize(
        [
            (_attend, (upper, stages, full, empty, left, out, steps, F)),
            (_attend, (lower, stages, full, empty, left, out, steps, F)),
            (_load_codes, (sources, stages, full, empty, key_row, token, tokens, steps, F)),
        ],
        [4, 1],
        [ATTENDING, LOADING],
    )
