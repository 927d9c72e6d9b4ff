// One pass over D: reads the accumulators and the epilogue's inputs, writes what the expression says, sums along m and n.
//
// `config::` and `epilogue` are generated (pointwise.py). "fast" is D's contiguous axis, "slow" the other one. A block covers
// `lanes * vector` elements of fast and `slots * rows` of slow: each thread `vector` neighbours in `rows` lines, `slots` apart. It
// loads `ahead` lines before the one that it computes: D may be an input's or an accumulator's memory, so the compiler cannot move
// a load before a store by itself. Sums leave one partial a tile in the workspace, which the last block that shares a result adds in a fixed order.
// The workspace begins with the counters that tell it so, 0 before the launch: one a column of tiles, one a row of tiles, one for
// all tiles, of each batch.

using config::Real;
using config::Value;

struct Tensor {
    epi_i64 slow, fast;                          // strides in elements; in bytes of mask for packed bits
    epi_i64 batch[config::batch_axes > 0 ? config::batch_axes : 1];
};

/// All that does not change from call to call; mirrored by pointwise.py, which packs it.
struct Extents {
    int slow, fast;
    int padded_fast;                             // up to where mask bytes are written
    int tiles_slow, tiles_fast;
    int rows;                                    // lines of a thread
    int batch[config::batch_axes > 0 ? config::batch_axes : 1];
    int batches;
    Tensor tensors[config::tensors];             // sources, then targets, then results of reductions
    epi_u64 partials[config::reductions > 0 ? config::reductions : 1];  // byte offsets into the workspace
};

static_assert(sizeof(Extents) == config::extents_bytes, "packed by pointwise.py");

/// The addresses of one call, in the order of `Extents::tensors`.
struct Addresses {
    epi_u8* tensors[config::tensors];
    epi_u8* workspace;
};

constexpr int slots = config::threads / config::lanes;
constexpr int tile_fast = config::lanes * config::vector;
constexpr int element_words = 4;                 // room for complex128
constexpr int vector_words = config::vector * element_words;
constexpr int source_room = config::sources;
constexpr int reduction_room = config::reductions > 0 ? config::reductions : 1;

/// One element as the epilogue sees it, and what it makes of it. Members that an epilogue does not use cost nothing.
struct In {
    Value value[source_room];
    bool bit[source_room];
    epi_i64 integer[source_room];
};

struct Out {
    Value value[config::targets > 0 ? config::targets : 1];
    bool bit[config::targets > 0 ? config::targets : 1];
    Real term[reduction_room];
};

EPI_DEVICE void epilogue(const In& in, Out& out, int row, int column, int batch);

// ---- memory ----

/// Loads `bytes` (a constant, a power of two) into words; the address is a multiple of bytes, or of 16.
EPI_DEVICE void load_words(epi_u32* words, const epi_u8* at, int bytes) {
    if (bytes >= 16) {
#pragma unroll
        for (int i = 0; i < bytes / 16; ++i) {
            const uint4 four = reinterpret_cast<const uint4*>(at)[i];
            words[4 * i] = four.x;
            words[4 * i + 1] = four.y;
            words[4 * i + 2] = four.z;
            words[4 * i + 3] = four.w;
        }
    } else if (bytes == 8) {
        const uint2 two = *reinterpret_cast<const uint2*>(at);
        words[0] = two.x;
        words[1] = two.y;
    } else if (bytes == 4) words[0] = *reinterpret_cast<const epi_u32*>(at);
    else if (bytes == 2) words[0] = *reinterpret_cast<const epi_u16*>(at);
    else words[0] = *at;
}

EPI_DEVICE void store_words(const epi_u32* words, epi_u8* at, int bytes) {
    if (bytes >= 16) {
#pragma unroll
        for (int i = 0; i < bytes / 16; ++i)
            reinterpret_cast<uint4*>(at)[i] = uint4{words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]};
    } else if (bytes == 8) *reinterpret_cast<uint2*>(at) = uint2{words[0], words[1]};
    else if (bytes == 4) *reinterpret_cast<epi_u32*>(at) = words[0];
    else if (bytes == 2) *reinterpret_cast<epi_u16*>(at) = static_cast<epi_u16>(words[0]);
    else *at = static_cast<epi_u8>(words[0]);
}

