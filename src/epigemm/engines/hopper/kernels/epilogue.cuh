// From accumulators to D: the generated `epilogue` for every element, its inputs read ahead, its outputs stored by the copy engine.
//
// In a wgmma's 64 x N accumulators, lane l of warp w holds rows 16 w + l / 4 + 8 i and columns 8 j + 2 (l % 4) + x, for i and x
// in 0..1, in register 4 j + 2 i + x. Four such 8 x 8 blocks are what stmatrix and ldmatrix move, so a warp works through
// columns by 16 and keeps 16 rows of a sub-tile to itself: no barrier, and each warp stores on its own.

/// The lane's share of addresses and coordinates.
struct Lane {
    u32 matrix;  // offset, in a box of 16 rows, of the row that this lane addresses for stmatrix and ldmatrix
    int row;     // of its elements, within the 64 rows of a wgmma
    int col;     // of its elements, within 8 columns
    int warp;    // in its warpgroup

    DEVICE Lane() {
        const u32 lane = lane_index(), line = lane % 8;
        // The swizzle moves 16-byte chunk c of row r to c ^ (r % 8) in rows of 128 bytes, c ^ (r / 2 % 4) in rows of 64.
        const u32 swizzle = config::box_n == 64 ? line : line / 2;
        matrix = (lane / 8 % 2 * 8 + line) * shape::row_bytes + ((lane / 16 ^ swizzle) << 4);
        warp = uniform(threadIdx.x / 32) % 4;
        row = warp * 16 + lane / 4;
        col = lane % 4 * 2;
    }
};

/// Vectors along n pass through registers before the products and into shared memory after them: the wait is hidden.
struct VectorsAlongN {
    static constexpr int each = (shape::out_n + 127) / 128;
    float value[config::along_n > 0 ? config::along_n : 1][each];

    DEVICE void load(const Params& p, int first) {
#pragma unroll
        for (int v = 0; v < config::along_n; ++v)
#pragma unroll
            for (int i = 0; i < each; ++i) {
                const int col = first + i * 128 + static_cast<int>(threadIdx.x % 128);
                value[v][i] = col < p.n ? read_element(type_at(config::along_n_types, v), p.along_n[v], col) : 0.0f;
            }
    }

    DEVICE void store(u32 to) const {
#pragma unroll
        for (int v = 0; v < config::along_n; ++v)
#pragma unroll
            for (int i = 0; i < each; ++i) {
                const int col = i * 128 + threadIdx.x % 128;
                if (col < shape::out_n) store_float(to + (v * shape::out_n + col) * 4, value[v][i]);
            }
    }
};

/// One row's mask bits for the columns of a sub-tile.
struct Bits {
    u32 word[2];

    DEVICE void clear() { word[0] = word[1] = 0; }
    DEVICE bool get(int j, int x) const { return word[j / 4] >> (8 * (j % 4) + x) & 1; }
    DEVICE void set(int j, int x, bool bit) { word[j / 4] |= static_cast<u32>(bit) << (8 * (j % 4) + x); }
};

/// Copies the masks of a warpgroup's rows and a tile's columns to shared memory while the products run.
/// Rows are padded to 16 bytes in global memory, so that a copy that begins before column n can be read whole.
DEVICE void copy_bits(const Params& p, u32 to, Tile tile) {
    for (int mask = 0; mask < config::bits_in; ++mask)
        for (int line = threadIdx.x % 128; line < shape::group_m; line += 128)
#pragma unroll
            for (int at = 0; at < shape::out_n / 8; at += shared::bits_copy) {
                const bool inside = tile.m + line < p.m && tile.n + 8 * at < p.n;
                const u8* from = p.bits_in[mask] + (inside ? (tile.m + line) * p.bits_in_stride[mask] + tile.n / 8 + at : 0);
                copy_async<shared::bits_copy>(to + (mask * shape::group_m + line) * shared::bits_row + at, from, inside);
            }
}

/// Gathers the bits that the four lanes of a quad hold of two rows, 8 apart; each lane then writes one word of one row.
DEVICE void store_bits(const Params& p, int mask, int row, int first, const Lane& lane, Bits (&bits)[2]) {
    const bool odd = lane_index() & 1, high = lane_index() & 2;
    u32 word[2];
#pragma unroll
    for (int w = 0; w < 2; ++w) {
        const u32 own = (odd ? bits[1].word[w] : bits[0].word[w]) << lane.col;
        const u32 others = (odd ? bits[0].word[w] : bits[1].word[w]) << lane.col;
        word[w] = own | __shfl_xor_sync(0xffffffffu, others, 1);
    }
    const u32 result = (high ? word[1] : word[0]) | __shfl_xor_sync(0xffffffffu, high ? word[0] : word[1], 2);
    const int target = row + (odd ? 8 : 0), col = first + (high ? 32 : 0);
    const u32 inside = p.n - col < 32 ? (1u << (p.n - col & 31)) - 1 : ~0u;  // what lies beyond n is written as 0
    if (target < p.m && col < p.n && (config::box_n == 64 || !high))
        *reinterpret_cast<u32*>(p.bits_out[mask] + target * p.bits_out_stride[mask] + col / 8) = result & inside;
}

