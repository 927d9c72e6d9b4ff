// Partial sums to sums, in a fixed order: same inputs, same bits.

/// out[i] = sum over r of partial[r, i], for `count` rows of `length` values, rounded once to `type`. Blocks of (32, 32).
extern "C" __global__ void __launch_bounds__(1024) epigemm_finish(const float* partial, void* out, int count, int length, int type) {
    __shared__ float sums[32][33];
    launch_dependents();
    wait_for_dependencies();
    const int i = blockIdx.x * 32 + threadIdx.x;
    float sum = 0.0f;
    if (i < length)
        for (int r = threadIdx.y; r < count; r += 32) sum += partial[static_cast<u64>(r) * length + i];
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || i >= length) return;
    for (int r = 1; r < 32; ++r) sum += sums[r][threadIdx.x];
    if (static_cast<Type>(type) == Type::f32) static_cast<float*>(out)[i] = sum;
    else static_cast<u16*>(out)[i] = static_cast<u16>(pack(static_cast<Type>(type), sum, 0.0f));
}