/// Loads one element to where element `index` lies in `words`.
EPI_DEVICE void load_element(EpiType type, epi_u32* words, int index, const epi_u8* at) {
    const int bytes = epi_bytes(type);
    epi_u32 element[element_words];
    load_words(element, at, bytes);
    if (bytes == 16) {
#pragma unroll
        for (int i = 0; i < 4; ++i) words[4 * index + i] = element[i];
    } else epi_put(words, bytes, index, bytes == 8 ? element[0] | static_cast<epi_u64>(element[1]) << 32 : element[0]);
}

EPI_DEVICE void store_element(EpiType type, epi_u8* at, Value value) {
    epi_u32 words[element_words];
    epi_encode(type, words, 0, value);
    store_words(words, at, epi_bytes(type));
}

// ---- where a thread is ----

/// Whether element `v` from `first` lies in D. Where fast is a multiple of `vector`, a thread's elements all do or none does.
EPI_DEVICE bool inside(const Extents& e, int first, int v) { return first + (config::whole ? 0 : v) < e.fast; }
EPI_DEVICE bool all_inside(const Extents& e, int first) { return config::whole || first + config::vector <= e.fast; }

/// A tile and a thread's place in it.
struct Place {
    int tile_s, tile_f, batch;
    int lane, slot;
    int first;  // its first element along fast, a multiple of `vector`
    int rows;

    EPI_DEVICE explicit Place(const Extents& e) {
        // The last tiles first: they are what the product wrote last, and may still lie in L2.
        const int tiles = e.tiles_slow * e.tiles_fast;
        const int block = gridDim.x - 1 - blockIdx.x;
        batch = block / tiles;
        tile_s = block % tiles / e.tiles_fast;
        tile_f = block % e.tiles_fast;
        lane = threadIdx.x % config::lanes;
        slot = threadIdx.x / config::lanes;
        first = (tile_f * config::lanes + lane) * config::vector;
        rows = e.rows;
    }

    EPI_DEVICE int line(int row) const { return (tile_s * rows + row) * slots + slot; }
};

/// The address of a tensor's first element in this batch.
EPI_DEVICE epi_u8* in_batch(const Addresses& a, const Extents& e, int tensor, int bytes, int batch) {
    epi_i64 offset = 0;
#pragma unroll
    for (int axis = config::batch_axes - 1; axis >= 0; --axis) {
        offset += e.tensors[tensor].batch[axis] * (batch % e.batch[axis]);
        batch /= e.batch[axis];
    }
    return a.tensors[tensor] + offset * bytes;
}

// ---- sources ----

/// What a thread holds of the sources: the bits of `vector` elements of one line each (one word where they are all the same).
using Held = epi_u32[source_room][vector_words];

/// Whether a source must be read anew for each line.
EPI_DEVICE constexpr bool changes(Along along) { return along == Along::slow || along == Along::both || along == Along::bits; }

EPI_DEVICE void load_source(int index, epi_u32* words, const epi_u8* base, const Tensor& tensor, const Extents& e, int line, int first) {
    const Source source = config::source(index);
    const int bytes = epi_bytes(source.type);
    if (line >= e.slow || first >= e.fast) return;
    const epi_u8* at = base + (changes(source.along) ? line * tensor.slow : 0) * bytes;
    if (source.along == Along::bits) {
        words[0] = at[first / 8 * tensor.fast] >> first % 8;
    } else if (source.along == Along::nothing || source.along == Along::slow) {
        load_element(source.type, words, 0, at);
    } else if (source.vector && all_inside(e, first)) {
        load_words(words, at + static_cast<epi_i64>(first) * bytes, config::vector * bytes);
    } else {
#pragma unroll
        for (int v = 0; v < config::vector; ++v)
            if (inside(e, first, v)) load_element(source.type, words, v, at + (first + v) * tensor.fast * bytes);
    }
}

