// libcublasLt: descriptors, heuristics, and a launch per plan whose call does only what changes.
#pragma once

#include <array>
#include <complex>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "abi.h"
#include "shared_library.h"

namespace epigemm {

// name in this code, symbol in the library, parameters
#define EPIGEMM_CUBLASLT_FUNCTIONS(X)                                                                                              \
    X(create, cublasLtCreate, (abi::LtHandle *))                                                                                   \
    X(desc_create, cublasLtMatmulDescCreate, (abi::LtDescriptor *, int, int))                                                      \
    X(desc_destroy, cublasLtMatmulDescDestroy, (abi::LtDescriptor))                                                                \
    X(desc_set, cublasLtMatmulDescSetAttribute, (abi::LtDescriptor, int, const void *, std::size_t))                               \
    X(desc_get, cublasLtMatmulDescGetAttribute, (abi::LtDescriptor, int, void *, std::size_t, std::size_t *))                      \
    X(layout_create, cublasLtMatrixLayoutCreate, (abi::LtLayout *, int, std::uint64_t, std::uint64_t, std::int64_t))               \
    X(layout_destroy, cublasLtMatrixLayoutDestroy, (abi::LtLayout))                                                                \
    X(layout_set, cublasLtMatrixLayoutSetAttribute, (abi::LtLayout, int, const void *, std::size_t))                               \
    X(layout_get, cublasLtMatrixLayoutGetAttribute, (abi::LtLayout, int, void *, std::size_t, std::size_t *))                      \
    X(preference_create, cublasLtMatmulPreferenceCreate, (abi::LtPreference *))                                                    \
    X(preference_destroy, cublasLtMatmulPreferenceDestroy, (abi::LtPreference))                                                    \
    X(preference_set, cublasLtMatmulPreferenceSetAttribute, (abi::LtPreference, int, const void *, std::size_t))                   \
    X(heuristic, cublasLtMatmulAlgoGetHeuristic,                                                                                   \
      (abi::LtHandle, abi::LtDescriptor, abi::LtLayout, abi::LtLayout, abi::LtLayout, abi::LtLayout, abi::LtPreference, int,       \
       abi::LtHeuristicResult *, int *))                                                                                           \
    X(algorithm_ids, cublasLtMatmulAlgoGetIds, (abi::LtHandle, int, int, int, int, int, int, int, int *, int *))                   \
    X(algorithm_init, cublasLtMatmulAlgoInit, (abi::LtHandle, int, int, int, int, int, int, int, abi::LtAlgorithm *))              \
    X(algorithm_check, cublasLtMatmulAlgoCheck,                                                                                    \
      (abi::LtHandle, abi::LtDescriptor, abi::LtLayout, abi::LtLayout, abi::LtLayout, abi::LtLayout, const abi::LtAlgorithm *,     \
       abi::LtHeuristicResult *))                                                                                                  \
    X(capability, cublasLtMatmulAlgoCapGetAttribute, (const abi::LtAlgorithm *, int, void *, std::size_t, std::size_t *))          \
    X(config_get, cublasLtMatmulAlgoConfigGetAttribute, (const abi::LtAlgorithm *, int, void *, std::size_t, std::size_t *))       \
    X(config_set, cublasLtMatmulAlgoConfigSetAttribute, (abi::LtAlgorithm *, int, const void *, std::size_t))                      \
    X(matmul, cublasLtMatmul,                                                                                                      \
      (abi::LtHandle, abi::LtDescriptor, const void *, abi::Address, abi::LtLayout, abi::Address, abi::LtLayout, const void *,     \
       abi::Address, abi::LtLayout, abi::Address, abi::LtLayout, const abi::LtAlgorithm *, abi::Address, std::size_t, abi::Stream))

class CublasLt {
public:
    explicit CublasLt(const std::string &path);

#define X(name, symbol, parameters) abi::Status(*name) parameters = nullptr;
    EPIGEMM_CUBLASLT_FUNCTIONS(X)
#undef X
    std::size_t (*version)() = nullptr;

    const std::string &path() const { return library_.path(); }

