// The Python module epigemm._native. Nothing is opened when it is imported.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/complex.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "cublaslt.h"
#include "driver.h"
#include "kernel.h"
#include "workspace.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace epigemm {

namespace {

using PyAttributes = std::vector<std::pair<int, nb::bytes>>;
using PyLayout = std::tuple<int, std::uint64_t, std::uint64_t, std::int64_t, int, std::int64_t>;
using PyHeuristic = std::tuple<nb::bytes, std::size_t, int, float>;
using Three = std::tuple<unsigned, unsigned, unsigned>;

std::string text_of(const nb::bytes &value) { return std::string(static_cast<const char *>(value.data()), value.size()); }

nb::bytes bytes_to_python(const Bytes &value) { return nb::bytes(value.data(), value.size()); }

Attributes attributes_of(const PyAttributes &given) {
    Attributes result;
    result.reserve(given.size());
    for (const auto &[number, value] : given) result.emplace_back(number, text_of(value));
    return result;
}

PyHeuristic to_python(const Heuristic &found) {
    return {bytes_to_python(found.algorithm), found.workspace_bytes, found.state, found.waves};
}

abi::Stream stream_of(std::uintptr_t stream) { return reinterpret_cast<abi::Stream>(stream); }
abi::LtHandle handle_from(std::uint64_t handle) { return reinterpret_cast<abi::LtHandle>(handle); }

// Errors become what epigemm.engines.cuda.libraries makes of them: it has the table of status codes and the remedies.
void raise_worded(const char *function, const nb::tuple &arguments) {
    nb::object error = nb::module_::import_("epigemm.engines.cuda.libraries").attr(function)(*arguments);
    PyErr_SetObject(reinterpret_cast<PyObject *>(Py_TYPE(error.ptr())), error.ptr());
}

void translate(const std::exception_ptr &pointer, void *) {
    try {
        std::rethrow_exception(pointer);
    } catch (const StatusError &e) {
        raise_worded("status_error", nb::make_tuple(e.library, e.call, e.code, e.name, e.detail));
    } catch (const MissingError &e) {
        raise_worded("missing_error", nb::make_tuple(e.library, e.why));
    }
}

// ---------------------------------------------------------------- driver

abi::Device device_handle(int device) {
    abi::Device handle = 0;
    EPIGEMM_DRIVER(device_get, "cuDeviceGet", &handle, device);
    return handle;
}

std::string device_name(int device) {
    char name[256] = {};
    EPIGEMM_DRIVER(device_name, "cuDeviceGetName", name, static_cast<int>(sizeof name), device_handle(device));
    return name;
}

template <class Member>
int integer(Member member, const char *symbol) {
    int value = 0;
    driver_call(member, symbol, "", &value);
    return value;
}

int device_attribute(int device, int attribute) {
    int value = 0;
    EPIGEMM_DRIVER(device_attribute, "cuDeviceGetAttribute", &value, attribute, device_handle(device));
    return value;
}

std::size_t total_bytes(int device) {
    std::size_t value = 0;
    EPIGEMM_DRIVER(device_total_bytes, "cuDeviceTotalMem", &value, device_handle(device));
    return value;
}

std::pair<std::size_t, std::size_t> memory_info(int device) {
    ContextGuard guard(device);
    std::size_t free = 0, total = 0;
    EPIGEMM_DRIVER(memory_info, "cuMemGetInfo", &free, &total);
    return {free, total};
}

bool is_capturing(int device, std::uintptr_t stream) {
    ContextGuard guard(device);
    int status = 0;
    EPIGEMM_DRIVER(stream_is_capturing, "cuStreamIsCapturing", stream_of(stream), &status);
    return status == abi::kStreamIsCapturing;
}

std::uint64_t allocate(int device, std::size_t bytes, std::uintptr_t stream) {
    ContextGuard guard(device);
    abi::Address address = 0;
    driver_call(&Driver::allocate, "cuMemAllocAsync", std::to_string(bytes) + " bytes on cuda:" + std::to_string(device), &address, bytes,
                stream_of(stream));
    return address;
}

void free_memory(int device, abi::Address address, std::uintptr_t stream) {
    ContextGuard guard(device);
    EPIGEMM_DRIVER(free, "cuMemFreeAsync", address, stream_of(stream));
}

void copy(int device, abi::Address to, abi::Address from, std::size_t bytes, std::uintptr_t stream) {
    ContextGuard guard(device);
    if (bytes > 0) EPIGEMM_DRIVER(copy, "cuMemcpyAsync", to, from, bytes, stream_of(stream));
}

void fill(int device, abi::Address to, int value, std::size_t bytes, std::uintptr_t stream) {
    ContextGuard guard(device);
    if (bytes > 0) EPIGEMM_DRIVER(fill, "cuMemsetD8Async", to, static_cast<unsigned char>(value), bytes, stream_of(stream));
}

void synchronize(int device, std::uintptr_t stream) {
    ContextGuard guard(device);
    EPIGEMM_DRIVER(stream_synchronize, "cuStreamSynchronize", stream_of(stream));
}

std::uintptr_t create_stream(int device) {
    ContextGuard guard(device);
    abi::Stream stream = nullptr;
    EPIGEMM_DRIVER(stream_create, "cuStreamCreate", &stream, 1U);  // CU_STREAM_NON_BLOCKING
    return reinterpret_cast<std::uintptr_t>(stream);
}

void destroy_stream(int device, std::uintptr_t stream) {
    ContextGuard guard(device);
    EPIGEMM_DRIVER(stream_destroy, "cuStreamDestroy", stream_of(stream));
}

class Event {
public:
    explicit Event(int device) : device_(device) {
        ContextGuard guard(device);
        EPIGEMM_DRIVER(event_create, "cuEventCreate", &event_, 0U);
    }
    ~Event() { Driver::get().event_destroy(event_); }
    Event(const Event &) = delete;
    Event &operator=(const Event &) = delete;