EPI_DEVICE void load_sources(Held& held, epi_u8* const* bases, const Extents& e, int line, int first, bool changing) {
#pragma unroll
    for (int i = 0; i < config::sources; ++i)
        if (changes(config::source(i).along) == changing) load_source(i, held[i], bases[i], e.tensors[i], e, line, first);
}

EPI_DEVICE void copy(Held& to, const Held& from) {
#pragma unroll
    for (int i = 0; i < config::sources; ++i)
#pragma unroll
        for (int word = 0; word < vector_words; ++word) to[i][word] = from[i][word];
}

/// Element `v` of a line, from what is held of the line and of all lines.
EPI_DEVICE void element(In& in, const Held& line, const Held& all, int v) {
#pragma unroll
    for (int i = 0; i < config::sources; ++i) {
        const Source source = config::source(i);
        const epi_u32* words = changes(source.along) ? line[i] : all[i];
        const int index = source.along == Along::both || source.along == Along::fast ? v : 0;
        in.bit[i] = words[0] >> v & 1;
        in.value[i] = epi_decode<Value>(source.type, words, index);
        in.integer[i] = epi_decode_integer(source.type, words, index);
    }
}

// ---- targets ----

EPI_DEVICE void store_bits(epi_u32 bits, epi_u8* base, const Tensor& tensor, const Extents& e, int line, const Place& place) {
    constexpr int sharing = 8 / config::vector;  // lanes that make up a byte
    bits <<= config::vector * (place.lane % sharing);
#pragma unroll
    for (int step = 1; step < sharing; step *= 2) bits |= __shfl_xor_sync(~0u, bits, step);
    if (place.lane % sharing == 0 && line < e.slow && place.first < e.padded_fast)
        base[line * tensor.slow + place.first / 8 * tensor.fast] = static_cast<epi_u8>(bits);
}

EPI_DEVICE void store_values(int index, const Value (&values)[config::vector], epi_u8* base, const Tensor& tensor, const Extents& e,
                             int line, int first) {
    const Target target = config::target(index);
    const int bytes = epi_bytes(target.type);
    const bool one_line = target.along == Along::fast || target.along == Along::nothing;
    if (line >= e.slow || first >= e.fast || (one_line && line > 0)) return;
    epi_u8* at = base + line * tensor.slow * bytes;
    if (target.along == Along::slow || target.along == Along::nothing) {
        if (first == 0) store_element(target.type, at, values[0]);
    } else if (target.vector && all_inside(e, first)) {
        epi_u32 words[vector_words];
#pragma unroll
        for (int v = 0; v + 1 < config::vector; v += 2) epi_encode_pair(target.type, words, v, values[v], values[v + 1]);
        if (config::vector == 1) epi_encode(target.type, words, 0, values[0]);
        store_words(words, at + static_cast<epi_i64>(first) * bytes, config::vector * bytes);
    } else {
#pragma unroll
        for (int v = 0; v < config::vector; ++v)
            if (inside(e, first, v)) store_element(target.type, at + (first + v) * tensor.fast * bytes, values[v]);
    }
}

// ---- reductions ----

EPI_DEVICE Real identity(Combine combine) { return combine == Combine::sum ? Real(0) : -Real(epi_bits_float(0x7f800000u)); }

EPI_DEVICE Real combined(Combine combine, Real a, Real b) {
    if (combine == Combine::sum) return a + b;
    return a > b || a != a ? a : b;  // NaN stays
}

EPI_DEVICE Real across_lanes(Combine combine, Real x, int lanes) {
#pragma unroll
    for (int step = lanes / 2; step > 0; step /= 2) x = combined(combine, x, __shfl_xor_sync(~0u, x, step));
    return x;
}

