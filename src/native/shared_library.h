// A library opened at run time by path. It stays open as long as the process: what it gave out may be in use anywhere.
#pragma once

#include <dlfcn.h>

#include <string>

#include "errors.h"

namespace epigemm {

class SharedLibrary {
public:
    SharedLibrary(std::string name, const std::string &path) : name_(std::move(name)), path_(path) {
        handle_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (handle_ == nullptr) {
            const char *why = dlerror();
            throw MissingError(name_, why != nullptr ? why : "it cannot be opened");
        }
    }

    // The function, or null where this version of the library does not have it.
    template <class F>
    void load(F *&function, const char *symbol) const {
        function = reinterpret_cast<F *>(dlsym(handle_, symbol));
    }

    const std::string &path() const { return path_; }

private:
    std::string name_, path_;
    void *handle_ = nullptr;
};

}  // namespace epigemm
