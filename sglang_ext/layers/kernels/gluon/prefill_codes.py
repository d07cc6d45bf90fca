"""Prefill attention over the codes of earlier blocks, in Gluon for Hopper.

It is the second of the two kernels that packed/integer_prefill.py launches. It computes the loop over steps of packed/prefill_attention.py,
in the same units.

A program has three roles, each with its own warps. Two warp groups attend, with 64 rows each, so that one group's tensor-core products
overlap the other's softmax. One warp issues TMA copies of the next steps. Barriers in shared memory synchronize the roles. A stage is full
when its bytes have arrived, and empty when both groups have read it. Products also overlap other work within a group: a step's products
with keys begin before the rest of the previous step. Queries are in shared memory, weights in registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from sglang_ext.layers.kernels.packed.prefill_attention import FAR, LOG_LAST, ROUNDED, ROUNDING
from sglang_ext.layers.kernels.packed.prompt_codes import SHIFT

# Registers per thread of attending and of loading warps. Three times 128 threads have 65,536.
ATTENDING, LOADING = gl.constexpr(240), gl.constexpr(24)


@gluon.jit
def _load_codes(sources, stages, full, empty, key_row, token, heads_tokens, steps, F: gl.constexpr):
    """Copy step after step to the stage that both groups have read."""
    keys, scales, terms, values, value_scales, zeros = sources
    of_keys, of_scales, of_terms, of_values, of_value_scales, of_zeros = stages
    P: gl.constexpr = F.value.partition
    COUNT: gl.constexpr = F.value.count
    SPANS: gl.constexpr = F.value.spans
    TILE: gl.constexpr = F.value.tile
    STAGES: gl.constexpr = F.value.stages
    VALUE_DIM: gl.constexpr = F.value.value_dim
    ZEROS: gl.constexpr = F.value.zeros
    for step in range(steps):
        stage = step % STAGES
        mbarrier.wait(empty.index(stage), step // STAGES % 2 ^ 1)
        there = full.index(stage)
        mbarrier.expect(there, gl.constexpr(F.value.bytes))
        part = token // P + step
        for span in gl.static_range(SPANS):
            at = token + step * P + span * TILE
            room = stage * SPANS + span
            tma.async_copy_global_to_shared(terms, [at, 0], there, of_terms.index(room))
            for group in gl.static_range(COUNT):
                row = key_row + group * heads_tokens + step * P + span * TILE
                tma.async_copy_global_to_shared(keys, [row, 0], there, of_keys.index(room * COUNT + group))
                tma.async_copy_global_to_shared(scales, [row // TILE, 0], there, of_scales.index(room * COUNT + group))
        for span in gl.static_range(SPANS):
            room = of_values.index(stage * SPANS + span)
            tma.async_copy_global_to_shared(values, [part * VALUE_DIM, span * TILE], there, room)
        tma.async_copy_global_to_shared(value_scales, [part, 0], there, of_value_scales.index(stage))
        tma.async_copy_global_to_shared(zeros, [part * ZEROS, 0], there, of_zeros.index(stage))


@gluon.jit
def _columns_of(numbers, LAYOUT: gl.constexpr, SUMS: gl.constexpr):
    """Load one number per column of a product from shared memory, for the threads of all rows."""
    found = numbers.load(LAYOUT)
    return gl.convert_layout(found.reshape(found.shape[1]), gl.SliceLayout(0, SUMS), assert_trivial=True)


@gluon.jit
def _in_pairs(codes):
    """Weight codes in the token order of the stored values, as in packed/prefill_attention.py."""
    ROWS: gl.constexpr = codes.shape[0]
    TOKENS: gl.constexpr = codes.shape[1]
    return codes.reshape(ROWS, TOKENS // 16, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(ROWS, TOKENS)


@gluon.jit
def _begin_product(codes, of_keys, room, group: gl.constexpr, F: gl.constexpr):
    """Start the asynchronous product of one partition of queries with 64 keys."""
    nothing = gl.full([F.value.rows, F.value.tile], 0, gl.int32, gl.constexpr(F.value.integers))
    keys = of_keys.index(room * F.value.count + group).permute((1, 0))
    return warpgroup_mma(codes.index(group), keys, nothing, use_acc=False, is_async=True)


@gluon.jit
def _begin_scores(codes, terms, of_keys, of_terms, room, F: gl.constexpr):
    """Start the asynchronous products of terms, and of the first partition, with 64 keys."""
    found = gl.full([F.value.rows, F.value.tile], 0.0, gl.float32, gl.constexpr(F.value.sums))
    found = warpgroup_mma(terms, of_terms.index(room).permute((1, 0)), found, use_acc=False, is_async=True)
    return found, _begin_product(codes, of_keys, room, 0, F)


@gluon.jit
def _add_product(found, product, column, scale, F: gl.constexpr):
    """Add a partition's product to the scores, float32 [rows, 64 tokens]."""
    mine = gl.convert_layout(product.to(gl.float32), F.value.sums, assert_trivial=True)
    return found + mine * (column[None, :] * scale[:, None])


