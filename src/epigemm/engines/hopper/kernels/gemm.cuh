// The kernel: 384 threads, persistent. Warpgroup 0 feeds, warpgroups 1 and 2 multiply and finish.

DEVICE void init_barriers(u32 base) {
    constexpr int readers = (config::pingpong ? 4 : 8) * config::cluster;  // warps that read a stage
    for (int i = 0; i < config::stages; ++i) {
        barrier_init(base + shared::full + 8 * i, 1);
        barrier_init(base + shared::empty + 8 * i, readers);
    }
    for (int i = 0; i < 2 * config::ring_slots; ++i) {
        barrier_init(base + shared::ring_full + 8 * i, 1);
        barrier_init(base + shared::ring_empty + 8 * i, 4);
    }
    for (int i = 0; i < 2; ++i) barrier_init(base + shared::order + 8 * i, 4);
    barrier_init_fence();
}

DEVICE void prefetch_maps(const Params& p) {
    prefetch_map(p.a);
    for (int i = 0; i < config::weights; ++i) prefetch_map(p.b[i]);
    for (int i = 0; i < config::tiles_in; ++i) prefetch_map(p.tiles_in[i]);
    for (int i = 0; i < config::tiles_out; ++i) prefetch_map(p.tiles_out[i]);
}

DEVICE void consume(const Params& p, u32 base, int group) {
    const Schedule schedule{p};
    Finisher finisher(p, base, group);
    Accumulators acc;
    Tile tile;
    for (int sequence = config::pingpong ? group : 0; schedule.at(sequence, tile); sequence += config::pingpong ? 2 : 1) {
        VectorsAlongN vectors;
        vectors.load(p, tile.n);
        finisher.start(tile, sequence);
        multiply(acc, base, group, sequence, p.steps);
        vectors.store(finisher.vectors());
        if (config::bits_in > 0) copies_wait();
        if (config::along_n + config::bits_in > 0) named_barrier(1 + group, 128);
        finisher.finish_tile(acc);
    }
    if (lane_index() == 0) stores_wait_read<0>();
}

extern "C" __global__ void __cluster_dims__(config::cluster, 1, 1) __launch_bounds__(384, 1)
epigemm_hopper(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) u8 dynamic[];
    const u32 base = shared_address(dynamic);
    const int warp = uniform(threadIdx.x / 32), warpgroup = warp / 4;
    if (threadIdx.x == 0) {
        prefetch_maps(p);
        init_barriers(base);
    }
    if (config::cluster > 1) cluster_sync();
    else __syncthreads();
    launch_dependents();
    wait_for_dependencies();
    if (warpgroup == 0) {
        give_registers<24>();
        if (warp == 0 && lane_index() == 0) load_operands(p, base);
        if (config::tiles_in > 0 && (warp == 1 || warp == 2) && lane_index() == 0) load_epilogue_tiles(p, base, warp - 1);
    } else {
        take_registers<240>();
        consume(p, base, warpgroup - 1);
    }
    if (config::cluster > 1) cluster_sync();  // a block's memory and barriers stay until the other has done with them
}
