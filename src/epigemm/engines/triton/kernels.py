"""The kernels: device code only. What an epilogue does with a tile is the generated function `EPILOGUE` (codegen.py).

D is row-major here: a column-major D is computed as its transpose, with the operands exchanged (module.py). "Left" and "right" are
the operands in that sense; one of the two may be several, one for each accumulator. `item` counts the matrices of the batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from epigemm.engines.triton.prelude import epi_cast, epi_largest, epi_widen

# Where a tile stands: tiles are taken GROUP lines of them at a time, column by column, so that neighbours share operands in the L2 cache.


@triton.jit
def _place(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    per_item = tiles_m * tiles_n
    item = tile // per_item
    tile = tile % per_item
    per_group = GROUP * tiles_n
    first = (tile // per_group) * GROUP
    height = min(tiles_m - first, GROUP)
    within = tile % per_group
    return item, first + within % height, within // height


@triton.jit
def _at(item, extents, strides):
    # The offset in elements of matrix `item` of a batch with these extents, the last axis fastest.
    offset = item.to(tl.int64) * 0
    for axis in tl.static_range(len(extents)):
        offset += (item % extents[len(extents) - 1 - axis]).to(tl.int64) * strides[len(extents) - 1 - axis]
        item = item // extents[len(extents) - 1 - axis]
    return offset


@triton.jit
def _zeros(COUNT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    accs = ()
    for _ in tl.static_range(COUNT):
        accs = accs + (tl.zeros((BLOCK_M, BLOCK_N), tl.float32),)
    return accs


@triton.jit
def _multiply(xs, ys, accs, PRECISION: tl.constexpr, PROMOTE: tl.constexpr, WIDEN: tl.constexpr):
    # xs: [BLOCK_M, BLOCK_K], ys: [BLOCK_K, BLOCK_N]. Several lefts meet one right, or one left several rights.
    # PROMOTE: after how many k an fp8 sum goes on in float32, 0 for never. WIDEN: multiply in float32, for the interpreter.
    sums = ()
    for i in tl.static_range(len(accs)):
        x, y = xs[i if len(xs) > 1 else 0], ys[i if len(ys) > 1 else 0]
        if WIDEN:
            acc = tl.dot(epi_widen(x), epi_widen(y), accs[i], input_precision="ieee")
        elif PROMOTE > 0:
            acc = tl.dot(x, y, accs[i], max_num_imprecise_acc=PROMOTE)
        else:
            acc = tl.dot(x, y, accs[i], input_precision=PRECISION)
        sums = sums + (acc,)
    return sums


# ---------------------------------------------------------------- operands through tensor maps


@triton.jit
def _fetch(operands, item, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TURNED: tl.constexpr, BATCHED: tl.constexpr):
    # [ROWS, COLUMNS] of each operand, from descriptors whose fastest axis is the columns, or if TURNED the rows.
    parts = ()
    for i in tl.static_range(len(operands)):
        if TURNED:
            part = operands[i].load([item, column, row]).reshape(COLUMNS, ROWS) if BATCHED else operands[i].load([column, row])
            part = part.T
        else:
            part = operands[i].load([item, row, column]).reshape(ROWS, COLUMNS) if BATCHED else operands[i].load([row, column])
        parts = parts + (part,)
    return parts


@triton.jit
def persistent(
    lefts,
    rights,
    tensors,
    m,
    n,
    k,
    items,
    tiles_m,
    tiles_n,
    alpha,
    beta,
    EPILOGUE: tl.constexpr,
    COUNT: tl.constexpr,
    LEFT_TURNED: tl.constexpr,
    RIGHT_TURNED: tl.constexpr,
    BATCHED: tl.constexpr,
    LEFT_SHARED: tl.constexpr,
    RIGHT_SHARED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    FLATTEN: tl.constexpr,
    PRECISION: tl.constexpr,
    PROMOTE: tl.constexpr,
    WIDEN: tl.constexpr,
):
    # One program a multiprocessor, each takes every PROGRAMS-th tile. Operands come by tensor maps.
    steps = tl.cdiv(k, BLOCK_K)
    for tile in tl.range(tl.program_id(0), items * tiles_m * tiles_n, PROGRAMS, flatten=FLATTEN):
        item, tile_m, tile_n = _place(tile, tiles_m, tiles_n, GROUP)
        accs = _zeros(COUNT, BLOCK_M, BLOCK_N)
        for step in tl.range(steps):
            left_item, right_item = 0 if LEFT_SHARED else item, 0 if RIGHT_SHARED else item
            xs = _fetch(lefts, left_item, tile_m * BLOCK_M, step * BLOCK_K, BLOCK_M, BLOCK_K, LEFT_TURNED, BATCHED)
            ys = _fetch(rights, right_item, step * BLOCK_K, tile_n * BLOCK_N, BLOCK_K, BLOCK_N, RIGHT_TURNED, BATCHED)
            accs = _multiply(xs, ys, accs, PRECISION, PROMOTE, WIDEN)
        EPILOGUE(accs, tile_m, tile_n, item, m, n, tiles_m, tiles_n, alpha, beta, tensors, BLOCK_M, BLOCK_N)


# ---------------------------------------------------------------- operands through pointers


@triton.jit
def _read(operands, rows, columns, row_steps, column_steps, inside):
    # [ROWS, COLUMNS] of each operand.
    parts = ()
    for i in tl.static_range(len(operands)):
        offsets = rows[:, None] * row_steps[i] + columns[None, :] * column_steps[i]
        parts = parts + (tl.load(operands[i] + offsets, mask=inside, other=0.0),)
    return parts


@triton.jit
def _started(operands, item, line, start, lines_steps, k_steps, items_steps, extents):
    # Each operand's address of a tile's first element.
    places = ()
    for i in tl.static_range(len(operands)):
        places = places + (operands[i] + _at(item, extents, items_steps[i]) + line * lines_steps[i] + start * k_steps[i],)
    return places


@triton.jit
def _advanced(operands, distance, k_steps):
    moved = ()
    for i in tl.static_range(len(operands)):
        moved = moved + (operands[i] + distance * k_steps[i],)
    return moved


@triton.jit
def _keep(partials, accs, COUNT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    within = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    for i in tl.static_range(COUNT):
        tl.store(partials + i * BLOCK_M * BLOCK_N + within, accs[i])


@triton.jit
def _add_kept(partials, accs, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    within = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    # Not from L1: another multiprocessor wrote it.
    sums = ()
    for i in tl.static_range(len(accs)):
        sums = sums + (accs[i] + tl.load(partials + i * BLOCK_M * BLOCK_N + within, cache_modifier=".cg"),)
    return sums


@triton.jit
def blocks(
    lefts,
    rights,
    tensors,
    left_lines,
    left_k,
    left_items,
    right_lines,
    right_k,
    right_items,
    extents,
    partials,
    counters,
    m,
    n,
    k,
    steps,
    tiles_m,
    tiles_n,
    alpha,
    beta,
    EPILOGUE: tl.constexpr,
    COUNT: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
    PROMOTE: tl.constexpr,
    WIDEN: tl.constexpr,
):
    # One program for each tile and each part of k, `steps` blocks of k long. Any strides.
    tile = tl.program_id(0) // SPLITS
    part = tl.program_id(0) % SPLITS
    item, tile_m, tile_n = _place(tile, tiles_m, tiles_n, GROUP)
    rows = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)
    along = tl.arange(0, BLOCK_K)
    row, column = (tile_m * BLOCK_M).to(tl.int64), (tile_n * BLOCK_N).to(tl.int64)
    first = part * steps
    start = (first * BLOCK_K).to(tl.int64)
    distance = tl.full((), BLOCK_K, tl.int64)
    xs_at = _started(lefts, item, row, start, left_lines, left_k, left_items, extents)
    ys_at = _started(rights, item, column, start, right_lines, right_k, right_items, extents)
    in_m = (tile_m * BLOCK_M + rows < m)[:, None]
    in_n = (tile_n * BLOCK_N + columns < n)[None, :]
    accs = _zeros(COUNT, BLOCK_M, BLOCK_N)
    for step in tl.range(first, min(first + steps, tl.cdiv(k, BLOCK_K))):
        in_k = step * BLOCK_K + along < k
        xs = _read(xs_at, rows, along, left_lines, left_k, in_m & in_k[None, :])
        ys = _read(ys_at, along, columns, right_k, right_lines, in_k[:, None] & in_n)
        accs = _multiply(xs, ys, accs, PRECISION, PROMOTE, WIDEN)
        xs_at = _advanced(xs_at, distance, left_k)
        ys_at = _advanced(ys_at, distance, right_k)
    if SPLITS == 1:
        EPILOGUE(accs, tile_m, tile_n, item, m, n, tiles_m, tiles_n, alpha, beta, tensors, BLOCK_M, BLOCK_N)
    else:
        # The last part to arrive adds all of them in their order, so that the sum does not depend on who it is.
        tile_elements = COUNT * BLOCK_M * BLOCK_N
        place = partials + tile.to(tl.int64) * (SPLITS * tile_elements)
        _keep(place + part * tile_elements, accs, COUNT, BLOCK_M, BLOCK_N)
        tl.debug_barrier()
        if tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLITS - 1:
            sums = _zeros(COUNT, BLOCK_M, BLOCK_N)
            for other in tl.range(SPLITS):
                sums = _add_kept(place + other * tile_elements, sums, BLOCK_M, BLOCK_N)
            EPILOGUE(sums, tile_m, tile_n, item, m, n, tiles_m, tiles_n, alpha, beta, tensors, BLOCK_M, BLOCK_N)


# ---------------------------------------------------------------- sums


@triton.jit
def operand_sum(operand, total, lines_step, k_step, items_step, extents, lines, k, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    # total[item, line] = the sum over k of one operand's line, in float32 and a fixed order.
    item = tl.program_id(0) // tl.cdiv(lines, BLOCK)
    first = (tl.program_id(0) % tl.cdiv(lines, BLOCK)) * BLOCK
    line = first + tl.arange(0, BLOCK)[:, None]
    along = tl.arange(0, BLOCK_K)[None, :]
    at = operand + _at(item, extents, items_step) + line.to(tl.int64) * lines_step
    sums = tl.zeros((BLOCK, BLOCK_K), tl.float32)
    for step in tl.range(tl.cdiv(k, BLOCK_K)):
        place = step * BLOCK_K + along
        sums += tl.load(at + place.to(tl.int64) * k_step, mask=(line < lines) & (place < k), other=0.0).to(tl.float32)
    within = first + tl.arange(0, BLOCK)
    tl.store(total + item.to(tl.int64) * lines + within, tl.sum(sums, axis=1), mask=within < lines)


@triton.jit
def finish(
    partials,
    out,
    count,
    length,
    empty,
    out_step,
    out_items,
    extents,
    AFTER: tl.constexpr,
    AMAX: tl.constexpr,
    BLOCK_COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # out[item, i] = AFTER(the sum, or the maximum, of partials[item, :count, i]), in a fixed order; 0 where D is empty.
    item = tl.program_id(0) // tl.cdiv(length, BLOCK)
    places = (tl.program_id(0) % tl.cdiv(length, BLOCK)) * BLOCK + tl.arange(0, BLOCK)
    parts = tl.arange(0, BLOCK_COUNT)[:, None]
    at = partials + item.to(tl.int64) * count * length + places[None, :]
    found = tl.full((BLOCK_COUNT, BLOCK), float("-inf") if AMAX else 0.0, tl.float32)
    for first in tl.range(0, count, BLOCK_COUNT):
        inside = (first + parts < count) & (places < length)[None, :]
        part = tl.load(at + (first + parts).to(tl.int64) * length, mask=inside, other=float("-inf") if AMAX else 0.0)
        found = tl.maximum(found, part, propagate_nan=tl.PropagateNan.ALL) if AMAX else found + part
    total = epi_largest(found, 0) if AMAX else tl.sum(found, axis=0)
    total = tl.where(empty != 0, 0.0, total)
    place = out + _at(item, extents, out_items) + places.to(tl.int64) * out_step
    tl.store(place, epi_cast(AFTER(total), out.dtype.element_ty), mask=places < length)