/// Sums 2 `width` values with the lane whose number differs in `bit`; each keeps half of them.
template <int width, int bit>
DEVICE void fold(float (&value)[config::box_n / 4]) {
    const bool upper = lane_index() & bit;
#pragma unroll
    for (int i = 0; i < width; ++i) {
        const float other = __shfl_xor_sync(0xffffffffu, upper ? value[i] : value[i + width], bit);
        value[i] = (upper ? value[i + width] : value[i]) + other;
    }
}

constexpr int lane_sums = config::box_n / 4;  // columns of a sub-tile of which a lane holds elements: 2 j + x
constexpr int kept_sums = lane_sums / 8;      // of which it keeps the sums over all rows

/// Sums over the 8 lanes that hold other rows of the same columns; lane l keeps columns `column_index(0)` and on.
DEVICE void sum_over_lanes(float (&value)[lane_sums]) {
    fold<lane_sums / 2, 4>(value);
    fold<lane_sums / 4, 8>(value);
    fold<lane_sums / 8, 16>(value);
}

/// Which of its columns, 2 j + x, this lane holds in `value[i]` after `sum_over_lanes`.
DEVICE int column_index(int i) {
    const u32 l = lane_index() / 4;
    return (l & 1) * (lane_sums / 2) + (l >> 1 & 1) * (lane_sums / 4) + (l >> 2 & 1) * (lane_sums / 8) + i;
}

using MasksIn = Bits[config::bits_in > 0 ? config::bits_in : 1][2];
using MasksOut = Bits[config::bits_out > 0 ? config::bits_out : 1][2];

/// What a warpgroup carries through one tile's epilogue.
struct Finisher {
    const Params& p;
    const Lane lane;
    const u32 base;
    const int group;     // 0 or 1: the consumer warpgroup
    Tile tile;           // this warpgroup's first row, the tile's first column
    u32 entry;           // of this warpgroup's ring
    float along_m[config::along_m > 0 ? config::along_m : 1][shape::halves][2];
    float sum_n[config::sums_n > 0 ? config::sums_n : 1][shape::halves][2];
    float sum_m[config::sums_m > 0 ? config::sums_m : 1][lane_sums];
    MasksOut bits_out;
    u32 tiles[config::tiles_in > 0 ? config::tiles_in : 1];  // where this lane's part of the ring's entries lies
    u32 outputs[config::tiles_out];                          // and of the staged outputs
    u32 vectors_at, bits_at;                                 // where this lane's part of the vectors and masks lies

    DEVICE Finisher(const Params& params, u32 shared_base, int consumer) : p(params), base(shared_base), group(consumer) {}

    DEVICE u32 vectors() const { return base + shared::vectors + group * config::along_n * shape::out_n * 4; }
    DEVICE u32 bits() const { return base + shared::bits + group * config::bits_in * shape::group_m * shared::bits_row; }
    DEVICE u32 slot(u32 number) const { return group * config::ring_slots + number % config::ring_slots; }
    DEVICE int row(int half, int i) const { return tile.m + half * 64 + lane.row + 8 * i; }

    DEVICE void start(Tile at, int sequence) {
        tile = at;
        if (!config::pingpong) tile.m += group * shape::group_m;
        entry = (config::pingpong ? sequence / 2 : sequence) * shape::entries;
        copy_bits(p, bits(), tile);
    }

    DEVICE void load_bits(MasksIn& masks, int box, int half) const {
#pragma unroll
        for (int mask = 0; mask < config::bits_in; ++mask)
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int w = 0; w < config::box_n / 32; ++w) {
                    const int line = mask * shape::group_m + half * 64 + 8 * i;
                    masks[mask][i].word[w] = load_word(bits_at + line * shared::bits_row + box * config::box_n / 8 + 4 * w) >> lane.col;
                }
    }

    /// Values along m, and zeroed sums.
    DEVICE void start_rows() {
#pragma unroll
        for (int s = 0; s < config::sums_m; ++s)
#pragma unroll
            for (int i = 0; i < lane_sums; ++i) sum_m[s][i] = 0.0f;
#pragma unroll
        for (int half = 0; half < shape::halves; ++half)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int v = 0; v < config::along_m; ++v)
                    along_m[v][half][i] =
                        row(half, i) < p.m ? read_element(type_at(config::along_m_types, v), p.along_m[v], row(half, i)) : 0.0f;
