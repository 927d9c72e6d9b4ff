#include "kernel.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <unordered_map>

#include "driver.h"
#include "workspace.h"

namespace epigemm {

namespace {

constexpr std::size_t kCachedMaps = 64;  // addresses a slot remembers: allocators hand out few for one shape
constexpr unsigned kStaticSharedLimit = 48 * 1024;

abi::Device device_handle(int device) {
    abi::Device handle = 0;
    EPIGEMM_DRIVER(device_get, "cuDeviceGet", &handle, device);
    return handle;
}

abi::Function function_of(abi::Kernel kernel, const std::string &name) {
    abi::Function function = nullptr;
    driver_call(&Driver::kernel_function, "cuKernelGetFunction", name, &function, kernel);
    return function;
}

}  // namespace

namespace {

// Loaded code by its bytes, for the life of the process. It is never unloaded: a CUDA graph may launch a kernel long after the plan
// that it was captured from is gone (unloading crashed the replay on an H200, 2026-12-01).
abi::Library loaded(const std::string &code) {
    static std::mutex lock;
    static auto *const libraries = new std::unordered_map<std::string, abi::Library>;
    const std::lock_guard<std::mutex> guard(lock);
    const auto found = libraries->find(code);
    if (found != libraries->end()) return found->second;
    abi::Library library = nullptr;
    // Without CU_LIBRARY_BINARY_IS_PRESERVED the driver keeps a copy: `code` may go.
    driver_call(&Driver::library_load, "cuLibraryLoadData", std::to_string(code.size()) + " bytes of compiled code", &library,
                static_cast<const void *>(code.data()), static_cast<void *>(nullptr), static_cast<void *>(nullptr), 0U,
                static_cast<void *>(nullptr), static_cast<void *>(nullptr), 0U);
    libraries->emplace(code, library);
    return library;
}

}  // namespace

KernelLibrary::KernelLibrary(const std::string &code) : library_(loaded(code)) {}

abi::Kernel KernelLibrary::kernel(const std::string &name) const {
    abi::Kernel kernel = nullptr;
    driver_call(&Driver::library_kernel, "cuLibraryGetKernel", name, &kernel, library_, name.c_str());
    return kernel;
}

int KernelLibrary::attribute(const std::string &name, int attribute, int device) const {
    int value = 0;
    driver_call(&Driver::kernel_get, "cuKernelGetAttribute", name, &value, attribute, kernel(name), device_handle(device));
    return value;
}

int KernelLibrary::blocks_per_multiprocessor(const std::string &name, int device, int threads, std::size_t shared_bytes) const {
    ContextGuard guard(device);
    const abi::Kernel found = kernel(name);
    if (shared_bytes > kStaticSharedLimit)
        driver_call(&Driver::kernel_set, "cuKernelSetAttribute", name, abi::kMaxDynamicSharedBytes, static_cast<int>(shared_bytes), found,
                    device_handle(device));
    int blocks = 0;
    driver_call(&Driver::occupancy, "cuOccupancyMaxActiveBlocksPerMultiprocessor", name, &blocks, function_of(found, name), threads,
                shared_bytes);
    return blocks;
}

KernelLaunch::KernelLaunch(std::shared_ptr<KernelLibrary> library, const std::string &name, int device, const LaunchShape &shape,
                           std::vector<Slot> slots)
    : library_(std::move(library)), name_(name), device_(device), shape_(shape), slots_(std::move(slots)), maps_(slots_.size()) {
    ContextGuard guard(device);
    const abi::Kernel kernel = library_->kernel(name);
    if (shape_.shared_bytes > kStaticSharedLimit)
        driver_call(&Driver::kernel_set, "cuKernelSetAttribute", name + " with " + std::to_string(shape_.shared_bytes) + " bytes of shared memory",
                    abi::kMaxDynamicSharedBytes, static_cast<int>(shape_.shared_bytes), kernel, device_handle(device));
    function_ = function_of(kernel, name);
    if (shape_.zeroed_bytes > shape_.workspace_bytes) throw std::invalid_argument("zeroed_bytes exceeds workspace_bytes");
    storage_.resize(slots_.size());
    block_.assign(shape_.block_bytes, '\0');
    if (!block_.empty()) check_block();
    for (std::size_t i = 0; i < slots_.size(); ++i) {
        Slot &slot = slots_[i];
        const bool from_call = slot.kind == Slot::Kind::kValue || slot.kind == Slot::Kind::kTensorMap;
        if (from_call) value_count_ = std::max(value_count_, slot.index + 1);
        if (slot.kind == Slot::Kind::kValue && (slot.size == 0 || slot.size > 8)) throw std::invalid_argument("a value has 1 to 8 bytes");
        if (!block_.empty() && slot.kind == Slot::Kind::kFixed) std::copy(slot.bytes.begin(), slot.bytes.end(), block_.begin() + slot.at);
        parameters_.push_back(slot.kind == Slot::Kind::kFixed ? static_cast<void *>(slot.bytes.data()) : static_cast<void *>(&storage_[i]));
    }
    if (!block_.empty()) parameters_ = {block_.data()};
}

void KernelLaunch::check_block() const {
    for (const Slot &slot : slots_) {
        const std::size_t size = slot.kind == Slot::Kind::kFixed ? slot.bytes.size() : slot.size;
        if (slot.at + size > shape_.block_bytes)
            throw std::invalid_argument(name_ + ": a field of " + std::to_string(size) + " bytes at " + std::to_string(slot.at) +
                                        " lies outside its block of " + std::to_string(shape_.block_bytes));
    }
}

void KernelLaunch::fill_block(const std::uint64_t *values, abi::Address workspace) {
    for (std::size_t i = 0; i < slots_.size(); ++i) {
        const Slot &slot = slots_[i];
        char *const to = block_.data() + slot.at;
        if (slot.kind == Slot::Kind::kValue) std::memcpy(to, &values[slot.index], slot.size);
        if (slot.kind == Slot::Kind::kTensorMap) std::memcpy(to, &map_of(i, values[slot.index]), slot.size);
        if (slot.kind == Slot::Kind::kWorkspace) {
            const abi::Address address = workspace + slot.index;
            std::memcpy(to, &address, slot.size);
        }
    }
}

const abi::TensorMap &KernelLaunch::map_of(std::size_t index, abi::Address address) {
    MapCache &cache = maps_[index];
    for (const auto &entry : cache.entries)
        if (entry.first == address) return entry.second;
    const TensorMapSpec &spec = slots_[index].spec;
    abi::TensorMap map;
    driver_call(&Driver::tensor_map, "cuTensorMapEncodeTiled", name_ + ", parameter " + std::to_string(index), &map, spec.type,
                static_cast<std::uint32_t>(spec.extents.size()), address, spec.extents.data(), spec.strides_bytes.data(), spec.box.data(),
                spec.element_strides.data(), spec.interleave, spec.swizzle, spec.l2_promotion, spec.fill);
    if (cache.entries.size() < kCachedMaps) {
        cache.entries.reserve(kCachedMaps);
        cache.entries.emplace_back(address, map);
        return cache.entries.back().second;
    }
    auto &replaced = cache.entries[cache.next++ % kCachedMaps];
    replaced = {address, map};
    return replaced.second;
}

std::size_t KernelLaunch::cached_tensor_maps() const {
    std::lock_guard lock(mutex_);
    std::size_t count = 0;
    for (const MapCache &cache : maps_) count += cache.entries.size();
    return count;
}

void KernelLaunch::run(const std::uint64_t *values, std::size_t count, std::uintptr_t stream) {
    if (count != value_count_)
        throw std::invalid_argument(name_ + " takes " + std::to_string(value_count_) + " values, not " + std::to_string(count));
    ContextGuard guard(device_);
    std::lock_guard lock(mutex_);  // the driver has copied the parameters when the launch returns
    const auto cuda_stream = reinterpret_cast<abi::Stream>(stream);
    const WorkspaceLease lease(device_, cuda_stream, shape_.workspace_bytes);
    if (shape_.zeroed_bytes > 0)
        driver_call(&Driver::fill, "cuMemsetD8Async", name_, lease.address(), static_cast<unsigned char>(0), shape_.zeroed_bytes, cuda_stream);
    if (!block_.empty()) fill_block(values, lease.address());
    for (std::size_t i = 0; block_.empty() && i < slots_.size(); ++i) {
        const Slot &slot = slots_[i];
        if (slot.kind == Slot::Kind::kValue) storage_[i] = values[slot.index];
        if (slot.kind == Slot::Kind::kWorkspace) storage_[i] = lease.address() + slot.index;
        if (slot.kind == Slot::Kind::kTensorMap) parameters_[i] = const_cast<abi::TensorMap *>(&map_of(i, values[slot.index]));
    }
    abi::LaunchAttribute attributes[3] = {};
    unsigned used = 0;
    const unsigned(&cluster)[3] = shape_.cluster;
    if (cluster[0] * cluster[1] * cluster[2] > 1) {
        attributes[used].id = abi::kLaunchClusterDimension;
        std::copy(std::begin(cluster), std::end(cluster), attributes[used++].value.cluster);
    }
    if (shape_.cooperative) {
        attributes[used].id = abi::kLaunchCooperative;
        attributes[used++].value.flag = 1;
    }
    if (shape_.overlaps_previous) {
        attributes[used].id = abi::kLaunchProgrammaticStream;
        attributes[used++].value.flag = 1;
    }
    abi::LaunchConfig config{};
    std::copy(std::begin(shape_.grid), std::end(shape_.grid), config.grid);
    std::copy(std::begin(shape_.block), std::end(shape_.block), config.block);
    config.shared_bytes = shape_.shared_bytes;
    config.stream = cuda_stream;
    config.attributes = attributes;
    config.attribute_count = used;
    driver_call(&Driver::launch, "cuLaunchKernelEx", name_, static_cast<const abi::LaunchConfig *>(&config), function_, parameters_.data(),
                static_cast<void **>(nullptr));
}

}  // namespace epigemm
