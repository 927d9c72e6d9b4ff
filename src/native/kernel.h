// Kernels of our own: a loaded cubin, and a launch whose argument block is built once and filled in per call.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "abi.h"

namespace epigemm {

// A cubin (or fatbin, or PTX), loaded once a process for all devices and never unloaded.
class KernelLibrary {
public:
    explicit KernelLibrary(const std::string &code);

    abi::Kernel kernel(const std::string &name) const;
    int attribute(const std::string &name, int attribute, int device) const;
    int blocks_per_multiprocessor(const std::string &name, int device, int threads, std::size_t shared_bytes) const;

private:
    abi::Library library_ = nullptr;
};

// What cuTensorMapEncodeTiled takes besides the address. Extents in elements, strides in bytes.
struct TensorMapSpec {
    int type;
    std::vector<std::uint64_t> extents, strides_bytes;  // fastest first; one stride less than extents
    std::vector<std::uint32_t> box, element_strides;
    int interleave, swizzle, l2_promotion, fill;
};

// One kernel parameter, or one field of the struct that is a kernel's only parameter.
struct Slot {
    enum class Kind { kFixed, kValue, kTensorMap, kWorkspace };

    static Slot fixed(std::string bytes) { return {Kind::kFixed, std::move(bytes), 0, 0, {}, 0}; }
    static Slot value(std::size_t index, std::size_t size) { return {Kind::kValue, {}, index, size, {}, 0}; }
    static Slot tensor_map(std::size_t index, TensorMapSpec spec) { return {Kind::kTensorMap, {}, index, sizeof(abi::TensorMap), std::move(spec), 0}; }
    static Slot workspace(std::size_t offset) { return {Kind::kWorkspace, {}, offset, 8, {}, 0}; }

    Kind kind;
    std::string bytes;   // fixed
    std::size_t index;   // which of the call's values; the offset into the workspace
    std::size_t size;    // bytes of what a call brings
    TensorMapSpec spec;  // tensor map
    std::size_t at;      // in a launch with a block: its first byte there
};

struct LaunchShape {
    unsigned grid[3];
    unsigned block[3];
    unsigned cluster[3];
    unsigned shared_bytes;
    bool cooperative;
    bool overlaps_previous;  // programmatic dependent launch: the kernel itself waits for its predecessor
    std::size_t workspace_bytes;
    std::size_t zeroed_bytes;  // leading bytes of the workspace that are set to 0 before the launch
    std::size_t block_bytes;   // of the kernel's only parameter, whose fields the slots are; 0: each slot is a parameter
};

class KernelLaunch {
public:
    KernelLaunch(std::shared_ptr<KernelLibrary> library, const std::string &name, int device, const LaunchShape &shape,
                 std::vector<Slot> slots);

    // values[i] is an address or the bits of a scalar; those of fewer than 8 bytes are the low ones.
    void run(const std::uint64_t *values, std::size_t count, std::uintptr_t stream);

    std::size_t value_count() const { return value_count_; }
    std::size_t workspace_bytes() const { return shape_.workspace_bytes; }
    std::size_t cached_tensor_maps() const;

private:
    struct MapCache {
        std::vector<std::pair<abi::Address, abi::TensorMap>> entries;
        std::size_t next = 0;
    };

    const abi::TensorMap &map_of(std::size_t slot, abi::Address address);
    void fill_block(const std::uint64_t *values, abi::Address workspace);
    void check_block() const;

    std::shared_ptr<KernelLibrary> library_;
    std::string name_;
    int device_;
    LaunchShape shape_;
    std::vector<Slot> slots_;
    abi::Function function_ = nullptr;
    std::size_t value_count_ = 0;
    mutable std::mutex mutex_;
    std::vector<MapCache> maps_;
    std::vector<std::uint64_t> storage_;
    std::vector<void *> parameters_;
    std::string block_;
};

}  // namespace epigemm
