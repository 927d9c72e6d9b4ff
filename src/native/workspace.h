// Scratch memory of launches: kept per device and stream, or owned by the graph that is being captured.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>

#include "abi.h"

namespace epigemm {

struct StreamBuffer;

// A workspace for one launch on a stream; its context must be current. Held from before the launch until after it.
//
// Outside a capture it is the stream's own buffer: grown when a launch needs more, the smaller one freed in stream order, after the
// work that uses it. Holding the lease keeps other threads from growing it between two launches' enqueueing.
// Under capture it is an allocation node of the graph, freed by a node after the launch: the graph owns it, replays of two graphs have
// two, and the stream's buffer is never seen by a graph.
class WorkspaceLease {
public:
    WorkspaceLease(int device, abi::Stream stream, std::size_t bytes);
    ~WorkspaceLease();
    WorkspaceLease(const WorkspaceLease &) = delete;
    WorkspaceLease &operator=(const WorkspaceLease &) = delete;

    abi::Address address() const { return address_; }

private:
    abi::Address address_ = 0;
    abi::Stream captured_ = nullptr;
    bool in_capture_ = false;
    std::shared_ptr<StreamBuffer> buffer_;
    std::unique_lock<std::mutex> lock_;
};

// Bytes of all kept buffers, and how many there are.
std::size_t kept_workspace_bytes();
std::size_t kept_workspaces();

// Frees every kept buffer that no launch holds, after the work of its device; the number of bytes freed.
std::size_t release_workspaces();

}  // namespace epigemm
