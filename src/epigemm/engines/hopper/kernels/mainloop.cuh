// The products: a consumer warpgroup's accumulators over all of k. `wgmma` is generated (../source.py) for the tile's width, the
// operands' type and their layouts.

using Accumulators = float[shape::halves][config::tile_n / 2];

/// The low word of a wgmma descriptor of shared memory at `address`, offsets in units of 16 bytes; `wgmma` adds the high word.
///
/// K-major: rows of 64 k-values, 128 bytes apart; groups of 8 rows 1024 bytes apart (bits 32-45); bits 16-29 are not used.
/// MN-major: rows of 64 m- or n-values, one for each k; groups of 8 k-values 1024 bytes apart (bits 32-45), the next 64 m- or
/// n-values after all 64 of k (bits 16-29). Source: PTX ISA, asynchronous warpgroup-level matrix shared memory layout.
DEVICE u32 descriptor(u32 address, bool k_major) { return (address & 0x3ffff) >> 4 | (k_major ? 1 : shape::tile_k * 128 >> 4) << 16; }

/// What a descriptor grows by from 16 values of k to the next 16.
DEVICE constexpr u32 depth_step(bool k_major) { return (k_major ? 16 * 2 : 16 * 128) >> 4; }

/// Tells the producers of all blocks that read this stage that one more warp is done with it.
DEVICE void release(u32 empty) {
    if (config::cluster == 1) {
        if (lane_index() == 0) barrier_arrive(empty);
    } else if (lane_index() < config::cluster) {
        barrier_arrive_at(empty, lane_index());
    }
}

/// One stage: 64 of k, for each 64 rows of the warpgroup.
DEVICE void multiply_stage(Accumulators& acc, u32 a, u32 b, bool accumulate) {
    constexpr u32 half_step = 64 * 128 >> 4;  // 64 rows of 128 bytes, in either layout
#pragma unroll
    for (int i = 0; i < shape::tile_k / 16; ++i)
#pragma unroll
        for (int half = 0; half < shape::halves; ++half)
            wgmma(acc[half], a + half * half_step + i * depth_step(config::a_k_major), b + i * depth_step(config::b_k_major),
                  accumulate || i > 0);
}

/// acc = A[tile.m.., :] * B[:, tile.n..] for this block's `sequence`-th tile. In ping-pong the warpgroups take turns: each
/// issues all of a tile's products before the other begins, so that one's epilogue lies beside the other's products.
DEVICE void multiply(Accumulators& acc, u32 base, int group, int sequence, int steps) {
    const u32 turns = base + shared::order;
    Place place(static_cast<u32>(sequence) * steps);
    const u32 a = descriptor(base + (config::pingpong ? 0 : group * shape::group_m * 128), config::a_k_major);
    const u32 b = descriptor(base + shared::a_bytes, config::b_k_major);
    if (config::pingpong) barrier_wait(turns + 8 * group, (sequence / 2 & 1) ^ (group == 0));
    u32 previous = 0;
    for (int step = 0; step < steps; ++step, place.advance()) {
        const u32 offset = place.stage * (shared::stage_bytes >> 4);
        barrier_wait(base + shared::full + 8 * place.stage, place.parity);
        wgmma_fence();
        multiply_stage(acc, a + offset, b + offset, step > 0);
        wgmma_commit();
        wgmma_wait<1>();
        if (step > 0) release(previous);
        previous = base + shared::empty + 8 * place.stage;
    }
    if (config::pingpong && lane_index() == 0) barrier_arrive(turns + 8 * (1 - group));
    wgmma_wait<0>();
    release(previous);
#pragma unroll
    for (int half = 0; half < shape::halves; ++half)
#pragma unroll
        for (int i = 0; i < config::tile_n / 2; ++i) pin(acc[half][i]);
}