    static void open(const std::string &path);
    static const CublasLt *opened();
    static const CublasLt &get();

private:
    SharedLibrary library_;
};

void check_status(abi::Status status, const char *symbol, const std::string &detail = "");

// The process's handle of a device, made when first asked for and kept.
abi::LtHandle handle_of(int device);

using Bytes = std::string;
using Attributes = std::vector<std::pair<int, Bytes>>;  // (number, value as it lies in memory)
using Pointers = std::vector<std::pair<int, abi::Address>>;

struct LayoutSpec {
    int type;
    std::uint64_t rows, columns;
    std::int64_t leading_dimension;
    int batch_count;
    std::int64_t batch_stride;
};

struct Heuristic {
    Bytes algorithm;
    std::size_t workspace_bytes;
    int state;
    float waves;
};

// alpha and beta as they lie in memory in the scale type.
class Scalars {
public:
    Scalars(int scale_type, std::complex<double> alpha, std::complex<double> beta);

    const void *alpha() const { return alpha_.data(); }
    const void *beta() const { return beta_.data(); }

private:
    alignas(16) std::array<char, 16> alpha_{}, beta_{};
};

// A descriptor and the four layouts, owned. The descriptor's pointers change from call to call, under the mutex.
class LtMatmul {
public:
    LtMatmul(int compute_type, int scale_type, const Attributes &attributes, const std::array<LayoutSpec, 4> &layouts);
    ~LtMatmul();
    LtMatmul(const LtMatmul &) = delete;
    LtMatmul &operator=(const LtMatmul &) = delete;

    std::vector<Heuristic> heuristic(int device, abi::LtHandle handle, const Attributes &preference, int limit, const Pointers &pointers);
    Heuristic check(int device, abi::LtHandle handle, const Bytes &algorithm);
    // An attribute as it is set: for tests.
    Bytes attribute(int number, std::size_t size) const;
    Bytes layout_attribute(int which, int number, std::size_t size) const;
    void set_pointer(int attribute, abi::Address address);

private:
    friend class LtLaunch;

    void destroy();

    std::mutex mutex_;
    abi::LtDescriptor descriptor_ = nullptr;
    std::array<abi::LtLayout, 4> layouts_{};
};

// A planned product: run() changes pointers and calls cublasLtMatmul. Any thread may call it, on any stream of its device.
class LtLaunch {
public:
    // `scalars` are alpha and beta where a call gives none. `swapped`: the product is of the transposes, so the library's A is the
    // caller's B. `c_is_d`: where a call gives no C, D's address stands for it; else null does (C's layout is not D's).
    // `zeroed_aux_bytes`: of the auxiliary output, set to 0 before each launch: the library leaves its padding as it was.
    LtLaunch(std::shared_ptr<LtMatmul> matmul, int device, const Bytes &algorithm, std::size_t workspace_bytes, const Scalars &scalars,
             bool swapped, bool c_is_d, bool has_bias, bool has_aux, std::size_t zeroed_aux_bytes, std::uint64_t handle,
             std::string what);

    // c = 0 is no C: beta must be 0 then. bias and aux are ignored where the epilogue has none.
    void run(abi::Address a, abi::Address b, abi::Address c, abi::Address d, abi::Address bias, abi::Address aux, std::uintptr_t stream,
             const Scalars *scalars, abi::Address workspace);
    // With all pointers of the descriptor (bias, aux, scales, amax) as (attribute, address).
    void run_with(const Pointers &pointers, abi::Address a, abi::Address b, abi::Address c, abi::Address d, std::uintptr_t stream,
                  const Scalars *scalars, abi::Address workspace);

    std::size_t workspace_bytes() const { return workspace_bytes_; }
    int device() const { return device_; }

private:
    void zero_aux(abi::Address aux, std::uintptr_t stream) const;
    void launch(abi::Address a, abi::Address b, abi::Address c, abi::Address d, std::uintptr_t stream, const Scalars *scalars,
                abi::Address workspace);

    std::shared_ptr<LtMatmul> matmul_;
    int device_;
    abi::LtAlgorithm algorithm_;
    std::size_t workspace_bytes_;
    Scalars scalars_;
    bool swapped_, c_is_d_, has_bias_, has_aux_;
    std::size_t zeroed_aux_bytes_;
    abi::LtHandle handle_;
    std::string what_;
};

abi::LtAlgorithm algorithm_of(const Bytes &bytes);
Bytes bytes_of(const abi::LtAlgorithm &algorithm);

}  // namespace epigemm