#pragma unroll
                for (int s = 0; s < config::sums_n; ++s) sum_n[s][half][i] = 0.0f;
            }
    }

    /// One element: register `index` of the first accumulator, `8 j + x` columns into the sub-tile beyond the lane's own.
    DEVICE void element(const float (&acc)[config::tile_n / 2], Inputs& in, Outputs& out, const MasksIn& masks, int box,
                        int half, int j, int i, int x) {
        const int index = box * config::box_n / 2 + 4 * j + 2 * i + x;
#pragma unroll
        for (int w = 0; w < config::weights; ++w) in.acc[w] = acc[index + w * shape::out_n / 2];
#pragma unroll
        for (int v = 0; v < config::along_m; ++v) in.along_m[v] = along_m[v][half][i];
#pragma unroll
        for (int mask = 0; mask < config::bits_in; ++mask) in.bit[mask] = masks[mask][i].get(j, x);
        in.scalar = p.scalars;
        in.row = row(half, i);
        in.col = tile.n + box * config::box_n + 8 * j + lane.col + x;
        epilogue(in, out);
#pragma unroll
        for (int mask = 0; mask < config::bits_out; ++mask) bits_out[mask][i].set(j, x, out.bit[mask]);
        // Columns beyond n of sums over m, and rows beyond m of sums over n, are never stored: they need no mask.
#pragma unroll
        for (int s = 0; s < config::sums_m; ++s)
            if (in.row < p.m) sum_m[s][2 * j + x] += out.sum_m[s];
#pragma unroll
        for (int s = 0; s < config::sums_n; ++s)
            if (in.col < p.n) sum_n[s][half][i] += out.sum_n[s];
    }

    /// What a chunk, 16 columns of 16 rows, reads from shared memory.
    struct Chunk {
        float along_n[config::along_n > 0 ? config::along_n : 1][2][2];
        u32 tile[config::tiles_in > 0 ? config::tiles_in : 1][4];
    };

    DEVICE void load_chunk(Chunk& chunk, int box, int c) const {
#pragma unroll
        for (int t = 0; t < config::tiles_in; ++t) load_matrices(tiles[t] ^ c << 5, chunk.tile[t]);
#pragma unroll
        for (int v = 0; v < config::along_n; ++v)
#pragma unroll
            for (int jj = 0; jj < 2; ++jj)
                load_floats(vectors_at + (v * shape::out_n + box * config::box_n + (2 * c + jj) * 8) * 4, chunk.along_n[v][jj][0],
                            chunk.along_n[v][jj][1]);
    }

    /// 8 elements a lane, two by two: neighbours in a row make one word of each output.
    DEVICE void finish_chunk(const float (&acc)[config::tile_n / 2], const Chunk& chunk, const MasksIn& masks, int box, int half, int c) {
        u32 written[config::tiles_out][4];
#pragma unroll
        for (int jj = 0; jj < 2; ++jj)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                Inputs in;
                Outputs out[2];
                float inputs[config::tiles_in > 0 ? config::tiles_in : 1][2];
#pragma unroll
                for (int t = 0; t < config::tiles_in; ++t)
                    unpack(type_at(config::tiles_in_types, t), chunk.tile[t][2 * jj + i], inputs[t][0], inputs[t][1]);
#pragma unroll
                for (int x = 0; x < 2; ++x) {
#pragma unroll
                    for (int v = 0; v < config::along_n; ++v) in.along_n[v] = chunk.along_n[v][jj][x];
#pragma unroll
                    for (int t = 0; t < config::tiles_in; ++t) in.tile[t] = inputs[t][x];
                    element(acc, in, out[x], masks, box, half, 2 * c + jj, i, x);
                }
#pragma unroll
                for (int t = 0; t < config::tiles_out; ++t)
                    written[t][2 * jj + i] = pack(type_at(config::tiles_out_types, t), out[0].tile[t], out[1].tile[t]);
            }
