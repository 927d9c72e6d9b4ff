// The instructions of SM90 that C++ has no words for: mbarriers, the bulk tensor copy engine (TMA), wgmma's fences,
// stmatrix and ldmatrix. No header is included, so that NVRTC compiles this text as it stands.

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

#define DEVICE __device__ __forceinline__

/// A CUtensorMap: 128 opaque bytes that the host encodes.
struct alignas(64) TensorMap {
    u64 opaque[16];
};

enum class Type : int { bf16, f16, f32 };

// ---- addresses and roles ----

DEVICE u32 shared_address(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

DEVICE u32 lane_index() { return threadIdx.x & 31; }

/// The same value in every lane, so that what follows from it can live in uniform registers (wgmma's descriptors have to).
DEVICE int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

/// The rank of this block in its cluster.
DEVICE u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

DEVICE void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
}

/// Lets the next kernel of the stream start on multiprocessors that this one has left, if it was launched to allow that.
DEVICE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

/// Waits until the kernels before this one have finished and their writes can be seen; nothing global is touched before it.
DEVICE void wait_for_dependencies() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

template <int registers>
DEVICE void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

template <int registers>
DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

/// A barrier among `threads` threads of the block, by number (0 is __syncthreads').
DEVICE void named_barrier(int number, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// ---- mbarriers ----

DEVICE void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

DEVICE void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/// Arrives at the barrier that lies at the same address in block `rank` of the cluster.
DEVICE void barrier_arrive_at(u32 barrier, u32 rank) {
    asm volatile(
        "{\n\t.reg .b32 remote;\n\t"
        "mapa.shared::cluster.u32 remote, %0, %1;\n\t"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n\t}" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

DEVICE void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

/// Waits until the phase of this parity has completed (a fresh barrier counts as having completed parity 1).
/// Acquire at the default scope, the block: what other blocks hand over here is read and written by the async proxy alone.
DEVICE void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n\t.reg .pred done;\n\t"
        "again:\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
        "@done bra finished;\n\t"
        "bra again;\n\t"
        "finished:\n\t}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// ---- the bulk tensor copy engine ----

DEVICE void prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// `policy` says how long L2 should keep what passes: see Params.

/// Copies one box of a 2-D tensor, its first element at (inner, outer), to shared memory; counts its bytes at the barrier.
DEVICE void load_box(u32 to, const TensorMap& map, u32 barrier, int inner, int outer, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(inner), "r"(outer), "l"(policy)
        : "memory");
}

/// The same into every block of `mask`, at the same address; each block's own barrier counts the bytes.
DEVICE void load_box_multicast(u32 to, const TensorMap& map, u32 barrier, int inner, int outer, u16 mask,
                               u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
        " [%0], [%1, {%3, %4}], [%2], %5, %6;" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(inner), "r"(outer), "h"(mask), "l"(policy)
        : "memory");
}

DEVICE void store_box(const TensorMap& map, u32 from, int inner, int outer, u64 policy) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2, %3}], [%1], %4;" ::"l"(&map),
                 "r"(from), "r"(inner), "r"(outer), "l"(policy)
                 : "memory");
}

DEVICE void stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

/// Waits until at most `pending` of this thread's committed groups still read shared memory.
template <int pending>
DEVICE void stores_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

/// Makes this thread's ordinary writes to shared memory visible to the copy engine.
DEVICE void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- wgmma ----

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int pending>
DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

/// Keeps the compiler from moving a register across this point.
DEVICE void pin(float& value) { asm volatile("" : "+f"(value)::"memory"); }

// ---- registers <-> shared memory, in the layout of wgmma's accumulators ----
//
// All are volatile, which keeps them in order with barriers and with each other, but none says "memory": arithmetic moves freely.

DEVICE void store_matrices(u32 address, const u32 (&words)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3]));
}

DEVICE void load_matrices(u32 address, u32 (&words)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
        : "r"(address));
}

DEVICE void store_float(u32 address, float value) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value));
}

DEVICE float load_float(u32 address) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
    return value;
}

DEVICE void load_floats(u32 address, float& first, float& second) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(first), "=f"(second) : "r"(address));
}

DEVICE u32 load_word(u32 address) {
    u32 value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address));
    return value;
}

/// Copies `size` bytes from global memory without passing through registers; zeros where it is not `inside`.
template <int size>
DEVICE void copy_async(u32 to, const void* from, bool inside) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(size), "r"(inside ? size : 0) : "memory");
}

DEVICE void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---- element types: `type` is a constant of the kernel everywhere, so each branch folds ----

/// Two float32 rounded to nearest even, the first in the low half.
DEVICE u32 pack(Type type, float low, float high) {
    u32 word;
    if (type == Type::bf16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

DEVICE float widen(Type type, u16 bits) {
    if (type == Type::bf16) return __uint_as_float(static_cast<u32>(bits) << 16);
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

DEVICE void unpack(Type type, u32 word, float& low, float& high) {
    low = widen(type, static_cast<u16>(word));
    high = type == Type::bf16 ? __uint_as_float(word & 0xffff0000u) : widen(type, static_cast<u16>(word >> 16));
}

/// Element `index` of a vector of this type, as float32.
DEVICE float read_element(Type type, const void* vector, int index) {
    if (type == Type::f32) return __ldg(static_cast<const float*>(vector) + index);
    return widen(type, __ldg(static_cast<const u16*>(vector) + index));
}
