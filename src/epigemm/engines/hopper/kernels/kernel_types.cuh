// What a kernel is told (Params), what an epilogue sees of one element (Inputs, Outputs), and where everything lies in shared
// memory (Shared). `config::` is the generated header; see ../source.py.

/// The only argument of the kernel. Its layout is fixed, whatever the configuration, and is mirrored by ../launch.py.
struct Params {
    TensorMap a;             // [m, k], 16-bit, either dimension contiguous
    TensorMap b[2];          // [k, n] each; the second only with two weights
    TensorMap tiles_in[4];   // [m, n] epilogue inputs: residual, pre-activation, C
    TensorMap tiles_out[4];  // [m, n] outputs; the first is D
    const void* along_n[8];  // vectors of n values, (1, n)
    const void* along_m[8];  // vectors of m values, (m, 1)
    const u8* bits_in[2];    // packed masks: bit j % 8 of byte j / 8 of row i is element (i, j)
    u8* bits_out[2];
    float* sums_m[4];  // partial sums over m, a row for each warp: [4 ceil(m / rows of a warpgroup's tile), n]
    float* sums_n[4];  // partial sums over n: [ceil(n / columns of a tile), m]
    u64 bits_in_stride[2];  // bytes from a row to the next, a multiple of 16
    u64 bits_out_stride[2];
    u64 policy_a, policy_b;      // L2 cache policies (createpolicy's words): operands,
    u64 policy_in, policy_out;   // epilogue inputs, outputs
    float scalars[8];
    int m, n, k;
    int tiles_m, tiles_n;  // tiles below each other (pairs of them with clusters of two) and side by side
    int steps;             // stages of k: ceil(k / 64)
    int group;             // rows of tiles that are walked together, for L2
};

/// One element as the epilogue sees it. Unused arrays have one member, which nothing reads.
struct Inputs {
    float acc[config::weights];
    float along_n[config::along_n > 0 ? config::along_n : 1];
    float along_m[config::along_m > 0 ? config::along_m : 1];
    float tile[config::tiles_in > 0 ? config::tiles_in : 1];
    bool bit[config::bits_in > 0 ? config::bits_in : 1];
    const float* scalar;
    int row, col;
};

struct Outputs {
    float tile[config::tiles_out];
    bool bit[config::bits_out > 0 ? config::bits_out : 1];
    float sum_m[config::sums_m > 0 ? config::sums_m : 1];
    float sum_n[config::sums_n > 0 ? config::sums_n : 1];
};

/// The epilogue itself: generated text, from float32 to float32.
DEVICE void epilogue(const Inputs& in, Outputs& out);

/// Element types are packed four bits each, so that a constant index folds to a constant.
DEVICE constexpr Type type_at(u32 types, int index) { return static_cast<Type>((types >> (4 * index)) & 15); }

namespace shape {
constexpr int tile_k = 64;  // 128 bytes: one row of the 128-byte swizzle
constexpr int out_n = config::tile_n / config::weights;              // columns of D that a tile covers
constexpr int group_m = config::pingpong ? config::tile_m : config::tile_m / 2;  // rows that a consumer warpgroup covers
constexpr int halves = group_m / 64;                                 // of which one wgmma takes 64
constexpr int boxes = out_n / config::box_n;                         // epilogue sub-tiles side by side
constexpr int entries = boxes * halves * config::tiles_in;           // ring entries a warpgroup reads per tile
constexpr int row_bytes = config::box_n * 2;
constexpr int parts = boxes * halves;                                // sub-tiles of 64 rows a warpgroup finishes per tile
}  // namespace shape

static_assert(config::tile_m % 64 == 0 && shape::group_m % 64 == 0, "a warpgroup takes rows by 64");
static_assert(shape::out_n % config::box_n == 0, "sub-tiles cover the tile");
static_assert(shape::parts % config::store_sets == 0, "each tile begins with the first set");
static_assert(config::tiles_in == 0 || config::ring_slots >= 2 * config::tiles_in, "one sub-tile is fetched while the last is read");
static_assert(config::box_n == 64 || config::box_n == 32, "a sub-tile's row is one row of a swizzle");

/// Byte offsets into the block's shared memory. Boxes come first: the swizzle wants them on multiples of 1024.
namespace shared {
constexpr int a_bytes = config::tile_m * shape::tile_k * 2;
constexpr int b_bytes = config::tile_n * shape::tile_k * 2;
constexpr int stage_bytes = a_bytes + b_bytes;
constexpr int slot_bytes = 64 * shape::row_bytes;  // a ring entry: 64 rows, one wgmma's
constexpr int box_bytes = 16 * shape::row_bytes;   // a staged store: 16 rows, one warp's
constexpr int set_bytes = box_bytes * config::tiles_out;

constexpr int ring = config::stages * stage_bytes;
constexpr int staging = ring + 2 * config::ring_slots * slot_bytes;
constexpr int vectors = staging + 8 * config::store_sets * set_bytes;
constexpr int bits_copy = shape::out_n % 64 == 0 ? 8 : 4;  // as aligned as a tile's first column
constexpr int bits_row = (shape::out_n / 8 + 7) / 8 * 8;  // bytes of a mask's row in this tile
constexpr int bits = vectors + 2 * config::along_n * shape::out_n * 4;
constexpr int barriers = bits + 2 * config::bits_in * shape::group_m * bits_row;

constexpr int full = barriers;
constexpr int empty = full + 8 * config::stages;
constexpr int ring_full = empty + 8 * config::stages;
constexpr int ring_empty = ring_full + 16 * config::ring_slots;
constexpr int order = ring_empty + 16 * config::ring_slots;
constexpr int bytes = order + 16;
}  // namespace shared

static_assert(shared::bytes == config::shared_bytes, "the host asks for exactly what is used");
static_assert(shared::bytes <= 232448, "227 KiB a block");

/// A tile of D, by its first row and column.
struct Tile {
    int m, n;
};

/// The tiles of this block, in an order that keeps what runs at one time close together: `group` rows of tiles by all columns.
struct Schedule {
    const Params& p;

    /// False where this block has no `sequence`-th tile.
    DEVICE bool at(int sequence, Tile& tile) const {
        const int index = blockIdx.x / config::cluster + sequence * (gridDim.x / config::cluster);
        const int width = p.group * p.tiles_n;
        const int first = index / width * p.group;
        const int rows = min(p.group, p.tiles_m - first);
        const int within = index % width;
        tile.m = ((first + within % rows) * config::cluster + cluster_index()) * config::tile_m;
        tile.n = within / rows * shape::out_n;
        return index < p.tiles_m * p.tiles_n;
    }

    DEVICE static int cluster_index() { return config::cluster > 1 ? cluster_rank() : 0; }
};

/// A place in the pipeline of operand stages: which stage, and the parity of its current phase.
struct Place {
    int stage;
    u32 parity;

    DEVICE explicit Place(u32 step) : stage(step % config::stages), parity(step / config::stages & 1) {}

    DEVICE void advance() {
        if (++stage == config::stages) {
            stage = 0;
            parity ^= 1;
        }
    }
};
