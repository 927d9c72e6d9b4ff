#include "cublaslt.h"

#include <atomic>
#include <cmath>
#include <cstring>
#include <map>

#include "driver.h"
#include "workspace.h"

namespace epigemm {

namespace {

std::atomic<const CublasLt *> g_library{nullptr};
std::mutex g_mutex;
std::map<int, abi::LtHandle> g_handles;

const char *status_name(abi::Status status) {
    switch (status) {
        case 1: return "CUBLAS_STATUS_NOT_INITIALIZED";
        case 3: return "CUBLAS_STATUS_ALLOC_FAILED";
        case 7: return "CUBLAS_STATUS_INVALID_VALUE";
        case 8: return "CUBLAS_STATUS_ARCH_MISMATCH";
        case 11: return "CUBLAS_STATUS_MAPPING_ERROR";
        case 13: return "CUBLAS_STATUS_EXECUTION_FAILED";
        case 14: return "CUBLAS_STATUS_INTERNAL_ERROR";
        case 15: return "CUBLAS_STATUS_NOT_SUPPORTED";
        case 16: return "CUBLAS_STATUS_LICENSE_ERROR";
        default: return "CUBLAS_STATUS";
    }
}

// IEEE binary16 of a number, rounded to nearest even; what COMPUTE_16F wants alpha and beta in.
std::uint16_t half_bits(double value) {
    const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    const double magnitude = std::fabs(value);
    if (std::isnan(value)) return sign | 0x7e00;
    if (magnitude >= 65520.0) return sign | 0x7c00;
    int exponent = 0;
    std::frexp(magnitude, &exponent);  // magnitude = f * 2^exponent, 0.5 <= f < 1
    exponent = std::max(exponent - 1, -14);
    const double steps = std::nearbyint(std::ldexp(magnitude, 10 - exponent));  // the significand in units of the last place
    const int biased = exponent + 14;                                           // a carry out of `steps` moves into the exponent
    return static_cast<std::uint16_t>(sign | (steps == 0 ? 0 : static_cast<int>(steps) + (biased << 10)));
}

template <class T>
void store(std::array<char, 16> &into, T value) {
    std::memcpy(into.data(), &value, sizeof value);
}

void store_scalar(std::array<char, 16> &into, int scale_type, std::complex<double> value) {
    switch (scale_type) {
        case 0: return store(into, static_cast<float>(value.real()));                                            // CUDA_R_32F
        case 1: return store(into, value.real());                                                                // CUDA_R_64F
        case 2: return store(into, half_bits(value.real()));                                                     // CUDA_R_16F
        case 4: return store(into, std::complex<float>(static_cast<float>(value.real()), static_cast<float>(value.imag())));  // CUDA_C_32F
        case 5: return store(into, value);                                                                       // CUDA_C_64F
        default: throw std::invalid_argument("alpha and beta cannot be of cudaDataType " + std::to_string(scale_type));
    }
}

Heuristic heuristic_of(const abi::LtHeuristicResult &result) {
    return {bytes_of(result.algorithm), result.workspace_bytes, result.state, result.waves};
}

// A preference for one query.
struct Preference {
    Preference() { check_status(CublasLt::get().preference_create(&handle), "cublasLtMatmulPreferenceCreate"); }
    ~Preference() { CublasLt::get().preference_destroy(handle); }
    abi::LtPreference handle = nullptr;
};

}  // namespace

CublasLt::CublasLt(const std::string &path) : library_("cublasLt", path) {
#define X(name, symbol, parameters) \
    library_.load(name, #symbol);   \
    if (name == nullptr) throw MissingError("cublasLt", path + " has no " #symbol);
    EPIGEMM_CUBLASLT_FUNCTIONS(X)
#undef X
    library_.load(version, "cublasLtGetVersion");
    if (version == nullptr) throw MissingError("cublasLt", path + " is no cuBLASLt");
}

void CublasLt::open(const std::string &path) {
    std::lock_guard lock(g_mutex);
    if (g_library.load() == nullptr) g_library.store(new CublasLt(path));  // never freed, see driver.cpp
}

const CublasLt *CublasLt::opened() { return g_library.load(std::memory_order_acquire); }

const CublasLt &CublasLt::get() {
    const CublasLt *library = opened();
    if (library == nullptr) throw MissingError("cublasLt", "the library is not opened");
    return *library;
}

void check_status(abi::Status status, const char *symbol, const std::string &detail) {
    if (status != 0) throw StatusError("cublasLt", symbol, status, status_name(status), detail);
}

abi::LtHandle handle_of(int device) {
    const CublasLt &library = CublasLt::get();
    std::lock_guard lock(g_mutex);
    auto found = g_handles.find(device);
    if (found != g_handles.end()) return found->second;
    ContextGuard guard(device);
    abi::LtHandle handle = nullptr;
    check_status(library.create(&handle), "cublasLtCreate", "a handle for cuda:" + std::to_string(device));
    return g_handles[device] = handle;
}

abi::LtAlgorithm algorithm_of(const Bytes &bytes) {
    abi::LtAlgorithm algorithm;
    if (bytes.size() != sizeof algorithm) throw std::invalid_argument("an algorithm has 64 bytes, not " + std::to_string(bytes.size()));
    std::memcpy(&algorithm, bytes.data(), sizeof algorithm);
    return algorithm;
}

Bytes bytes_of(const abi::LtAlgorithm &algorithm) { return Bytes(reinterpret_cast<const char *>(&algorithm), sizeof algorithm); }

Scalars::Scalars(int scale_type, std::complex<double> alpha, std::complex<double> beta) {
    store_scalar(alpha_, scale_type, alpha);
    store_scalar(beta_, scale_type, beta);
}

// ---------------------------------------------------------------- LtMatmul

LtMatmul::LtMatmul(int compute_type, int scale_type, const Attributes &attributes, const std::array<LayoutSpec, 4> &layouts) {
    const CublasLt &library = CublasLt::get();
    try {
        check_status(library.desc_create(&descriptor_, compute_type, scale_type), "cublasLtMatmulDescCreate");
        for (const auto &[number, value] : attributes)
            check_status(library.desc_set(descriptor_, number, value.data(), value.size()), "cublasLtMatmulDescSetAttribute",
                         "attribute " + std::to_string(number));
        for (std::size_t i = 0; i < layouts.size(); ++i) {
            const LayoutSpec &spec = layouts[i];
            const std::string which = std::string("layout of ") + "ABCD"[i];
            check_status(library.layout_create(&layouts_[i], spec.type, spec.rows, spec.columns, spec.leading_dimension),
                         "cublasLtMatrixLayoutCreate", which);
            const std::int32_t count = spec.batch_count;
            check_status(library.layout_set(layouts_[i], abi::kLayoutBatchCount, &count, sizeof count), "cublasLtMatrixLayoutSetAttribute", which);
            check_status(library.layout_set(layouts_[i], abi::kLayoutBatchStride, &spec.batch_stride, sizeof spec.batch_stride),
                         "cublasLtMatrixLayoutSetAttribute", which);
        }
    } catch (...) {
        destroy();
        throw;
    }
}

LtMatmul::~LtMatmul() { destroy(); }

void LtMatmul::destroy() {
    const CublasLt &library = CublasLt::get();
    for (abi::LtLayout layout : layouts_)
        if (layout != nullptr) library.layout_destroy(layout);
    if (descriptor_ != nullptr) library.desc_destroy(descriptor_);
}

void LtMatmul::set_pointer(int attribute, abi::Address address) {
    const abi::Status status = CublasLt::get().desc_set(descriptor_, attribute, &address, sizeof address);
    if (status != 0) check_status(status, "cublasLtMatmulDescSetAttribute", "attribute " + std::to_string(attribute));
}

std::vector<Heuristic> LtMatmul::heuristic(int device, abi::LtHandle handle, const Attributes &preference, int limit,
                                           const Pointers &pointers) {
    const CublasLt &library = CublasLt::get();
    ContextGuard guard(device);
    if (handle == nullptr) handle = handle_of(device);
    Preference wanted;
    for (const auto &[number, value] : preference)
        check_status(library.preference_set(wanted.handle, number, value.data(), value.size()), "cublasLtMatmulPreferenceSetAttribute",
                     "attribute " + std::to_string(number));
    std::vector<abi::LtHeuristicResult> results(static_cast<std::size_t>(limit));
    int count = 0;
    std::lock_guard lock(mutex_);
    for (const auto &[attribute, address] : pointers) set_pointer(attribute, address);
    check_status(library.heuristic(handle, descriptor_, layouts_[0], layouts_[1], layouts_[2], layouts_[3], wanted.handle, limit,
                                   results.data(), &count),
                 "cublasLtMatmulAlgoGetHeuristic");
    std::vector<Heuristic> found;
    for (int i = 0; i < count; ++i)
        if (results[i].state == 0) found.push_back(heuristic_of(results[i]));
    return found;
}

Heuristic LtMatmul::check(int device, abi::LtHandle handle, const Bytes &algorithm) {
    ContextGuard guard(device);
    if (handle == nullptr) handle = handle_of(device);
    const abi::LtAlgorithm tested = algorithm_of(algorithm);
    abi::LtHeuristicResult result{};
    std::lock_guard lock(mutex_);
    check_status(CublasLt::get().algorithm_check(handle, descriptor_, layouts_[0], layouts_[1], layouts_[2], layouts_[3], &tested, &result),
                 "cublasLtMatmulAlgoCheck");
    result.algorithm = tested;
    return heuristic_of(result);
}

Bytes LtMatmul::attribute(int number, std::size_t size) const {
    Bytes value(size, '\0');
    std::size_t written = 0;
    check_status(CublasLt::get().desc_get(descriptor_, number, value.data(), size, &written), "cublasLtMatmulDescGetAttribute");
    value.resize(written);
    return value;
}

Bytes LtMatmul::layout_attribute(int which, int number, std::size_t size) const {
    Bytes value(size, '\0');
    std::size_t written = 0;
    check_status(CublasLt::get().layout_get(layouts_.at(which), number, value.data(), size, &written), "cublasLtMatrixLayoutGetAttribute");
    value.resize(written);
    return value;
}

// ---------------------------------------------------------------- LtLaunch

LtLaunch::LtLaunch(std::shared_ptr<LtMatmul> matmul, int device, const Bytes &algorithm, std::size_t workspace_bytes,
                   const Scalars &scalars, bool swapped, bool c_is_d, bool has_bias, bool has_aux, std::size_t zeroed_aux_bytes,
                   std::uint64_t handle, std::string what)
    : matmul_(std::move(matmul)),
      device_(device),
      algorithm_(algorithm_of(algorithm)),
      workspace_bytes_(workspace_bytes),
      scalars_(scalars),
      swapped_(swapped),
      c_is_d_(c_is_d),
      has_bias_(has_bias),
      has_aux_(has_aux),
      zeroed_aux_bytes_(zeroed_aux_bytes),
      handle_(handle != 0 ? reinterpret_cast<abi::LtHandle>(handle) : handle_of(device)),
      what_(std::move(what)) {}

void LtLaunch::run(abi::Address a, abi::Address b, abi::Address c, abi::Address d, abi::Address bias, abi::Address aux,
                   std::uintptr_t stream, const Scalars *scalars, abi::Address workspace) {
    ContextGuard guard(device_);
    std::lock_guard lock(matmul_->mutex_);
    if (has_bias_) matmul_->set_pointer(abi::kDescriptorBias, bias);
    if (has_aux_) matmul_->set_pointer(abi::kDescriptorAux, aux);
    zero_aux(aux, stream);
    launch(a, b, c, d, stream, scalars, workspace);
}

void LtLaunch::run_with(const Pointers &pointers, abi::Address a, abi::Address b, abi::Address c, abi::Address d, std::uintptr_t stream,
                        const Scalars *scalars, abi::Address workspace) {
    ContextGuard guard(device_);
    std::lock_guard lock(matmul_->mutex_);
    for (const auto &[attribute, address] : pointers) {
        matmul_->set_pointer(attribute, address);
        if (attribute == abi::kDescriptorAux) zero_aux(address, stream);
    }
    launch(a, b, c, d, stream, scalars, workspace);
}

void LtLaunch::zero_aux(abi::Address aux, std::uintptr_t stream) const {
    if (zeroed_aux_bytes_ > 0)
        driver_call(&Driver::fill, "cuMemsetD8Async", "the auxiliary output's padding", aux, static_cast<unsigned char>(0), zeroed_aux_bytes_,
                    reinterpret_cast<abi::Stream>(stream));
}

void LtLaunch::launch(abi::Address a, abi::Address b, abi::Address c, abi::Address d, std::uintptr_t stream, const Scalars *given,
                      abi::Address workspace) {
    const auto cuda_stream = reinterpret_cast<abi::Stream>(stream);
    const WorkspaceLease lease(device_, cuda_stream, workspace == 0 ? workspace_bytes_ : 0);
    const Scalars &scalars = given != nullptr ? *given : scalars_;
    const auto &layouts = matmul_->layouts_;
    if (swapped_) std::swap(a, b);
    if (c == 0 && c_is_d_) c = d;
    const abi::Status status = CublasLt::get().matmul(handle_, matmul_->descriptor_, scalars.alpha(), a, layouts[0], b, layouts[1],
                                                      scalars.beta(), c, layouts[2], d, layouts[3], &algorithm_,
                                                      workspace == 0 ? lease.address() : workspace, workspace_bytes_, cuda_stream);
    if (status != 0) check_status(status, "cublasLtMatmul", what_);
}

}  // namespace epigemm
