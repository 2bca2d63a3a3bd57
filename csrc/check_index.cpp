// One walk through an index on disk, to see that it makes sense; nothing of it is kept.
#include <pybind11/pybind11.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace py = pybind11;

namespace {

constexpr int64_t kNumbers = 1 << 14;  // read at a time: they stay in a core's own cache

// Numbers of a file, in order. `failed` is the errno of a read that failed, -1 where the file ended too early.
template <typename T>
class Numbers {
  public:
    Numbers(int file, int64_t at, int64_t n) : file_(file), at_(at), left_(n), held_(std::min(n, kNumbers)) {}

    // The next some of them, none at the end; [pointer, how many].
    std::pair<const T*, int64_t> next() {
        const int64_t n = std::min(left_, kNumbers), n_bytes = n * static_cast<int64_t>(sizeof(T));
        char* to = reinterpret_cast<char*>(held_.data());
        for (int64_t held = 0; held < n_bytes;) {
            const ssize_t got = ::pread(file_, to + held, static_cast<size_t>(n_bytes - held), at_ + held);
            if (got < 0 && errno == EINTR) continue;
            if (got <= 0) return failed = got < 0 ? errno : -1, std::pair<const T*, int64_t>{nullptr, 0};
            held += got;
        }
        at_ += n_bytes;
        left_ -= n;
        return {held_.data(), n};
    }

    int failed = 0;

  private:
    int file_;
    int64_t at_, left_;
    std::vector<T> held_;
};

struct Found {
    int64_t n_tokens = 0;
    int32_t longest = 0;
    bool in_order = true, sound = true;
};

int check_sequences(int file, int64_t at, int64_t n, int64_t itemsize, Found& found) {
    Numbers<int32_t> lengths(file, at, n);
    Numbers<int64_t> positions(file, at + 4 * n, n);
    for (;;) {
        const auto [length, n_now] = lengths.next();
        const auto [position, n_there] = positions.next();
        if (lengths.failed || positions.failed) return lengths.failed ? lengths.failed : positions.failed;
        if (!n_now || n_there != n_now) return 0;
        int64_t begin = found.n_tokens * itemsize, wrong = 0;
        int32_t least = 0;
        for (int64_t i = 0; i < n_now; ++i) {
            wrong |= position[i] ^ begin;
            begin += length[i] * itemsize;
            least = std::min(least, length[i]);
            found.longest = std::max(found.longest, length[i]);
        }
        found.in_order &= !wrong;
        found.sound &= least >= 0;
        found.n_tokens = begin / itemsize;
    }
}

int check_documents(int file, int64_t at, int64_t n, int64_t n_sequences, Found& found) {
    Numbers<int64_t> boundaries(file, at, n);
    int64_t last = 0;
    for (bool first = true;; first = false) {
        const auto [boundary, n_now] = boundaries.next();
        if (boundaries.failed || !n_now) {
            found.sound &= last == n_sequences;
            return boundaries.failed;
        }
        if (first) found.sound &= boundary[0] == 0;
        bool rising = true;
        for (int64_t i = 0; i < n_now; last = boundary[i++]) rising &= boundary[i] >= last;
        found.sound &= rising;
    }
}

// What begins at byte `at`: int32 lengths [n_sequences], int64 byte positions [n_sequences], int64 boundaries of
// documents [n_documents + 1], in sequences. Returns (tokens, the longest sequence, whether sequences lie one after
// another, whether no length is negative and the boundaries rise from 0 to n_sequences).
py::tuple check_index(int file, int64_t at, int64_t n_sequences, int64_t n_documents, int64_t itemsize) {
    if (n_sequences < 0 || n_documents < 0 || itemsize < 1) throw std::invalid_argument("check_index: wanted counts");
    Found found;
    int failed = 0;
    {
        py::gil_scoped_release release;
        failed = check_sequences(file, at, n_sequences, itemsize, found);
        if (!failed) failed = check_documents(file, at + 12 * n_sequences, n_documents + 1, n_sequences, found);
    }
    if (failed < 0) throw std::runtime_error("the index became shorter while it was read");
    if (failed) {
        errno = failed;
        PyErr_SetFromErrno(PyExc_OSError);
        throw py::error_already_set();
    }
    return py::make_tuple(found.n_tokens, found.longest, found.in_order, found.sound);
}

}  // namespace

void bind_check_index(py::module_& m) {
    m.def("check_index", &check_index, py::arg("file"), py::arg("at"), py::arg("n_sequences"),
          py::arg("n_documents"), py::arg("itemsize"),
          "Walk through an index from byte `at` of a file descriptor on: (tokens, longest sequence, in order, sound).");
}