/// A thread's sums: over its lines for each of its elements along fast, or over all it sees.
struct Sums {
    Real over_slow[reduction_room][config::vector];
    Real over_both[reduction_room];
};

EPI_DEVICE Real* partials_of(const Addresses& a, const Extents& e, int reduction) {
    return reinterpret_cast<Real*>(a.workspace + e.partials[reduction]);
}

/// Adds one line's terms. A sum over fast is complete across the lanes at once: one partial a line.
EPI_DEVICE void add_terms(Sums& sums, const Real (&terms)[reduction_room][config::vector], const Addresses& a, const Extents& e,
                          const Place& place, int row) {
    const int line = place.line(row);
#pragma unroll
    for (int r = 0; r < config::reductions; ++r) {
        const Reduction reduction = config::reduction(r);
        Real total = identity(reduction.combine);
#pragma unroll
        for (int v = 0; v < config::vector; ++v) {
            const Real term = line < e.slow && inside(e, place.first, v) ? terms[r][v] : identity(reduction.combine);
            if (reduction.over == Over::slow) sums.over_slow[r][v] = combined(reduction.combine, sums.over_slow[r][v], term);
            else total = combined(reduction.combine, total, term);
        }
        if (reduction.over == Over::both) sums.over_both[r] = combined(reduction.combine, sums.over_both[r], total);
        if (reduction.over == Over::fast) {
            total = across_lanes(reduction.combine, total, config::lanes);
            if (place.lane == 0 && line < e.slow)
                partials_of(a, e, r)[(static_cast<epi_i64>(place.batch) * e.tiles_fast + place.tile_f) * e.slow + line] = total;
        }
    }
}

EPI_DEVICE void store_over_slow(Combine combine, const Real (&sums)[config::vector], Real* shared, Real* to, const Place& place,
                                const Extents& e) {
    __syncthreads();
#pragma unroll
    for (int v = 0; v < config::vector; ++v) shared[threadIdx.x * config::vector + v] = sums[v];
    __syncthreads();
    const int column = place.tile_f * tile_fast + threadIdx.x;
    if (threadIdx.x >= tile_fast || column >= e.fast) return;
    Real total = shared[threadIdx.x];
    for (int slot = 1; slot < slots; ++slot) total = combined(combine, total, shared[slot * tile_fast + threadIdx.x]);
    to[(static_cast<epi_i64>(place.batch) * e.tiles_slow + place.tile_s) * e.fast + column] = total;
}

EPI_DEVICE void store_over_both(Combine combine, Real total, Real* shared, Real* to, const Place& place, const Extents& e) {
    total = across_lanes(combine, total, 32);
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = total;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int warp = 1; warp < config::threads / 32; ++warp) total = combined(combine, total, shared[warp]);
    to[(static_cast<epi_i64>(place.batch) * e.tiles_slow + place.tile_s) * e.tiles_fast + place.tile_f] = total;
}

// ---- the end of the sums: the last block of those that share results adds their partials ----

/// Reads what another block has written: from L2, since L1 may be older.
EPI_DEVICE float read_partial(const float* at) {
    float x;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(at) : "memory");
    return x;
}

EPI_DEVICE double read_partial(const double* at) {
    double x;
    asm volatile("ld.global.cg.f64 %0, [%1];" : "=d"(x) : "l"(at) : "memory");
    return x;
}

/// Whether this block is the last of `blocks` to come here; true for all of its threads.
EPI_DEVICE bool is_last(const Addresses& a, int counter, int blocks) {
    __shared__ bool last;
    __threadfence();  // this thread's partials, before the count
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(reinterpret_cast<epi_u32*>(a.workspace) + counter, 1u) == static_cast<epi_u32>(blocks - 1);
    __syncthreads();
    if (last) __threadfence();
    return last;
}

