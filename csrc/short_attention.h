// softmax(scale q k^T) v for short sequences and narrow heads in float32, and its gradients.
//
// Processes one head of one sample at a time, copied into rows padded to whole vectors. Queries are processed in
// blocks, so that the weights of a block stay in the L2 cache. The backward pass recomputes the weights (Dao et al.,
// arXiv 2205.14135).
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <initializer_list>
#include <limits>
#include <stdexcept>

#include "vectors.h"

namespace py = pybind11;

namespace short_attention {

using vectors::Floats;
using vectors::WIDTH;

constexpr int64_t QUERIES = 64;  // per block
constexpr float MASKED = -std::numeric_limits<float>::infinity();

// View of an array [B, H, S, K]. Strides are in floats; the stride of K is 1.
struct Heads {
    float* at;
    int64_t batch, heads, length, width, by_sample, by_head, by_position;
    float* head(int64_t i) const { return at + i / heads * by_sample + i % heads * by_head; }
};

// Shape of one head: length x width, padded to rows x columns.
struct Window {
    int64_t length, width, rows, columns;
    bool causal;
    int64_t n_visible(int64_t query) const { return causal ? std::min(query + 1, length) : length; }
    // Keys visible to any of the WIDTH queries from `query`, rounded up to whole vectors.
    int64_t reach(int64_t query) const { return causal ? query + WIDTH : rows; }
};

struct Gradients {
    Heads q, k, v;
};

// Padded copies of one head for the backward pass; _transposed: [columns, rows]. grad_scores and weights: one block.
struct Packed {
    float *queries, *keys, *keys_transposed, *values_transposed, *grads, *grad_k, *grad_v, *grad_q, *weights,
        *grad_scores;
};

#define KERNEL "attention_heads.inc"
#include "two_targets.inc"

using Array = py::array_t<float>;

static Heads view_heads(Array& array, const char* name, bool written) {
    constexpr int64_t size = sizeof(float);
    bool fits = array.ndim() == 4 && array.strides(3) == size;
    for (int axis = 0; fits && axis < 3; ++axis) fits = array.strides(axis) % size == 0;
    if (!fits) throw std::invalid_argument(std::string(name) + ": expected [B, H, S, K], rows of K contiguous");
    float* at = written ? array.mutable_data() : const_cast<float*>(array.data());
    return {at,
            array.shape(0),
            array.shape(1),
            array.shape(2),
            array.shape(3),
            array.strides(0) / size,
            array.strides(1) / size,
            array.strides(2) / size};
}

static Window check_window(std::initializer_list<Heads> all, bool causal) {
    const Heads& first = *all.begin();
    for (const Heads& heads : all)
        if (heads.batch != first.batch || heads.heads != first.heads || heads.length != first.length ||
            heads.width != first.width)
            throw std::invalid_argument("q, k, v and the results: got different shapes, expected one [B, H, S, K]");
    return {first.length, first.width, vectors::round_up(first.length), vectors::round_up(first.width), causal};
}

static void attend(Array q, Array k, Array v, bool causal, float scale, Array out, int64_t n_threads) {
    const Heads queries = view_heads(q, "q", false), keys = view_heads(k, "k", false);
    const Heads values = view_heads(v, "v", false);
    const Heads result = view_heads(out, "out", true);
    const Window window = check_window({queries, keys, values, result}, causal);
    py::gil_scoped_release release;
    const int64_t work = window.rows * window.rows * window.columns / WIDTH;
    vectors::in_threads(queries.batch * queries.heads, work, n_threads, [&](int64_t first, int64_t last) {
        (HAS_AVX2 ? avx2::attend_heads : plain::attend_heads)(window, queries, keys, values, scale, result, first,
                                                              last);
    });
}

static void attend_backward(Array q, Array k, Array v, Array grad, bool causal, float scale, Array grad_q,
                            Array grad_k, Array grad_v, int64_t n_threads) {
    const Heads queries = view_heads(q, "q", false), keys = view_heads(k, "k", false);
    const Heads values = view_heads(v, "v", false);
    const Heads grads = view_heads(grad, "grad", false);
    const Gradients to{view_heads(grad_q, "grad_q", true), view_heads(grad_k, "grad_k", true),
                       view_heads(grad_v, "grad_v", true)};
    const Window window = check_window({queries, keys, values, grads, to.q, to.k, to.v}, causal);
    py::gil_scoped_release release;
    const int64_t work = window.rows * window.rows * window.columns / WIDTH * 3;
    vectors::in_threads(queries.batch * queries.heads, work, n_threads, [&](int64_t first, int64_t last) {
        (HAS_AVX2 ? avx2::attend_heads_backward : plain::attend_heads_backward)(window, queries, keys, values, grads,
                                                                                scale, to, first, last);
    });
}

inline void bind(py::module_& m) {
    m.def("short_attention", &attend, py::arg("q").noconvert(), py::arg("k").noconvert(), py::arg("v").noconvert(),
          py::arg("causal"), py::arg("scale"), py::arg("out").noconvert(), py::arg("n_threads"),
          "Write softmax(scale q k^T) v to out; all float32 [B, H, S, K]; causal: position p attends to 0..p.");
    m.def("short_attention_backward", &attend_backward, py::arg("q").noconvert(), py::arg("k").noconvert(),
          py::arg("v").noconvert(), py::arg("grad").noconvert(), py::arg("causal"), py::arg("scale"),
          py::arg("grad_q").noconvert(), py::arg("grad_k").noconvert(), py::arg("grad_v").noconvert(),
          py::arg("n_threads"), "Write the gradients of q, k and v, given the gradient of the result.");
}

}  // namespace short_attention