#pragma unroll
        for (int t = 0; t < config::tiles_out; ++t)
            store_matrices(outputs[t] ^ c << 5, written[t]);
    }

    /// A sub-tile's column sums over this warp's rows, to the warp's row of partial sums; a warp covers the sub-tile's columns.
    DEVICE void store_sums_m(int box) {
        const u64 line = static_cast<u64>(tile.m / shape::group_m * 4 + lane.warp) * p.n;
#pragma unroll
        for (int s = 0; s < config::sums_m; ++s) {
            sum_over_lanes(sum_m[s]);
#pragma unroll
            for (int i = 0; i < kept_sums; ++i) {
                const int index = column_index(i), col = tile.n + box * config::box_n + index / 2 * 8 + lane.col + index % 2;
                if (tile.m < p.m && col < p.n) p.sums_m[s][line + col] = sum_m[s][i];
            }
#pragma unroll
            for (int i = 0; i < lane_sums; ++i) sum_m[s][i] = 0.0f;
        }
    }

    /// Waits for the sub-tile's inputs and sets where this lane reads them and writes its outputs.
    DEVICE void begin_sub_tile(int part) {
#pragma unroll
        for (int t = 0; t < config::tiles_in; ++t)
            barrier_wait(base + shared::ring_full + 8 * slot(entry + t), (entry + t) / config::ring_slots & 1);
        const u32 own = lane.warp * shared::box_bytes + lane.matrix;
#pragma unroll
        for (int t = 0; t < config::tiles_in; ++t)
            tiles[t] = base + shared::ring + slot(entry + t) * shared::slot_bytes + own;
        const u32 set = (group * 4 + lane.warp) * config::store_sets + part % config::store_sets;
#pragma unroll
        for (int t = 0; t < config::tiles_out; ++t)
            outputs[t] = base + shared::staging + set * shared::set_bytes + t * shared::box_bytes + lane.matrix;
    }

    /// One lane: stores the sub-tile, frees its inputs, and waits until the set that the next one writes has been read.
    DEVICE void store_sub_tile(int box, int half) const {
#pragma unroll
        for (int t = 0; t < config::tiles_out; ++t)
            store_box(p.tiles_out[t], outputs[t] - lane.matrix, tile.n + box * config::box_n, tile.m + half * 64 + lane.warp * 16,
                      p.policy_out);
        stores_commit();
#pragma unroll
        for (int t = 0; t < config::tiles_in; ++t) barrier_arrive(base + shared::ring_empty + 8 * slot(entry + t));
        stores_wait_read<config::store_sets - 1>();
    }

    /// One sub-tile of 64 rows, 16 of them this warp's.
    DEVICE void sub_tile(const float (&acc)[config::tile_n / 2], int box, int half) {
        MasksIn masks;
        load_bits(masks, box, half);
#pragma unroll
        for (int mask = 0; mask < config::bits_out; ++mask) bits_out[mask][0].clear(), bits_out[mask][1].clear();
        begin_sub_tile(box * shape::halves + half);
        // Each chunk's operands are read before the chunk ahead of it is stored: the compiler does not move loads over stores.
        constexpr int chunks = config::box_n / 16;
        Chunk chunk[2];
        load_chunk(chunk[0], box, 0);
#pragma unroll
        for (int c = 0; c < chunks; ++c) {
            if (c + 1 < chunks) load_chunk(chunk[(c + 1) % 2], box, c + 1);
            finish_chunk(acc, chunk[c % 2], masks, box, half, c);
        }
        async_proxy_fence();
        __syncwarp();
        if (lane_index() == 0) store_sub_tile(box, half);
        __syncwarp();
        entry += config::tiles_in;
#pragma unroll
        for (int mask = 0; mask < config::bits_out; ++mask)
            store_bits(p, mask, row(half, 0), tile.n + box * config::box_n, lane, bits_out[mask]);
    }

    DEVICE void finish_tile(const Accumulators& acc) {
        vectors_at = vectors() + lane.col * 4;
        bits_at = bits() + lane.row * shared::bits_row;
        start_rows();
#pragma unroll
        for (int box = 0; box < shape::boxes; ++box) {
#pragma unroll
            for (int half = 0; half < shape::halves; ++half) sub_tile(acc[half], box, half);
            store_sums_m(box);
        }
        store_sums_n();
        if (config::along_n + config::bits_in > 0) named_barrier(1 + group, 128);  // before the next tile's are written
    }

    /// Row sums of the tile: over the four lanes that share a row, then to this tile's column of partial sums.
    DEVICE void store_sums_n() const {
#pragma unroll
        for (int s = 0; s < config::sums_n; ++s)
#pragma unroll
            for (int half = 0; half < shape::halves; ++half)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float sum = sum_n[s][half][i];
                    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
                    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
                    if (lane_index() % 4 == 0 && row(half, i) < p.m)
                        p.sums_n[s][static_cast<u64>(tile.n / shape::out_n) * p.m + row(half, i)] = sum;
                }
    }
};