EPI_DEVICE void store_result(int r, const Addresses& a, const Extents& e, int batch, int index, Real total) {
    const Reduction reduction = config::reduction(r);
    const int tensor = config::sources + config::targets + r;
    const int bytes = epi_bytes(reduction.type);
    const epi_i64 stride = reduction.over == Over::slow ? e.tensors[tensor].fast : reduction.over == Over::fast ? e.tensors[tensor].slow : 0;
    Value value;
    epi_set(value, total);
    store_element(reduction.type, in_batch(a, e, tensor, bytes, batch) + index * stride * bytes, value);
}

/// Results first .. first + count of one reduction, each the sum of `tiles` partials that lie `length` apart. Threads share the
/// tiles of a result where there are more threads than results; the order of the sum depends on the shape alone.
EPI_DEVICE void add_partials(int r, const Addresses& a, const Extents& e, Real* shared, int batch, int tiles, int length, int first,
                             int count) {
    const Combine combine = config::reduction(r).combine;
    int width = 1;
    while (width < count && width < config::threads) width *= 2;
    const int x = threadIdx.x % width, y = threadIdx.x / width, ways = config::threads / width;
    const Real* from = partials_of(a, e, r) + static_cast<epi_i64>(batch) * tiles * length;
    for (int start = 0; start < count; start += width) {
        const int index = first + start + x;
        const bool live = start + x < count && index < length;
        Real total = identity(combine);
        if (live)
#pragma unroll 16
            for (int tile = y; tile < tiles; tile += ways)
                total = combined(combine, total, read_partial(from + static_cast<epi_i64>(tile) * length + index));
        __syncthreads();
        shared[threadIdx.x] = total;
        __syncthreads();
        for (int half = ways / 2; half > 0; half /= 2) {
            if (y < half) shared[threadIdx.x] = combined(combine, shared[threadIdx.x], shared[threadIdx.x + half * width]);
            __syncthreads();
        }
        if (y == 0 && live) store_result(r, a, e, batch, index, shared[x]);
    }
}

EPI_DEVICE constexpr bool any_over(Over over) {
    for (int r = 0; r < config::reductions; ++r)
        if (config::reduction(r).over == over) return true;
    return false;
}

/// Stores this block's partials, and where it is the last of a column or row of tiles, their sums.
EPI_DEVICE void store_sums(const Sums& sums, const Addresses& a, const Extents& e, const Place& place) {
    __shared__ Real shared[config::threads * config::vector];
#pragma unroll
    for (int r = 0; r < config::reductions; ++r) {
        const Reduction reduction = config::reduction(r);
        if (reduction.over == Over::slow) store_over_slow(reduction.combine, sums.over_slow[r], shared, partials_of(a, e, r), place, e);
        if (reduction.over == Over::both) store_over_both(reduction.combine, sums.over_both[r], shared, partials_of(a, e, r), place, e);
    }
    const int tiles = e.tiles_slow * e.tiles_fast;
    const bool slow = any_over(Over::slow) && is_last(a, place.batch * e.tiles_fast + place.tile_f, e.tiles_slow);
    const bool fast = any_over(Over::fast) && is_last(a, (e.tiles_fast * e.batches) + place.batch * e.tiles_slow + place.tile_s, e.tiles_fast);
    const bool both = any_over(Over::both) && is_last(a, (e.tiles_fast + e.tiles_slow) * e.batches + place.batch, tiles);
#pragma unroll
    for (int r = 0; r < config::reductions; ++r) {
        const Over over = config::reduction(r).over;
        const int lines = slots * e.rows;
        if (over == Over::slow && slow) add_partials(r, a, e, shared, place.batch, e.tiles_slow, e.fast, place.tile_f * tile_fast, tile_fast);
        if (over == Over::fast && fast) add_partials(r, a, e, shared, place.batch, e.tiles_fast, e.slow, place.tile_s * lines, lines);
        if (over == Over::both && both) add_partials(r, a, e, shared, place.batch, tiles, 1, 0, 1);
    }
}

