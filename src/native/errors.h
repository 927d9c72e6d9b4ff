// The two ways in which a call into a CUDA library fails. Python words them: epigemm/engines/cuda/libraries.py.
#pragma once

#include <stdexcept>
#include <string>

namespace epigemm {

// A status other than success. `detail` says what was being done.
struct StatusError : std::runtime_error {
    StatusError(std::string library_, std::string call_, int code_, std::string name_, std::string detail_ = "")
        : std::runtime_error(call_ + " returned " + name_ + " (" + std::to_string(code_) + ")"),
          library(std::move(library_)),
          call(std::move(call_)),
          name(std::move(name_)),
          detail(std::move(detail_)),
          code(code_) {}

    std::string library, call, name, detail;
    int code;
};

// A library that is not opened, or a function that the opened one does not have.
struct MissingError : std::runtime_error {
    MissingError(std::string library_, std::string why_) : std::runtime_error(library_ + ": " + why_), library(std::move(library_)), why(std::move(why_)) {}

    std::string library, why;
};

}  // namespace epigemm
