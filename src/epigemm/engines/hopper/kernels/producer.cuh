// The producer warpgroup: one thread fills the operand stages, another the ring of epilogue tiles. Nothing else runs here, so
// that it keeps 24 registers and leaves the rest to the consumers.

/// One stage of A: [tile_m, tile_k], as boxes of 128-byte rows along whichever dimension is contiguous.
DEVICE void load_a(const Params& p, u32 to, u32 barrier, int row, int depth) {
    if (config::a_k_major) {
        load_box(to, p.a, barrier, depth, row, p.policy_a);
        return;
    }
    for (int i = 0; i < config::tile_m / 64; ++i) load_box(to + i * 64 * 128, p.a, barrier, row + 64 * i, depth, p.policy_a);
}

/// One box of B, sent to both blocks of a pair.
DEVICE void load_b_box(u32 to, const TensorMap& map, u32 barrier, int inner, int outer, u64 policy) {
    if (config::cluster > 1) load_box_multicast(to, map, barrier, inner, outer, (1 << config::cluster) - 1, policy);
    else load_box(to, map, barrier, inner, outer, policy);
}

/// This block's share of one stage of B: the weights stacked along n. Blocks of a cluster share columns, and B.
DEVICE void load_b(const Params& p, u32 to, u32 barrier, int col, int depth, int rank) {
    constexpr int share_n = shape::out_n / config::cluster, share_k = shape::tile_k / config::cluster;
    for (int w = 0; w < config::weights; ++w, to += shape::out_n * 128) {
        if (config::b_k_major) {
            load_b_box(to + rank * share_n * 128, p.b[w], barrier, depth, col + rank * share_n, p.policy_b);
            continue;
        }
        for (int i = 0; i < shape::out_n / 64; ++i)
            load_b_box(to + i * 64 * 128 + rank * share_k * 128, p.b[w], barrier, col + 64 * i, depth + rank * share_k,
                       p.policy_b);
    }
}

DEVICE void load_operands(const Params& p, u32 base) {
    const Schedule schedule{p};
    Place place(0);
    Tile tile;
    for (int sequence = 0; schedule.at(sequence, tile); ++sequence) {
        for (int step = 0; step < p.steps; ++step, place.advance()) {
            const int depth = step * shape::tile_k;
            const u32 stage = base + place.stage * shared::stage_bytes;
            const u32 full = base + shared::full + 8 * place.stage;
            barrier_wait(base + shared::empty + 8 * place.stage, place.parity ^ 1);
            barrier_expect(full, shared::stage_bytes);
            load_a(p, stage, full, tile.m, depth);
            load_b(p, stage + shared::a_bytes, full, tile.n, depth, Schedule::cluster_index());
        }
    }
}

/// Fetches one warpgroup's epilogue tiles in the order in which `finish_tile` reads them, as far ahead as its ring reaches. Each
/// warpgroup has a ring of its own: in a shared one it could look at a slot two phases ahead, where parities repeat.
DEVICE void load_epilogue_tiles(const Params& p, u32 base, int group) {
    const Schedule schedule{p};
    const u32 ring = base + shared::ring + group * config::ring_slots * shared::slot_bytes;
    const u32 full = base + shared::ring_full + 8 * group * config::ring_slots;
    const u32 empty = base + shared::ring_empty + 8 * group * config::ring_slots;
    Tile tile;
    int slot = 0;
    u32 parity = 1;
    for (int sequence = config::pingpong ? group : 0; schedule.at(sequence, tile); sequence += config::pingpong ? 2 : 1) {
        const int row = tile.m + (config::pingpong ? 0 : group * shape::group_m);
#pragma unroll 1
        for (int part = 0; part < shape::boxes * shape::halves; ++part)
#pragma unroll 1
            for (int input = 0; input < config::tiles_in; ++input) {
                barrier_wait(empty + 8 * slot, parity);
                barrier_expect(full + 8 * slot, shared::slot_bytes);
                load_box(ring + slot * shared::slot_bytes, p.tiles_in[input], full + 8 * slot,
                         tile.n + part / shape::halves * config::box_n, row + part % shape::halves * 64, p.policy_in);
                if (++slot == config::ring_slots) {
                    slot = 0;
                    parity ^= 1;
                }
            }
    }
}
