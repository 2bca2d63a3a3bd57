// Read-only memory map of a file that takes no file descriptor: Python's mmap duplicates one for each map, and a
// process may have 1,024 of them.
#pragma once

#include <fcntl.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace py = pybind11;

namespace map_file {

namespace {

struct Mapping {
    void* begin;
    size_t n_bytes;
};

[[noreturn]] void raise_errno(int number, const std::string& path) {
    errno = number;
    PyErr_SetFromErrnoWithFilename(PyExc_OSError, path.c_str());
    throw py::error_already_set();
}

// Map the first n_bytes of a file, uint8 [n_bytes]. The map ends with the last reference to the array.
py::array map_file(const std::string& path, int64_t n_bytes) {
    if (n_bytes < 1) throw std::invalid_argument("n_bytes: got " + std::to_string(n_bytes) + ", expected 1 or more");
    const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) raise_errno(errno, path);
    struct stat status;
    const bool is_known = ::fstat(file, &status) == 0;
    // reading a page behind the end of the file would end the process
    const bool is_short = is_known && status.st_size < n_bytes;
    void* begin = MAP_FAILED;
    int failed = 0;
    if (is_known && !is_short)
        begin = ::mmap(nullptr, static_cast<size_t>(n_bytes), PROT_READ, MAP_SHARED, file, 0);
    if (!is_short && begin == MAP_FAILED) failed = errno;
    ::close(file);
    if (is_short)
        throw std::invalid_argument(path + ": got " + std::to_string(status.st_size) + " bytes, expected " +
                                    std::to_string(n_bytes) + " or more");
    if (failed) raise_errno(failed, path);
    py::capsule owner(new Mapping{begin, static_cast<size_t>(n_bytes)}, [](void* pointer) {
        auto* mapping = static_cast<Mapping*>(pointer);
        ::munmap(mapping->begin, mapping->n_bytes);
        delete mapping;
    });
    py::array_t<uint8_t> bytes(static_cast<py::ssize_t>(n_bytes), static_cast<const uint8_t*>(begin), owner);
    bytes.attr("setflags")(false);  // a write would end the process
    return bytes;
}

}  // namespace

inline void bind(py::module_& m) {
    m.def("map_file", &map_file, py::arg("path"), py::arg("n_bytes"),
          "Map the first n_bytes of a file read-only, uint8 [n_bytes], without an open file.");
}

}  // namespace map_file
