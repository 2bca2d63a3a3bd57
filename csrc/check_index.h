// Checks an index file on disk for consistency in one pass, in constant memory.
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace py = pybind11;

namespace check_index {

namespace {

constexpr int64_t kNumbers = 1 << 14;  // read at a time: they fit into a core's private cache

// Sequential reader of numbers. `failed` is the errno of a failed read, or -1 if the file ended too early.
template <typename T>
class Numbers {
  public:
    Numbers(int file, int64_t at, int64_t n) : file_(file), at_(at), left_(n), buffer_(std::min(n, kNumbers)) {}

    // Return the next block, [pointer, count]; the count is 0 at the end.
    std::pair<const T*, int64_t> next() {
        const int64_t n = std::min(left_, kNumbers), n_bytes = n * static_cast<int64_t>(sizeof(T));
        char* to = reinterpret_cast<char*>(buffer_.data());
        for (int64_t done = 0; done < n_bytes;) {
            const ssize_t got = ::pread(file_, to + done, static_cast<size_t>(n_bytes - done), at_ + done);
            if (got < 0 && errno == EINTR) continue;
            if (got <= 0) return failed = got < 0 ? errno : -1, std::pair<const T*, int64_t>{nullptr, 0};
            done += got;
        }
        at_ += n_bytes;
        left_ -= n;
        return {buffer_.data(), n};
    }

    int failed = 0;

  private:
    int file_;
    int64_t at_, left_;
    std::vector<T> buffer_;
};

struct Findings {
    int64_t n_tokens = 0;
    int32_t longest = 0;
    bool in_order = true, sound = true;
};

int check_sequences(int file, int64_t at, int64_t n, int64_t itemsize, Findings& findings) {
    Numbers<int32_t> lengths(file, at, n);
    Numbers<int64_t> positions(file, at + 4 * n, n);
    for (;;) {
        const auto [length, n_now] = lengths.next();
        const auto [position, n_positions] = positions.next();
        if (lengths.failed || positions.failed) return lengths.failed ? lengths.failed : positions.failed;
        if (!n_now || n_positions != n_now) return 0;
        int64_t begin = findings.n_tokens * itemsize, wrong = 0;
        int32_t least = 0;
        for (int64_t i = 0; i < n_now; ++i) {
            wrong |= position[i] ^ begin;
            begin += length[i] * itemsize;
            least = std::min(least, length[i]);
            findings.longest = std::max(findings.longest, length[i]);
        }
        findings.in_order &= !wrong;
        findings.sound &= least >= 0;
        findings.n_tokens = begin / itemsize;
    }
}

int check_documents(int file, int64_t at, int64_t n, int64_t n_sequences, Findings& findings) {
    Numbers<int64_t> boundaries(file, at, n);
    int64_t last = 0;
    for (bool first = true;; first = false) {
        const auto [boundary, n_now] = boundaries.next();
        if (boundaries.failed || !n_now) {
            findings.sound &= last == n_sequences;
            return boundaries.failed;
        }
        if (first) findings.sound &= boundary[0] == 0;
        bool rising = true;
        for (int64_t i = 0; i < n_now; last = boundary[i++]) rising &= boundary[i] >= last;
        findings.sound &= rising;
    }
}

// Layout from byte `at`: int32 lengths [n_sequences], int64 byte positions [n_sequences], int64 document boundaries
// [n_documents + 1], counted in sequences. Returns (tokens, longest sequence, in_order, sound). in_order: sequences are
// contiguous in the data file. sound: no length is negative, and boundaries ascend from 0 to n_sequences.
py::tuple check_index(int file, int64_t at, int64_t n_sequences, int64_t n_documents, int64_t itemsize) {
    if (n_sequences < 0 || n_documents < 0 || itemsize < 1)
        throw std::invalid_argument("check_index: got a negative count or an item size below 1");
    Findings findings;
    int failed = 0;
    {
        py::gil_scoped_release release;
        failed = check_sequences(file, at, n_sequences, itemsize, findings);
        if (!failed) failed = check_documents(file, at + 12 * n_sequences, n_documents + 1, n_sequences, findings);
    }
    if (failed < 0) throw std::runtime_error("the index became shorter while it was read");
    if (failed) {
        errno = failed;
        PyErr_SetFromErrno(PyExc_OSError);
        throw py::error_already_set();
    }
    return py::make_tuple(findings.n_tokens, findings.longest, findings.in_order, findings.sound);
}

}  // namespace

inline void bind(py::module_& m) {
    m.def("check_index", &check_index, py::arg("file"), py::arg("at"), py::arg("n_sequences"),
          py::arg("n_documents"), py::arg("itemsize"),
          "Check an index that begins at byte `at` of a file descriptor: (tokens, longest sequence, in order, sound).");
}

}  // namespace check_index
