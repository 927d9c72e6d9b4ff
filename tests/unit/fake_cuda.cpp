// Stands for libcuda and libcublasLt in test_native_launch.py: every call is written to a log, nothing is computed. Addresses count up.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

namespace {

std::mutex mutex;
std::string text;
bool logging = true;
int capturing = 0;
char kept_block[4096];  // the first parameter of the next launch
size_t kept_bytes = 0;
uint64_t next_address = 0x10000;
thread_local void *current = nullptr;

template <class... A>
void log(const char *format, A... values) {
    if (!logging) return;
    char line[512];
    std::snprintf(line, sizeof line, format, values...);
    std::lock_guard lock(mutex);
    text += line;
    text += '\n';
}

unsigned long long number(const void *p) { return reinterpret_cast<uintptr_t>(p); }

struct Descriptor {
    std::map<int, uint64_t> values;
};

}  // namespace

extern "C" {

const char *fake_log() { return text.c_str(); }
void fake_clear() { text.clear(); }
void fake_logging(int on) { logging = on != 0; }
void fake_capture(int on) { capturing = on; }
const char *fake_keep(size_t bytes) { kept_bytes = bytes; return kept_block; }

// ---- driver
int cuInit(unsigned) { return 0; }
int cuGetErrorName(int code, const char **name) { *name = code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_UNKNOWN"; return 0; }
int cuGetErrorString(int, const char **name) { *name = "made up"; return 0; }
int cuDriverGetVersion(int *v) { *v = 13000; return 0; }
int cuDeviceGetCount(int *n) { *n = 2; return 0; }
int cuDeviceGet(int *d, int i) { *d = i; return i < 2 ? 0 : 101; }
int cuDeviceGetName(char *name, int size, int) { std::snprintf(name, size, "made up"); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int) { *value = attribute == 16 ? 132 : attribute == 75 ? 9 : 0; return 0; }
int cuEventCreate(void **event, unsigned) { *event = reinterpret_cast<void *>(3); return 0; }
int cuEventDestroy_v2(void *) { return 0; }
int cuEventRecord(void *, void *) { return 0; }
int cuEventSynchronize(void *) { return 0; }
int cuEventElapsedTime(float *ms, void *, void *) { *ms = 1; return 0; }
int cuEventElapsedTime_v2(float *ms, void *, void *) { *ms = 1; return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int) { *bytes = size_t(1) << 30; return 0; }
int cuStreamSynchronize(void *stream) { log("wait for %llx", number(stream)); return 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = reinterpret_cast<void *>(uintptr_t(0xC0 + d)); log("retain %d", d); return 0; }
int cuCtxGetCurrent(void **c) { *c = current; return 0; }
int cuCtxPushCurrent_v2(void *c) { current = c; log("push %llx", number(c)); return 0; }
int cuCtxPopCurrent_v2(void **c) { *c = current; current = nullptr; log("pop"); return 0; }
int cuCtxSynchronize() { log("synchronize"); return 0; }
int cuStreamIsCapturing(void *, int *status) { *status = capturing; return 0; }
int cuStreamGetId(void *stream, unsigned long long *id) { *id = number(stream) / 16; return 0; }
int cuMemAllocAsync(uint64_t *address, size_t bytes, void *stream) {
    if (bytes > (size_t(1) << 40)) return 2;
    *address = next_address;
    next_address += (bytes + 0xffff) / 0x10000 * 0x10000;
    log("alloc %zu on %llx", bytes, number(stream));
    return 0;
}
int cuMemFreeAsync(uint64_t, void *stream) { log("free on %llx", number(stream)); return 0; }
int cuMemFree_v2(uint64_t) { log("free now"); return 0; }
int cuMemsetD8Async(uint64_t address, unsigned char value, size_t bytes, void *stream) {
    log("fill %llx with %d, %zu bytes on %llx", static_cast<unsigned long long>(address), value, bytes, number(stream));
    return 0;
}
int cuLibraryLoadData(void **library, const void *code, void *, void *, unsigned, void *, void *, unsigned) {
    log("load %s", static_cast<const char *>(code));
    *library = reinterpret_cast<void *>(7);
    return 0;
}
int cuLibraryGetKernel(void **kernel, void *, const char *name) { *kernel = reinterpret_cast<void *>(8); return std::strcmp(name, "absent") == 0 ? 500 : 0; }
int cuKernelGetFunction(void **function, void *) { *function = reinterpret_cast<void *>(9); return 0; }
int cuKernelSetAttribute(int attribute, int value, void *, int device) { log("attribute %d = %d on device %d", attribute, value, device); return 0; }
// The map holds, as 64-bit words: address, type, swizzle, L2 promotion, then extents, strides and box.
int cuTensorMapEncodeTiled(void *map, int type, unsigned rank, uint64_t address, const uint64_t *extents, const uint64_t *strides, const unsigned *box,
                           const unsigned *, int, int swizzle, int promotion, int) {
    log("map of %llx, type %d, rank %u", static_cast<unsigned long long>(address), type, rank);
    uint64_t words[16] = {address, uint64_t(type), uint64_t(swizzle), uint64_t(promotion)};
    for (unsigned i = 0; i < rank; ++i) words[4 + i] = extents[i], words[3 + 2 * rank + i] = box[i];
    for (unsigned i = 0; i + 1 < rank; ++i) words[4 + rank + i] = strides[i];
    std::memcpy(map, words, 128);
    return 0;
}
struct Config {
    unsigned grid[3], block[3], shared;
    void *stream;
    struct { unsigned id, pad, value[16]; } *attributes;
    unsigned count;
};
int cuLaunchKernelEx(const Config *c, void *, void **parameters, void **) {
    log("launch grid %u block %u shared %u on %llx", c->grid[0], c->block[0], c->shared, number(c->stream));
    for (unsigned i = 0; i < c->count; ++i) log("  with %u: %u %u %u", c->attributes[i].id, c->attributes[i].value[0], c->attributes[i].value[1], c->attributes[i].value[2]);
    uint64_t first = 0;
    std::memcpy(&first, parameters[0], 8);
    log("  first parameter %llx", static_cast<unsigned long long>(first));
    if (kept_bytes > 0) std::memcpy(kept_block, parameters[0], kept_bytes);
    kept_bytes = 0;
    return 0;
}

// ---- cuBLASLt
size_t cublasLtGetVersion() { return 130100; }
int cublasLtCreate(void **handle) { *handle = reinterpret_cast<void *>(0x4A); log("handle"); return 0; }
int cublasLtMatmulDescCreate(void **d, int, int) { *d = new Descriptor; return 0; }
int cublasLtMatmulDescDestroy(void *d) { delete static_cast<Descriptor *>(d); return 0; }
int cublasLtMatmulDescSetAttribute(void *d, int number, const void *value, size_t size) {
    uint64_t held = 0;
    std::memcpy(&held, value, size);
    static_cast<Descriptor *>(d)->values[number] = held;
    return number == 99 ? 7 : 0;
}
int cublasLtMatmulDescGetAttribute(void *, int, void *, size_t, size_t *) { return 15; }
int cublasLtMatrixLayoutCreate(void **l, int, uint64_t, uint64_t, int64_t) { *l = reinterpret_cast<void *>(5); return 0; }
int cublasLtMatrixLayoutDestroy(void *) { return 0; }
int cublasLtMatrixLayoutSetAttribute(void *, int, const void *, size_t) { return 0; }
int cublasLtMatrixLayoutGetAttribute(void *, int, void *, size_t, size_t *) { return 15; }
int cublasLtMatmulPreferenceCreate(void **p) { *p = reinterpret_cast<void *>(6); return 0; }
int cublasLtMatmulPreferenceDestroy(void *) { return 0; }
int cublasLtMatmulPreferenceSetAttribute(void *, int number, const void *value, size_t size) {
    uint64_t held = 0;
    std::memcpy(&held, value, size);
    log("preference %d = %llx", number, static_cast<unsigned long long>(held));
    return 0;
}
struct Result {
    uint64_t algorithm[8];
    size_t workspace_bytes;
    int state;
    float waves;
    int reserved[4];
};
int cublasLtMatmulAlgoGetHeuristic(void *, void *, void *, void *, void *, void *, void *, int limit, Result *results, int *found) {
    log("heuristic for %d", limit);
    results[0] = Result{{42}, 4096, 0, 0.5F, {}};
    *found = 1;
    return 0;
}
int cublasLtMatmulAlgoGetIds(void *, int, int, int, int, int, int, int, int *ids, int *found) { ids[0] = 42; *found = 1; return 0; }
int cublasLtMatmulAlgoInit(void *, int, int, int, int, int, int, int, uint64_t *algorithm) { algorithm[0] = 42; return 0; }
int cublasLtMatmulAlgoCheck(void *, void *, void *, void *, void *, void *, const uint64_t *algorithm, Result *result) {
    if (algorithm[0] != 42) return 7;
    *result = Result{{42}, 4096, 0, 0.5F, {}};
    return 0;
}
int cublasLtMatmulAlgoConfigGetAttribute(const uint64_t *algorithm, int attribute, void *value, size_t size, size_t *written) {
    const uint64_t held = attribute == 0 ? algorithm[0] : 0;
    std::memcpy(value, &held, size);
    *written = size;
    return 0;
}
int cublasLtMatmulAlgoConfigSetAttribute(uint64_t *algorithm, int, const void *, size_t) { algorithm[0] = 13; return 0; }
int cublasLtMatmulAlgoCapGetAttribute(const void *, int, void *, size_t, size_t *) { return 15; }
int cublasLtMatmul(void *handle, void *d, const void *alpha, uint64_t a, void *, uint64_t b, void *, const void *beta, uint64_t c, void *, uint64_t out, void *,
                   const void *, uint64_t workspace, size_t workspace_bytes, void *stream) {
    if (!logging) return 0;
    if (number(handle) != 0x4A) log("handle %llx", number(handle));
    if (workspace != 0 && workspace < 0x1000) log("workspace %llx", static_cast<unsigned long long>(workspace));
    float scalars[2];
    std::memcpy(&scalars[0], alpha, 4);
    std::memcpy(&scalars[1], beta, 4);
    auto &values = static_cast<Descriptor *>(d)->values;
    using U = unsigned long long;
    log("matmul a=%llx b=%llx c=%llx d=%llx bias=%llx aux=%llx alpha=%g beta=%g workspace=%s %zu on %llx", U(a), U(b), U(c), U(out), U(values[8]), U(values[11]),
        double(scalars[0]), double(scalars[1]), workspace != 0 ? "yes" : "no", workspace_bytes, number(stream));
    return out == 0xBAD ? 13 : 0;
}
}