@gluon.jit
def _own_sums(bits, F: gl.constexpr):
    """Sums of the int8 weight codes that a thread holds, int32 [rows, 8]: one sum per position within every eight tokens."""
    return gl.sum((bits - (ROUNDED + SHIFT)).reshape(F.value.rows, F.value.tile // 8, 8), 1)


@gluon.jit
def _sum_terms(sums, F: gl.constexpr):
    """Factors of the values' zero points and means, [rows, zeros]. Sums of 16 codes are exact in float16."""
    summed = sums.to(gl.float16)
    both = gl.join(summed, gl.full_like(summed, F.value.lacking))
    return gl.convert_layout(both.permute(0, 2, 1).reshape(F.value.rows, 16), gl.constexpr(F.value.terms), assert_trivial=True)


@gluon.jit
def _in_quads(weights, F: gl.constexpr):
    """Sums of the weights that each of the four threads of a row holds, [rows, 4]."""
    summed = gl.sum(gl.sum(weights.reshape(F.value.rows, F.value.tile // 8, 4, 2), 3), 1)
    return gl.convert_layout(summed, gl.constexpr(F.value.quads), assert_trivial=True)


@gluon.jit
def _begin_values(outputs, codes, sums, of_values, of_zeros, stage, F: gl.constexpr):
    """Start the asynchronous products of weights with values. Returns outputs plus zero-point terms, and products of codes."""
    SPANS: gl.constexpr = F.value.spans
    outputs = warpgroup_mma(sums, of_zeros.index(stage), outputs, is_async=True)
    products = gl.full([F.value.rows, F.value.value_dim], 0, gl.int32, gl.constexpr(F.value.products))
    for span in gl.static_range(SPANS):
        values = of_values.index(stage * SPANS + span).permute((1, 0))
        products = warpgroup_mma(codes[span], values, products, use_acc=span > 0, is_async=True)
    return outputs, products


@gluon.jit
def _rows(tile, begin, known, length, first, kv_head, LAYOUT: gl.constexpr, F: gl.constexpr):
    """Index of each row's query among all (by token, then head), for the block's rows from ``tile`` on, and whether it is a query."""
    row = tile + gl.arange(0, F.value.rows, LAYOUT)
    place = begin + row // F.value.group
    mine = (row < F.value.block * F.value.group) & (place >= known) & (place < length)
    token = (first + place - known).to(gl.int64)
    return token * (F.value.heads * F.value.group) + kv_head * F.value.group + row % F.value.group, mine


@gluon.jit
def _load_queries(of_queries, codes, scales, terms, where, ROW, F: gl.constexpr):
    """Load the queries' scales of each partition and the factors of keys' terms. Stores the codes in shared memory for tensor cores."""
    P: gl.constexpr = F.value.partition
    COUNT: gl.constexpr = F.value.count
    CODES: gl.constexpr = F.value.query_copy
    TERMS: gl.constexpr = F.value.terms
    factors = ()
    for group in gl.static_range(COUNT):
        query, mine = _rows(*where, gl.SliceLayout(1, CODES), F)
        at = (query * F.value.dim + group * P)[:, None] + gl.arange(0, P, gl.SliceLayout(0, CODES))[None, :]
        of_queries.index(group).store(gl.load(codes + at, mask=mine[:, None], other=0))
        query, mine = _rows(*where, ROW, F)
        factors = factors + (gl.load(scales + query * COUNT + group, mask=mine, other=0.0),)
    fence_async_shared()
    query, mine = _rows(*where, gl.SliceLayout(1, TERMS), F)
    at = (query * F.value.columns)[:, None] + gl.arange(0, F.value.columns, gl.SliceLayout(0, TERMS))[None, :]
    return factors, gl.load(terms + at, mask=mine[:, None], other=0.0)


@gluon.jit
def _attend(where, of_queries, stages, full, empty, left, out, steps, F: gl.constexpr):
    """Attention of 64 rows to codes, merged with that over exact tokens (``left``, ``out``). ``where``: arguments of :func:`_rows`."""
    of_keys, of_scales, of_terms, of_values, of_value_scales, of_zeros = stages
    codes, scales, terms, exact = left
    COUNT: gl.constexpr = F.value.count
    SPANS: gl.constexpr = F.value.spans
    TILE: gl.constexpr = F.value.tile
    ROWS: gl.constexpr = F.value.rows
    STAGES: gl.constexpr = F.value.stages
    VALUE_DIM: gl.constexpr = F.value.value_dim
    SUMS: gl.constexpr = F.value.sums
    OUTPUTS: gl.constexpr = F.value.outputs
    OUT_ROW: gl.constexpr = gl.SliceLayout(1, OUTPUTS)
    COLUMNS: gl.constexpr = F.value.token_columns
    CHANNELS: gl.constexpr = F.value.channel_columns
    ROW: gl.constexpr = gl.SliceLayout(1, SUMS)
    QUADS: gl.constexpr = F.value.quads
    scales, terms = _load_queries(of_queries, codes, scales, terms, where, ROW, F)
    outputs = gl.full([ROWS, VALUE_DIM], 0.0, gl.float32, OUTPUTS)
    best, total = gl.full([ROWS], -1e30, gl.float32, ROW), gl.full([ROWS, 4], 0.0, gl.float32, QUADS)
    unit = best
    # The products of a step begin in the previous step, and overlap the computation with its values. After the last step, they read
    # arbitrary data, and their result is not used. ptxas waits for each product if the numbers that a product is added to are computed
    # while another product runs. Outputs are therefore rescaled before a step's products. There are few products, because each needs
    # uniform registers.
    mbarrier.wait(full.index(0), 0, pred=steps > 0)
    begun = _begin_scores(of_queries, terms, of_keys, of_terms, 0, F)
    for step in range(steps):
        stage = step % STAGES
        found, product = warpgroup_mma_wait(0, begun)
        column = _columns_of(of_scales.index(stage * SPANS * COUNT), COLUMNS, SUMS)
        # These products do not begin in the previous step, for lack of registers: those of a second partition, or of 64 more tokens.
        if COUNT == 2:
            more = (_begin_product(of_queries, of_keys, stage, 1, F),)
        elif SPANS == 2:
            more = _begin_scores(of_queries, terms, of_keys, of_terms, stage * SPANS + 1, F)
        found = _add_product(found, product, column, scales[0], F)
        if COUNT == 2:
            column = _columns_of(of_scales.index(stage * COUNT + 1), COLUMNS, SUMS)
            found = _add_product(found, warpgroup_mma_wait(0, more), column, scales[1], F)
        qk, most = (found,), found
        if SPANS == 2:
            found, product = warpgroup_mma_wait(0, more)
            column = _columns_of(of_scales.index(stage * SPANS + 1), COLUMNS, SUMS)
            qk = qk + (_add_product(found, product, column, scales[0], F),)
            most = gl.maximum(most, qk[1])
        most = gl.max(most, 1)
        best = gl.maximum(best, most)
        new = gl.maximum(most, best - FAR)
        rescale = gl.exp2(unit - new)
        unit = new
        bits, pairs = (), ()
        total = total * gl.convert_layout(rescale, gl.SliceLayout(1, QUADS), assert_trivial=True)[:, None]
        for span in gl.static_range(SPANS):
            weights = gl.exp2(qk[span] - (new - LOG_LAST)[:, None])
            total += _in_quads(weights, F)
            bits = bits + ((weights + ROUNDING).to(gl.int32, bitcast=True),)
            paired = _in_pairs(bits[span].to(gl.int8))
            pairs = pairs + (gl.convert_layout(paired, gl.constexpr(F.value.codes), assert_trivial=True),)
        sums = _own_sums(bits[0], F)
        if SPANS == 2:
            sums += _own_sums(bits[1], F)
        scaled = outputs * gl.convert_layout(rescale, OUT_ROW, assert_trivial=True)[:, None]
        scaled, products = _begin_values(scaled, pairs, _sum_terms(sums, F), of_values, of_zeros, stage, F)
        scaled, products = warpgroup_mma_wait(0, (scaled, products))
        channel = _columns_of(of_value_scales.index(stage), CHANNELS, OUTPUTS)
        following = (step + 1) % STAGES
        mbarrier.wait(full.index(following), (step + 1) // STAGES % 2, pred=step + 1 < steps)
        begun = _begin_scores(of_queries, terms, of_keys, of_terms, following * SPANS, F)
        outputs = scaled + gl.convert_layout(products.to(gl.float32), OUTPUTS, assert_trivial=True) * channel[None, :]
        mbarrier.arrive(empty.index(stage), count=1)
    warpgroup_mma_wait(0, begun)
    # Computed again after the loop, because registers do not suffice to keep it. The added number is 0, but the compiler cannot know that.
    query, mine = _rows(where[0] + gl.minimum(steps, 0), *where[1:], ROW, F)
    exact = gl.load(exact + query, mask=mine, other=0.0)
    unit -= LOG_LAST
    best = gl.maximum(exact, unit)
    ours, theirs = gl.exp2(unit - best), gl.exp2(exact - best)
    total = gl.convert_layout(gl.sum(total, 1), ROW, assert_trivial=True) * ours + theirs
    ours = gl.convert_layout(ours / total, OUT_ROW, assert_trivial=True)
    theirs = gl.convert_layout(theirs / total, OUT_ROW, assert_trivial=True)
    query, mine = _rows(where[0] + gl.minimum(steps, 0), *where[1:], OUT_ROW, F)
    at = out + (query * VALUE_DIM)[:, None] + gl.arange(0, VALUE_DIM, gl.SliceLayout(0, OUTPUTS))[None, :]
    near = gl.load(at, mask=mine[:, None], other=0.0).to(gl.float32)
    gl.store(at, (outputs * ours[:, None] + near * theirs[:, None]).to(out.dtype.element_ty), mask=mine[:, None])


@gluon.jit
def _room(source, STAGES: gl.constexpr):
    """Allocate shared memory for a descriptor's boxes."""
    return gl.allocate_shared_memory(source.dtype, [STAGES, source.block_type.shape[0], source.block_type.shape[1]], source.layout)


@gluon.jit(do_not_specialize=("count", "blocks"))
def prefill_codes(keys, scales, terms, values, value_scales, zeros, left, out, requests, count, blocks, F: gl.constexpr):
    """Attend for 128 rows of a block of one request to the codes of earlier blocks. Blocks that read most are scheduled first.

    ``keys`` to ``zeros``: TMA descriptors of codes (packed/prompt_codes.py). ``left``: ``PrefillQueryCodes``. ``out`` holds the output over
    exact tokens, and receives that over all tokens. ``requests``: ``PromptBatch.numbers`` of ``count`` requests. ``blocks``: of all requests.
    """
    P: gl.constexpr = F.value.partition
    BLOCK: gl.constexpr = F.value.block
    SINKS: gl.constexpr = F.value.sinks
    STAGES: gl.constexpr = F.value.stages
    COUNT: gl.constexpr = F.value.count
    SPANS: gl.constexpr = F.value.spans
    # As in prefill_tiles, blocks are counted from one that ends where the sinks end, or earlier.
    AHEAD: gl.constexpr = (SINKS + BLOCK - 1) // BLOCK
    TILES: gl.constexpr = F.value.tiles
    GROUP: gl.constexpr = F.value.group
    ROWS: gl.constexpr = 2 * F.value.rows
    kv_head, request = gl.program_id(1), gl.program_id(2)
    known, length = gl.load(requests + count + request), gl.load(requests + 2 * count + request)
    block = (length - 1 - SINKS + AHEAD * BLOCK) // BLOCK - gl.program_id(0) // TILES
    tile = gl.program_id(0) % TILES * ROWS
    begin = SINKS + (block - AHEAD) * BLOCK
    # Rows that are not computed load nothing.
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
    # Makes the barriers visible to the copy engine.
    fence_async_shared()
    stages = (
        _room(keys, STAGES * SPANS * COUNT),
        _room(scales, STAGES * SPANS * COUNT),
        _room(terms, STAGES * SPANS),
        _room(values, STAGES * SPANS),
        _room(value_scales, STAGES),
        _room(zeros, STAGES),
    )
    of_upper = gl.allocate_shared_memory(gl.int8, [COUNT, F.value.rows, P], gl.constexpr(F.value.query_room))
    of_lower = gl.allocate_shared_memory(gl.int8, [COUNT, F.value.rows, P], gl.constexpr(F.value.query_room))
    sources = keys, scales, terms, values, value_scales, zeros
    upper, lower = (tile, begin, known, length, first, kv_head), (tile + F.value.rows, begin, known, length, first, kv_head)
    gl.warp_specialize(
        [
            (_attend, (upper, of_upper, stages, full, empty, left, out, steps, F)),
            (_attend, (lower, of_lower, stages, full, empty, left, out, steps, F)),
            (_load_codes, (sources, stages, full, empty, key_row, token, tokens, steps, F)),
        ],
        [4, 1],
        [ATTENDING, LOADING],
    )