/// Where m or n is 0, sums are of nothing, and are 0.
EPI_DEVICE void store_zeros(const Addresses& a, const Extents& e) {
#pragma unroll
    for (int r = 0; r < config::reductions; ++r) {
        const Over over = config::reduction(r).over;
        const int length = over == Over::slow ? e.fast : over == Over::fast ? e.slow : 1;
        for (epi_i64 i = threadIdx.x; i < static_cast<epi_i64>(length) * e.batches; i += config::threads)
            store_result(r, a, e, static_cast<int>(i / length), static_cast<int>(i % length), Real(0));
    }
}

// ---- the pass ----

/// Computes one line's elements, stores them, and adds up its terms.
EPI_DEVICE void line_of(const Held& line, const Held& all, epi_u8* const* bases, Sums& sums, const Addresses& a, const Extents& e,
                        const Place& place, int row) {
    const int s = place.line(row);
    Out out[config::vector];
#pragma unroll
    for (int v = 0; v < config::vector; ++v) {
        In in;
        element(in, line, all, v);
        const int f = place.first | v;
        epilogue(in, out[v], config::row_major ? s : f, config::row_major ? f : s, place.batch);
    }
#pragma unroll
    for (int t = 0; t < config::targets; ++t) {
        const int tensor = config::sources + t;
        if (config::target(t).along == Along::bits) {
            epi_u32 bits = 0;
#pragma unroll
            for (int v = 0; v < config::vector; ++v) bits |= static_cast<epi_u32>(inside(e, place.first, v) && out[v].bit[t]) << v;
            store_bits(bits, bases[tensor], e.tensors[tensor], e, s, place);
        } else {
            Value values[config::vector];
#pragma unroll
            for (int v = 0; v < config::vector; ++v) values[v] = out[v].value[t];
            store_values(t, values, bases[tensor], e.tensors[tensor], e, s, place.first);
        }
    }
    Real terms[reduction_room][config::vector];
#pragma unroll
    for (int r = 0; r < config::reductions; ++r)
#pragma unroll
        for (int v = 0; v < config::vector; ++v) terms[r][v] = out[v].term[r];
    add_terms(sums, terms, a, e, place, row);
}

EPI_DEVICE void pass(const Addresses& a, const Extents& e) {
    static_assert(config::threads % 32 == 0 && 32 % config::lanes == 0, "a line's lanes lie in one warp");
    static_assert(config::lanes * config::vector >= 8 && tile_fast <= config::threads, "bytes of a mask and sums fit the lanes");
    if (e.slow == 0 || e.fast == 0) return store_zeros(a, e);
    const Place place(e);
    epi_u8* bases[config::sources + config::targets];
#pragma unroll
    for (int i = 0; i < config::sources; ++i) bases[i] = in_batch(a, e, i, epi_bytes(config::source(i).type), place.batch);
#pragma unroll
    for (int i = 0; i < config::targets; ++i)
        bases[config::sources + i] = in_batch(a, e, config::sources + i, epi_bytes(config::target(i).type), place.batch);
    Sums sums;
#pragma unroll
    for (int r = 0; r < config::reductions; ++r) {
        sums.over_both[r] = identity(config::reduction(r).combine);
#pragma unroll
        for (int v = 0; v < config::vector; ++v) sums.over_slow[r][v] = identity(config::reduction(r).combine);
    }
    Held all = {};
    load_sources(all, bases, e, 0, place.first, false);
    Held held[config::ahead + 1] = {};  // the line that is computed, then those that are on their way
#pragma unroll
    for (int i = 0; i < config::ahead; ++i) load_sources(held[i + 1], bases, e, place.line(i), place.first, true);
    for (int row = 0; row < e.rows; ++row) {
#pragma unroll
        for (int i = 0; i < config::ahead; ++i) copy(held[i], held[i + 1]);
        if (row + config::ahead < e.rows) load_sources(held[config::ahead], bases, e, place.line(row + config::ahead), place.first, true);
        line_of(held[0], all, bases, sums, a, e, place, row);
    }
    if (config::reductions > 0) store_sums(sums, a, e, place);
}
