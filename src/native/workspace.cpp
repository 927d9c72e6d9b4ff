#include "workspace.h"

#include <functional>
#include <map>
#include <thread>
#include <tuple>
#include <vector>

#include "driver.h"

namespace epigemm {

struct StreamBuffer {
    int device = 0;
    abi::Address address = 0;
    std::size_t bytes = 0;
    std::uint64_t used = 0;  // by which the longest unused is found
    std::mutex mutex;
};

namespace {

// A stream's handle is reused once it is destroyed, its id is not.
using Key = std::tuple<int, std::uint64_t, std::size_t>;

constexpr std::size_t kMaxBuffers = 128;
constexpr std::size_t kGranularity = std::size_t{1} << 20;

std::mutex g_mutex;
std::map<Key, std::shared_ptr<StreamBuffer>> g_buffers;
std::uint64_t g_clock = 0;

Key key_of(int device, abi::Stream stream) {
    const auto handle = reinterpret_cast<std::uintptr_t>(stream);
    const auto thread = handle == abi::kPerThreadStream ? std::hash<std::thread::id>{}(std::this_thread::get_id()) : 0;
    if (handle <= abi::kPerThreadStream) return {device, handle == 0 ? abi::kLegacyStream : handle, thread};
    const Driver &driver = Driver::get();
    if (driver.stream_id == nullptr) return {device, handle, 0};
    unsigned long long id = 0;
    EPIGEMM_DRIVER(stream_id, "cuStreamGetId", stream, &id);
    return {device, id + 16, 0};  // past the handles of the two default streams
}

// Frees the buffer after all work of its device. False where that cannot be waited for now (a capture is under way).
bool free_after_work(StreamBuffer &buffer) {
    const Driver &driver = Driver::get();
    ContextGuard guard(buffer.device);
    if (driver.context_synchronize() != 0) return false;
    driver.free_now(buffer.address);
    buffer.address = 0;
    buffer.bytes = 0;
    return true;
}

// Drops the longest unused buffer that no launch holds: streams may have gone whose buffers are still here.
void evict() {
    auto oldest = g_buffers.end();
    for (auto it = g_buffers.begin(); it != g_buffers.end(); ++it)
        if (it->second.use_count() == 1 && (oldest == g_buffers.end() || it->second->used < oldest->second->used)) oldest = it;
    if (oldest == g_buffers.end()) return;
    if (oldest->second->address == 0 || free_after_work(*oldest->second)) g_buffers.erase(oldest);
}

std::shared_ptr<StreamBuffer> buffer_of(int device, abi::Stream stream) {
    const Key key = key_of(device, stream);
    std::lock_guard lock(g_mutex);
    auto found = g_buffers.find(key);
    if (found == g_buffers.end()) {
        if (g_buffers.size() >= kMaxBuffers) evict();
        found = g_buffers.emplace(key, std::make_shared<StreamBuffer>()).first;
        found->second->device = device;
    }
    found->second->used = ++g_clock;
    return found->second;
}

void grow(StreamBuffer &buffer, abi::Stream stream, std::size_t bytes) {
    const std::size_t wanted = (bytes + kGranularity - 1) / kGranularity * kGranularity;
    if (buffer.address != 0) {
        EPIGEMM_DRIVER(free, "cuMemFreeAsync", buffer.address, stream);
        buffer.address = 0;
        buffer.bytes = 0;
    }
    driver_call(&Driver::allocate, "cuMemAllocAsync", "a workspace of " + std::to_string(wanted) + " bytes", &buffer.address, wanted, stream);
    buffer.bytes = wanted;
}

}  // namespace

WorkspaceLease::WorkspaceLease(int device, abi::Stream stream, std::size_t bytes) {
    if (bytes == 0) return;
    int status = 0;
    EPIGEMM_DRIVER(stream_is_capturing, "cuStreamIsCapturing", stream, &status);
    if (status == abi::kStreamIsCapturing) {
        driver_call(&Driver::allocate, "cuMemAllocAsync", "a workspace of a captured graph", &address_, bytes, stream);
        captured_ = stream;
        in_capture_ = true;
        return;
    }
    buffer_ = buffer_of(device, stream);
    lock_ = std::unique_lock(buffer_->mutex);
    if (buffer_->bytes < bytes) grow(*buffer_, stream, bytes);
    address_ = buffer_->address;
}

WorkspaceLease::~WorkspaceLease() {
    if (in_capture_) Driver::get().free(address_, captured_);
    if (lock_.owns_lock()) lock_.unlock();
}

std::size_t kept_workspace_bytes() {
    std::lock_guard lock(g_mutex);
    std::size_t total = 0;
    for (const auto &item : g_buffers) total += item.second->bytes;
    return total;
}

std::size_t kept_workspaces() {
    std::lock_guard lock(g_mutex);
    return g_buffers.size();
}

std::size_t release_workspaces() {
    std::lock_guard lock(g_mutex);
    std::size_t freed = 0;
    for (auto it = g_buffers.begin(); it != g_buffers.end();) {
        const std::size_t bytes = it->second->bytes;
        const bool gone = it->second.use_count() == 1 && (it->second->address == 0 || free_after_work(*it->second));
        freed += gone ? bytes : 0;
        it = gone ? g_buffers.erase(it) : std::next(it);
    }
    return freed;
}

}  // namespace epigemm
