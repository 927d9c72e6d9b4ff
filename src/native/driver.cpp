#include "driver.h"

#include <array>
#include <atomic>
#include <memory>
#include <mutex>

namespace epigemm {

namespace {

constexpr int kMaxDevices = 64;
std::atomic<const Driver *> g_driver{nullptr};
std::array<std::atomic<abi::Context>, kMaxDevices> g_primary{};
std::mutex g_mutex;

}  // namespace

Driver::Driver(const std::string &path) : library_("cuda", path) {
#define X(name, symbol, parameters) library_.load(name, #symbol);
    EPIGEMM_DRIVER_FUNCTIONS(X)
#undef X
}

void Driver::open(const std::string &path) {
    std::lock_guard lock(g_mutex);
    if (g_driver.load() != nullptr) return;
    auto driver = std::make_unique<Driver>(path);
    if (driver->init == nullptr) throw MissingError("cuda", path + " has no cuInit");
    const abi::Result result = driver->init(0);
    if (result != 0) driver->fail(result, "cuInit", path);
    g_driver.store(driver.release());  // never freed: its functions are in use until the process ends
}

const Driver *Driver::opened() { return g_driver.load(std::memory_order_acquire); }

const Driver &Driver::get() {
    const Driver *driver = opened();
    if (driver == nullptr) throw MissingError("cuda", "the driver is not opened");
    return *driver;
}

void Driver::fail(abi::Result result, const char *symbol, const std::string &detail) const {
    const char *name = nullptr, *text = nullptr;
    if (error_name != nullptr) error_name(result, &name);
    if (error_text != nullptr) error_text(result, &text);
    std::string about = detail;
    if (text != nullptr) about = about.empty() ? text : about + ": " + text;
    throw StatusError("cuda", symbol, result, name != nullptr ? name : "CUresult", about);
}

abi::Context primary_context(int device) {
    if (device < 0 || device >= kMaxDevices) throw StatusError("cuda", "cuDeviceGet", 101, "CUDA_ERROR_INVALID_DEVICE");
    abi::Context context = g_primary[device].load(std::memory_order_acquire);
    if (context != nullptr) return context;
    std::lock_guard lock(g_mutex);
    context = g_primary[device].load();
    if (context == nullptr) {
        abi::Device handle = 0;
        EPIGEMM_DRIVER(device_get, "cuDeviceGet", &handle, device);
        EPIGEMM_DRIVER(primary_retain, "cuDevicePrimaryCtxRetain", &context, handle);
        g_primary[device].store(context, std::memory_order_release);
    }
    return context;
}

ContextGuard::ContextGuard(int device) {
    const abi::Context wanted = primary_context(device);
    abi::Context current = nullptr;
    EPIGEMM_DRIVER(context_get, "cuCtxGetCurrent", &current);
    if (current != wanted) {
        EPIGEMM_DRIVER(context_push, "cuCtxPushCurrent", wanted);
        pushed_ = true;
    }
}

ContextGuard::~ContextGuard() {
    abi::Context popped = nullptr;
    if (pushed_) Driver::get().context_pop(&popped);
}

}  // namespace epigemm
