// The floor of the host time of a call: a C loop over cublasLtMatmul, m = n = k = 64, fp16, RELU_BIAS, everything prepared.
// Built by host_time.py; opens cuBLASLt by path, so that no CUDA header is needed.
#include <dlfcn.h>
#include <time.h>

#include <cstdint>
#include <cstring>

namespace {

struct Result {
    uint64_t algorithm[8];
    size_t workspace_bytes;
    int state;
    float waves;
    int reserved[4];
};

double seconds() {
    timespec t{};
    clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

template <class F>
F *symbol(void *library, const char *name) {
    return reinterpret_cast<F *>(dlsym(library, name));
}

using Create = int(void **);
using DescCreate = int(void **, int, int);
using Set = int(void *, int, const void *, size_t);
using LayoutCreate = int(void **, int, uint64_t, uint64_t, int64_t);
using Heuristic = int(void *, void *, void *, void *, void *, void *, void *, int, Result *, int *);
using Matmul = int(void *, void *, const void *, const void *, void *, const void *, void *, const void *, const void *, void *, void *, void *,
                   const void *, void *, size_t, void *);

struct Prepared {
    void *handle, *descriptor, *layout;
    Result result;
    Matmul *matmul;
};

}  // namespace

// Null on failure.
extern "C" void *prepare(const char *path, void *bias) {
    void *library = dlopen(path, RTLD_NOW);
    if (library == nullptr) return nullptr;
    auto *p = new Prepared{};
    p->matmul = symbol<Matmul>(library, "cublasLtMatmul");
    const int transposed = 1, relu_bias = 6;
    void *preference = nullptr;
    int found = 0, bad = symbol<Create>(library, "cublasLtCreate")(&p->handle);
    bad |= symbol<DescCreate>(library, "cublasLtMatmulDescCreate")(&p->descriptor, 68, 0);
    auto *set = symbol<Set>(library, "cublasLtMatmulDescSetAttribute");
    bad |= set(p->descriptor, 3, &transposed, sizeof transposed);
    bad |= set(p->descriptor, 4, &transposed, sizeof transposed);
    bad |= set(p->descriptor, 7, &relu_bias, sizeof relu_bias);
    bad |= set(p->descriptor, 8, &bias, sizeof bias);
    bad |= symbol<LayoutCreate>(library, "cublasLtMatrixLayoutCreate")(&p->layout, 2, 64, 64, 64);
    bad |= symbol<Create>(library, "cublasLtMatmulPreferenceCreate")(&preference);
    bad |= symbol<Heuristic>(library, "cublasLtMatmulAlgoGetHeuristic")(p->handle, p->descriptor, p->layout, p->layout, p->layout, p->layout,
                                                                         preference, 1, &p->result, &found);
    return bad == 0 && found == 1 ? p : nullptr;
}

// Seconds of `count` calls, negative on failure.
extern "C" double loop(void *prepared, const void *a, const void *b, void *d, void *stream, int count) {
    auto *p = static_cast<Prepared *>(prepared);
    const float alpha = 1, beta = 0;
    int bad = 0;
    const double start = seconds();
    for (int i = 0; i < count; ++i)
        bad |= p->matmul(p->handle, p->descriptor, &alpha, a, p->layout, b, p->layout, &beta, d, p->layout, d, p->layout, p->result.algorithm,
                         nullptr, 0, stream);
    return bad == 0 ? seconds() - start : -1.0;
}
