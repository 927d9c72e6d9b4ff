// What of CUDA's binary interface the core uses, declared here so that it builds without any CUDA header.
// Source: the public headers cuda.h and cublasLt.h of CUDA 13.0; tests/unit/test_native_abi.py compares them where they are installed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace epigemm::abi {

// ---------------------------------------------------------------- driver

using Result = int;
using Device = int;
using Address = std::uint64_t;
using Context = void *;
using Stream = void *;
using Event = void *;
using Function = void *;
using Kernel = void *;
using Library = void *;

constexpr int kStreamIsCapturing = 1;         // CU_STREAM_CAPTURE_STATUS_ACTIVE
constexpr int kMaxDynamicSharedBytes = 8;     // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr std::uintptr_t kLegacyStream = 1;   // CU_STREAM_LEGACY, which 0 means too
constexpr std::uintptr_t kPerThreadStream = 2;  // CU_STREAM_PER_THREAD

constexpr unsigned kLaunchCooperative = 2;           // CU_LAUNCH_ATTRIBUTE_COOPERATIVE
constexpr unsigned kLaunchClusterDimension = 4;      // CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
constexpr unsigned kLaunchProgrammaticStream = 6;    // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

struct LaunchAttribute {
    unsigned id;
    unsigned pad;
    union {
        char bytes[64];
        int flag;
        unsigned cluster[3];
    } value;
};
static_assert(sizeof(LaunchAttribute) == 72);

struct LaunchConfig {
    unsigned grid[3];
    unsigned block[3];
    unsigned shared_bytes;
    Stream stream;
    LaunchAttribute *attributes;
    unsigned attribute_count;
};
static_assert(sizeof(LaunchConfig) == 56);

struct alignas(64) TensorMap {
    std::uint64_t opaque[16];
};
static_assert(sizeof(TensorMap) == 128);

// ---------------------------------------------------------------- cuBLASLt

using Status = int;
using LtHandle = void *;
using LtDescriptor = void *;
using LtLayout = void *;
using LtPreference = void *;

struct LtAlgorithm {
    std::uint64_t opaque[8];
};

struct LtHeuristicResult {
    LtAlgorithm algorithm;
    std::size_t workspace_bytes;
    Status state;
    float waves;
    int reserved[4];
};
static_assert(sizeof(LtHeuristicResult) == 96);

constexpr int kLayoutBatchCount = 5;   // CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, int32_t
constexpr int kLayoutBatchStride = 6;  // CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, int64_t
constexpr int kDescriptorBias = 8;     // CUBLASLT_MATMUL_DESC_BIAS_POINTER
constexpr int kDescriptorAux = 11;     // CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER

}  // namespace epigemm::abi
