// Start of each sample in a corpus whose sequences are concatenated in a given order.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace py = pybind11;

namespace sample_starts {

using Order = py::array_t<int32_t, py::array::c_style>;

constexpr int64_t BLOCK = 16;     // places whose lengths are summed before a search for a row
constexpr int64_t PREFETCH = 64;  // places whose lengths are prefetched: the order accesses them at random

// Return whether places begin..end-1 of the order contain valid sequence numbers.
static bool are_sequences(const int32_t* at, int64_t begin, int64_t end, uint32_t n_sequences) {
    uint32_t largest = 0;
    for (int64_t place = begin; place < end; ++place) largest = std::max(largest, static_cast<uint32_t>(at[place]));
    return begin >= end || largest < n_sequences;
}

// Write n_rows rows. Return false for an invalid order or length, or if the sequences have too few tokens.
template <typename T, typename L>
static bool write_rows(const L* length, int64_t n_lengths, const Order& order, int64_t stride, int64_t n_rows,
                       T* row) {
    const int32_t* at = order.data();
    const int64_t n_places = order.size();
    const uint32_t n_sequences = static_cast<uint32_t>(std::min<int64_t>(n_lengths, INT32_MAX));
    if (!are_sequences(at, 0, std::min(PREFETCH, n_places), n_sequences)) return false;
    int64_t begin = 0, target = 0, n_written = 0;  // tokens before this place; token of the next row
    for (int64_t block = 0; block < n_places && n_written < n_rows; block += BLOCK) {
        const int64_t end_block = std::min(block + BLOCK, n_places);
        const int64_t near = std::min(block + PREFETCH, n_places), far = std::min(near + BLOCK, n_places);
        if (!are_sequences(at, near, far, n_sequences)) return false;
        for (int64_t place = near; place < far; ++place) __builtin_prefetch(length + at[place]);
        int64_t n_tokens = 0, least = 0;
        for (int64_t place = block; place < end_block; ++place) {
            const int64_t size = length[at[place]];
            n_tokens += size;
            least = std::min(least, size);
        }
        if (least < 0) return false;
        if (begin + n_tokens <= target) {
            begin += n_tokens;
            continue;
        }
        for (int64_t place = block; place < end_block; ++place) {
            const int64_t end = begin + length[at[place]];
            for (; target < end && n_written < n_rows; target += stride, ++n_written) {
                row[2 * n_written] = static_cast<T>(place);
                row[2 * n_written + 1] = static_cast<T>(target - begin);
            }
            begin = end;
        }
    }
    return n_written == n_rows;
}

template <typename T>
static py::array rows_of(const py::array& lengths, const Order& order, int64_t stride, int64_t n_rows) {
    py::array_t<T> starts({n_rows, int64_t{2}});
    T* rows = starts.mutable_data();
    const void* data = lengths.data();
    const int64_t n = lengths.size();
    const bool narrow = lengths.itemsize() == 2;
    bool whole = false;
    {
        py::gil_scoped_release release;
        whole = narrow ? write_rows(static_cast<const uint16_t*>(data), n, order, stride, n_rows, rows)
                       : write_rows(static_cast<const int32_t*>(data), n, order, stride, n_rows, rows);
    }
    if (!whole)
        throw std::invalid_argument("order, lengths: got too few tokens for " + std::to_string(n_rows) +
                                    " starts every " + std::to_string(stride) + " tokens");
    return starts;
}

// Row i = (place in the order, token offset in the sequence at that place) of token i * stride in the concatenation of
// sequences of lengths[order[0]], lengths[order[1]], ... tokens. Empty sequences are skipped.
// The result is int32, or int64 if there are more than 2^31 - 1 places. Lengths are int32, or uint16 to save memory.
static py::array sample_starts(const py::array& lengths, const Order& order, int64_t stride, int64_t n_rows) {
    if ((!py::isinstance<py::array_t<int32_t>>(lengths) && !py::isinstance<py::array_t<uint16_t>>(lengths)) ||
        !(lengths.flags() & py::array::c_style))
        throw py::type_error("lengths: expected a contiguous array of int32 or uint16");
    if (lengths.ndim() != 1 || order.ndim() != 1) throw std::invalid_argument("lengths, order: expected one dimension");
    if (stride < 1) throw std::invalid_argument("stride: got " + std::to_string(stride) + ", expected 1 or more");
    if (n_rows < 0) throw std::invalid_argument("n_rows: got " + std::to_string(n_rows) + ", expected 0 or more");
    if (order.size() > INT32_MAX) return rows_of<int64_t>(lengths, order, stride, n_rows);
    return rows_of<int32_t>(lengths, order, stride, n_rows);
}

inline void bind(py::module_& m) {
    m.def("sample_starts", &sample_starts, py::arg("lengths").noconvert(), py::arg("order").noconvert(),
          py::arg("stride"), py::arg("n_rows"),
          "Position of every stride-th token: [n_rows, 2], rows (place in the order, offset in its sequence).");
}

}  // namespace sample_starts
