// libcuda: contexts, streams, memory, events. Functions that a driver lacks are null until they are called through `call`.
#pragma once

#include <optional>
#include <string>

#include "abi.h"
#include "shared_library.h"

namespace epigemm {

// name in this code, symbol in the library, parameters
#define EPIGEMM_DRIVER_FUNCTIONS(X)                                                                                       \
    X(init, cuInit, (unsigned))                                                                                           \
    X(error_name, cuGetErrorName, (abi::Result, const char **))                                                           \
    X(error_text, cuGetErrorString, (abi::Result, const char **))                                                         \
    X(driver_version, cuDriverGetVersion, (int *))                                                                        \
    X(device_count, cuDeviceGetCount, (int *))                                                                            \
    X(device_get, cuDeviceGet, (abi::Device *, int))                                                                      \
    X(device_name, cuDeviceGetName, (char *, int, abi::Device))                                                           \
    X(device_attribute, cuDeviceGetAttribute, (int *, int, abi::Device))                                                  \
    X(device_total_bytes, cuDeviceTotalMem_v2, (std::size_t *, abi::Device))                                              \
    X(primary_retain, cuDevicePrimaryCtxRetain, (abi::Context *, abi::Device))                                            \
    X(context_get, cuCtxGetCurrent, (abi::Context *))                                                                     \
    X(context_push, cuCtxPushCurrent_v2, (abi::Context))                                                                  \
    X(context_pop, cuCtxPopCurrent_v2, (abi::Context *))                                                                  \
    X(context_synchronize, cuCtxSynchronize, ())                                                                          \
    X(memory_info, cuMemGetInfo_v2, (std::size_t *, std::size_t *))                                                       \
    X(stream_create, cuStreamCreate, (abi::Stream *, unsigned))                                                           \
    X(stream_destroy, cuStreamDestroy_v2, (abi::Stream))                                                                  \
    X(stream_synchronize, cuStreamSynchronize, (abi::Stream))                                                             \
    X(stream_is_capturing, cuStreamIsCapturing, (abi::Stream, int *))                                                     \
    X(stream_id, cuStreamGetId, (abi::Stream, unsigned long long *))                                                      \
    X(allocate, cuMemAllocAsync, (abi::Address *, std::size_t, abi::Stream))                                              \
    X(free, cuMemFreeAsync, (abi::Address, abi::Stream))                                                                  \
    X(free_now, cuMemFree_v2, (abi::Address))                                                                             \
    X(copy, cuMemcpyAsync, (abi::Address, abi::Address, std::size_t, abi::Stream))                                        \
    X(fill, cuMemsetD8Async, (abi::Address, unsigned char, std::size_t, abi::Stream))                                     \
    X(event_create, cuEventCreate, (abi::Event *, unsigned))                                                              \
    X(event_record, cuEventRecord, (abi::Event, abi::Stream))                                                             \
    X(event_synchronize, cuEventSynchronize, (abi::Event))                                                                \
    X(event_elapsed, cuEventElapsedTime, (float *, abi::Event, abi::Event))                                               \
    X(event_destroy, cuEventDestroy_v2, (abi::Event))                                                                     \
    X(library_load, cuLibraryLoadData, (abi::Library *, const void *, void *, void *, unsigned, void *, void *, unsigned)) \
    X(library_kernel, cuLibraryGetKernel, (abi::Kernel *, abi::Library, const char *))                                    \
    X(kernel_function, cuKernelGetFunction, (abi::Function *, abi::Kernel))                                               \
    X(kernel_get, cuKernelGetAttribute, (int *, int, abi::Kernel, abi::Device))                                           \
    X(kernel_set, cuKernelSetAttribute, (int, int, abi::Kernel, abi::Device))                                             \
    X(launch, cuLaunchKernelEx, (const abi::LaunchConfig *, abi::Function, void **, void **))                             \
    X(occupancy, cuOccupancyMaxActiveBlocksPerMultiprocessor, (int *, abi::Function, int, std::size_t))                   \
    X(tensor_map, cuTensorMapEncodeTiled,                                                                                 \
      (abi::TensorMap *, int, std::uint32_t, abi::Address, const std::uint64_t *, const std::uint64_t *,                  \
       const std::uint32_t *, const std::uint32_t *, int, int, int, int))

class Driver {
public:
    explicit Driver(const std::string &path);

#define X(name, symbol, parameters) abi::Result(*name) parameters = nullptr;
    EPIGEMM_DRIVER_FUNCTIONS(X)
#undef X

    const std::string &path() const { return library_.path(); }

    // Opens libcuda once and calls cuInit; a second call does nothing.
    static void open(const std::string &path);
    static const Driver *opened();
    // The opened driver; MissingError if there is none.
    static const Driver &get();

    [[noreturn]] void fail(abi::Result result, const char *symbol, const std::string &detail) const;

private:
    SharedLibrary library_;
};

// Calls a driver function and throws what it returns. `detail` is what was being done, for the error.
#define EPIGEMM_DRIVER(function, symbol, ...) ::epigemm::driver_call(&::epigemm::Driver::function, symbol, "", ##__VA_ARGS__)

template <class Member, class... Arguments>
void driver_call(Member member, const char *symbol, const std::string &detail, Arguments... arguments) {
    const Driver &driver = Driver::get();
    auto function = driver.*member;
    if (function == nullptr) throw MissingError("cuda", std::string("this driver has no ") + symbol + "; a newer one has");
    const abi::Result result = function(arguments...);
    if (result != 0) driver.fail(result, symbol, detail);
}

// The primary context of a device, retained once for the process.
abi::Context primary_context(int device);

// Makes a device's primary context current on this thread, whatever was, and restores that.
class ContextGuard {
public:
    explicit ContextGuard(int device);
    ~ContextGuard();
    ContextGuard(const ContextGuard &) = delete;
    ContextGuard &operator=(const ContextGuard &) = delete;

private:
    bool pushed_ = false;
};

}  // namespace epigemm