    void record(std::uintptr_t stream) {
        ContextGuard guard(device_);
        EPIGEMM_DRIVER(event_record, "cuEventRecord", event_, stream_of(stream));
    }
    void synchronize() { EPIGEMM_DRIVER(event_synchronize, "cuEventSynchronize", event_); }
    float elapsed_ms(const Event &start) const {
        float ms = 0;
        EPIGEMM_DRIVER(event_elapsed, "cuEventElapsedTime", &ms, start.event_, event_);
        return ms;
    }

private:
    int device_;
    abi::Event event_ = nullptr;
};

void bind_driver(nb::module_ &m) {
    using Unlocked = nb::call_guard<nb::gil_scoped_release>;
    m.def("open_driver", &Driver::open, "path"_a);
    m.def("driver_path", [] { return Driver::opened() != nullptr ? Driver::opened()->path() : std::string(); });
    m.def("driver_version", [] { return integer(&Driver::driver_version, "cuDriverGetVersion"); });
    m.def("device_count", [] { return integer(&Driver::device_count, "cuDeviceGetCount"); });
    m.def("device_name", &device_name, "device"_a);
    m.def("device_attribute", &device_attribute, "device"_a, "attribute"_a);
    m.def("device_total_bytes", &total_bytes, "device"_a);
    m.def("device_memory", &memory_info, "device"_a);
    m.def("is_capturing", &is_capturing, "device"_a, "stream"_a);
    m.def("allocate", &allocate, "device"_a, "bytes"_a, "stream"_a = 0, Unlocked());
    m.def("free", &free_memory, "device"_a, "address"_a, "stream"_a = 0, Unlocked());
    m.def("copy", &copy, "device"_a, "to"_a, "from_"_a, "bytes"_a, "stream"_a = 0, Unlocked());
    m.def("fill", &fill, "device"_a, "to"_a, "value"_a, "bytes"_a, "stream"_a = 0, Unlocked());
    m.def("synchronize", &synchronize, "device"_a, "stream"_a = 0, Unlocked());
    m.def("create_stream", &create_stream, "device"_a);
    m.def("destroy_stream", &destroy_stream, "device"_a, "stream"_a);
    m.def("kept_workspace_bytes", &kept_workspace_bytes);
    m.def("kept_workspaces", &kept_workspaces);
    m.def("release_workspaces", &release_workspaces, Unlocked());
    nb::class_<Event>(m, "Event")
        .def(nb::init<int>(), "device"_a)
        .def("record", &Event::record, "stream"_a = 0)
        .def("synchronize", &Event::synchronize, Unlocked())
        .def("elapsed_ms", &Event::elapsed_ms, "start"_a);
}

// ---------------------------------------------------------------- kernels

LaunchShape shape_of(const Three &grid, const Three &block, std::size_t shared_bytes, const Three &cluster, bool cooperative,
                     bool overlaps_previous, std::size_t workspace_bytes, std::size_t zeroed_bytes, std::size_t block_bytes) {
    const auto [gx, gy, gz] = grid;
    const auto [bx, by, bz] = block;
    const auto [cx, cy, cz] = cluster;
    return {{gx, gy, gz}, {bx, by, bz}, {cx, cy, cz}, static_cast<unsigned>(shared_bytes), cooperative, overlaps_previous, workspace_bytes, zeroed_bytes,
            block_bytes};
}

TensorMapSpec tensor_map_spec(int type, std::vector<std::uint64_t> extents, std::vector<std::uint64_t> strides_bytes,
                              std::vector<std::uint32_t> box, int swizzle, int interleave, int l2_promotion, int fill) {
    const std::size_t rank = extents.size();
    if (rank < 1 || rank > 5 || box.size() != rank || strides_bytes.size() + 1 != rank)
        throw std::invalid_argument("a tensor map has 1 to 5 extents, as many box extents, and one stride less");
    return {type, std::move(extents), std::move(strides_bytes), std::move(box), std::vector<std::uint32_t>(rank, 1), interleave, swizzle,
            l2_promotion, fill};
}

// The call's values, read from Python integers: kernels have few parameters, so a fixed array does.
constexpr std::size_t kMaxValues = 64;

void run_kernel(KernelLaunch &launch, std::uintptr_t stream, const nb::args &values) {
    std::uint64_t raw[kMaxValues];
    const std::size_t count = values.size();
    if (count > kMaxValues) throw std::invalid_argument("a launch takes at most 64 values");
    for (std::size_t i = 0; i < count; ++i) {
        raw[i] = PyLong_AsUnsignedLongLong(values[i].ptr());
        if (raw[i] == static_cast<std::uint64_t>(-1) && PyErr_Occurred()) throw nb::python_error();
    }
    nb::gil_scoped_release unlocked;
    launch.run(raw, count, stream);
}

void bind_kernels(nb::module_ &m) {
    nb::class_<KernelLibrary>(m, "KernelLibrary")
        .def("__init__", [](KernelLibrary *self, const nb::bytes &code) { new (self) KernelLibrary(text_of(code)); }, "code"_a)
        .def("attribute", &KernelLibrary::attribute, "name"_a, "attribute"_a, "device"_a = 0)
        .def("blocks_per_multiprocessor", &KernelLibrary::blocks_per_multiprocessor, "name"_a, "device"_a, "threads"_a, "shared_bytes"_a = 0);
    nb::class_<Slot>(m, "Slot")
        .def_static("fixed", [](const nb::bytes &value) { return Slot::fixed(text_of(value)); }, "value"_a)
        .def_static("value", &Slot::value, "index"_a, "size"_a = 8)
        .def_static("workspace", &Slot::workspace, "offset"_a = 0)
        .def("at", [](Slot slot, std::size_t offset) { slot.at = offset; return slot; }, "offset"_a)
        .def_static(
            "tensor_map",
            [](std::size_t index, int type, std::vector<std::uint64_t> extents, std::vector<std::uint64_t> strides_bytes,
               std::vector<std::uint32_t> box, int swizzle, int interleave, int l2_promotion, int fill) {
                return Slot::tensor_map(index, tensor_map_spec(type, std::move(extents), std::move(strides_bytes), std::move(box), swizzle,
                                                               interleave, l2_promotion, fill));
            },
            "index"_a, "type"_a, "extents"_a, "strides_bytes"_a, "box"_a, "swizzle"_a = 0, "interleave"_a = 0, "l2_promotion"_a = 2, "fill"_a = 0);
    nb::class_<KernelLaunch>(m, "KernelLaunch")
        .def(
            "__init__",
            [](KernelLaunch *self, std::shared_ptr<KernelLibrary> library, const std::string &name, int device, const Three &grid,
               const Three &block, std::vector<Slot> slots, std::size_t shared_bytes, const Three &cluster, bool cooperative,
               bool overlaps_previous, std::size_t workspace_bytes, std::size_t zeroed_bytes, std::size_t block_bytes) {
                new (self) KernelLaunch(std::move(library), name, device,
                                        shape_of(grid, block, shared_bytes, cluster, cooperative, overlaps_previous, workspace_bytes, zeroed_bytes, block_bytes),
                                        std::move(slots));
            },
            "library"_a, "name"_a, "device"_a, "grid"_a, "block"_a, "slots"_a, "shared_bytes"_a = 0, "cluster"_a = Three{1, 1, 1},
            "cooperative"_a = false, "overlaps_previous"_a = false, "workspace_bytes"_a = 0, "zeroed_bytes"_a = 0, "block_bytes"_a = 0)
        .def("run", &run_kernel, "stream"_a, "values"_a)
        .def_prop_ro("value_count", &KernelLaunch::value_count)
        .def_prop_ro("workspace_bytes", &KernelLaunch::workspace_bytes)
        .def_prop_ro("cached_tensor_maps", &KernelLaunch::cached_tensor_maps);
}

// ---------------------------------------------------------------- cuBLASLt

std::vector<int> algorithm_ids(int device, const std::array<int, 6> &types, int limit) {
    ContextGuard guard(device);
    std::vector<int> ids(static_cast<std::size_t>(limit));
    int count = 0;
    check_status(CublasLt::get().algorithm_ids(handle_of(device), types[0], types[1], types[2], types[3], types[4], types[5], limit,
                                               ids.data(), &count),
                 "cublasLtMatmulAlgoGetIds");
    ids.resize(static_cast<std::size_t>(count));
    return ids;
}

nb::bytes algorithm_init(int device, const std::array<int, 6> &types, int id) {
    ContextGuard guard(device);
    abi::LtAlgorithm algorithm{};
    check_status(CublasLt::get().algorithm_init(handle_of(device), types[0], types[1], types[2], types[3], types[4], types[5], id, &algorithm),
                 "cublasLtMatmulAlgoInit", "algorithm " + std::to_string(id));
    return bytes_to_python(bytes_of(algorithm));
}

// An attribute of an algorithm; `read` is the library's function for capabilities or for configurations. Size 0 asks the library.
template <class Read>
nb::bytes algorithm_attribute(Read read, const char *symbol, const nb::bytes &algorithm, int attribute, std::size_t size) {
    const abi::LtAlgorithm held = algorithm_of(text_of(algorithm));
    std::size_t written = 0;
    if (size == 0) {
        check_status(read(&held, attribute, nullptr, 0, &written), symbol, "attribute " + std::to_string(attribute));
        size = written;
    }
    Bytes value(size, '\0');
    if (size > 0) check_status(read(&held, attribute, value.data(), size, &written), symbol, "attribute " + std::to_string(attribute));
    return nb::bytes(value.data(), std::min(written, size));
}

nb::bytes with_config(const nb::bytes &algorithm, int attribute, const nb::bytes &value) {
    abi::LtAlgorithm changed = algorithm_of(text_of(algorithm));
    check_status(CublasLt::get().config_set(&changed, attribute, value.data(), value.size()), "cublasLtMatmulAlgoConfigSetAttribute",
                 "attribute " + std::to_string(attribute));
    return bytes_to_python(bytes_of(changed));
}

std::array<LayoutSpec, 4> layouts_of(const std::array<PyLayout, 4> &given) {
    std::array<LayoutSpec, 4> layouts;
    for (std::size_t i = 0; i < given.size(); ++i) {
        const auto &[type, rows, columns, leading, count, stride] = given[i];
        layouts[i] = {type, rows, columns, leading, count, stride};
    }
    return layouts;
}

std::vector<PyHeuristic> heuristic(LtMatmul &self, int device, const PyAttributes &preference, int limit, const Pointers &pointers,
                                   std::uint64_t handle) {
    const Attributes wanted = attributes_of(preference);
    std::vector<Heuristic> found;
    {
        nb::gil_scoped_release unlocked;
        found = self.heuristic(device, handle_from(handle), wanted, limit, pointers);
    }
    std::vector<PyHeuristic> result;
    for (const Heuristic &item : found) result.push_back(to_python(item));
    return result;
}

void bind_cublaslt(nb::module_ &m) {
    using Unlocked = nb::call_guard<nb::gil_scoped_release>;
    m.def("open_cublaslt", &CublasLt::open, "path"_a);
    m.def("cublaslt_path", [] { return CublasLt::opened() != nullptr ? CublasLt::opened()->path() : std::string(); });
    m.def("cublaslt_version", [] { return CublasLt::get().version(); });
    m.def("algorithm_ids", &algorithm_ids, "device"_a, "types"_a, "limit"_a);
    m.def("algorithm_init", &algorithm_init, "device"_a, "types"_a, "id"_a);
    m.def(
        "algorithm_capability",
        [](const nb::bytes &algorithm, int attribute, std::size_t size) {
            return algorithm_attribute(CublasLt::get().capability, "cublasLtMatmulAlgoCapGetAttribute", algorithm, attribute, size);
        },
        "algorithm"_a, "attribute"_a, "size"_a);
    m.def(
        "algorithm_config",
        [](const nb::bytes &algorithm, int attribute, std::size_t size) {
            return algorithm_attribute(CublasLt::get().config_get, "cublasLtMatmulAlgoConfigGetAttribute", algorithm, attribute, size);
        },
        "algorithm"_a, "attribute"_a, "size"_a);
    m.def("algorithm_with", &with_config, "algorithm"_a, "attribute"_a, "value"_a);
    nb::class_<Scalars>(m, "Scalars")
        .def(nb::init<int, std::complex<double>, std::complex<double>>(), "scale_type"_a, "alpha"_a, "beta"_a)
        .def("raw", [](const Scalars &self) { return std::make_pair(nb::bytes(self.alpha(), 16), nb::bytes(self.beta(), 16)); });
    nb::class_<LtMatmul>(m, "LtMatmul")
        .def(
            "__init__",
            [](LtMatmul *self, int compute_type, int scale_type, const PyAttributes &attributes, const std::array<PyLayout, 4> &layouts) {
                new (self) LtMatmul(compute_type, scale_type, attributes_of(attributes), layouts_of(layouts));
            },
            "compute_type"_a, "scale_type"_a, "attributes"_a, "layouts"_a)
        .def("heuristic", &heuristic, "device"_a, "preference"_a, "limit"_a, "pointers"_a = Pointers{}, "handle"_a = 0)
        .def(
            "check",
            [](LtMatmul &self, int device, const nb::bytes &algorithm, std::uint64_t handle) {
                return to_python(self.check(device, handle_from(handle), text_of(algorithm)));
            },
            "device"_a, "algorithm"_a, "handle"_a = 0)
        .def("attribute", [](const LtMatmul &self, int number, std::size_t size) { return bytes_to_python(self.attribute(number, size)); },
             "number"_a, "size"_a)
        .def("layout_attribute",
             [](const LtMatmul &self, int which, int number, std::size_t size) { return bytes_to_python(self.layout_attribute(which, number, size)); },
             "which"_a, "number"_a, "size"_a);
    nb::class_<LtLaunch>(m, "LtLaunch")
        .def(
            "__init__",
            [](LtLaunch *self, std::shared_ptr<LtMatmul> matmul, int device, const nb::bytes &algorithm, std::size_t workspace_bytes,
               const Scalars &scalars, bool swapped, bool c_is_d, bool has_bias, bool has_aux, std::size_t zeroed_aux_bytes, std::uint64_t handle,
               std::string what) {
                new (self) LtLaunch(std::move(matmul), device, text_of(algorithm), workspace_bytes, scalars, swapped, c_is_d, has_bias, has_aux,
                                    zeroed_aux_bytes, handle, std::move(what));
            },
            "matmul"_a, "device"_a, "algorithm"_a, "workspace_bytes"_a, "scalars"_a, "swapped"_a = false, "c_is_d"_a = true, "has_bias"_a = false,
            "has_aux"_a = false, "zeroed_aux_bytes"_a = 0, "handle"_a = 0, "what"_a = "")
        .def("run", &LtLaunch::run, "a"_a, "b"_a, "c"_a, "d"_a, "bias"_a, "aux"_a, "stream"_a, "scalars"_a = nb::none(), "workspace"_a = 0,
             Unlocked())
        .def("run_with", &LtLaunch::run_with, "pointers"_a, "a"_a, "b"_a, "c"_a, "d"_a, "stream"_a, "scalars"_a = nb::none(),
             "workspace"_a = 0, Unlocked())
        .def_prop_ro("workspace_bytes", &LtLaunch::workspace_bytes)
        .def_prop_ro("device", &LtLaunch::device);
}

}  // namespace

}  // namespace epigemm

NB_MODULE(_native, m) {
    m.doc() = "The compiled core: CUDA libraries opened at run time, and launches that do only what changes from call to call.";
    nb::register_exception_translator(epigemm::translate);
    epigemm::bind_driver(m);
    epigemm::bind_kernels(m);
    epigemm::bind_cublaslt(m);
}
