// Negative log-likelihood, -log softmax(logits)[target], of each row, and its gradient, which overwrites the logits.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <limits>
#include <optional>
#include <stdexcept>

#include "vectors.h"

namespace py = pybind11;

namespace softmax_nll {

using Floats2 = py::array_t<float, py::array::c_style>;
using Targets = py::array_t<int64_t, py::array::c_style>;
using vectors::Floats;
using vectors::WIDTH;

constexpr int64_t BLOCK = 32 * WIDTH;  // exponentials summed in float32 before they are added to a float64 sum

struct Rows {
    float* logits;
    int64_t n_columns;
    const int64_t* targets;
    const float* scale;  // nullptr: 1
    float* nll;
    bool gradient;
};

#define KERNEL "softmax_rows.inc"
#include "two_targets.inc"

static py::array_t<float> run(Floats2& logits, const Targets& targets, const float* scale, bool gradient,
                              int64_t n_threads) {
    if (logits.ndim() != 2 || targets.ndim() != 1 || targets.shape(0) != logits.shape(0))
        throw std::invalid_argument("logits, targets: got wrong shapes, expected [N, V] and [N]");
    const int64_t n = logits.shape(0), n_columns = logits.shape(1);
    py::array_t<float> nll(n);
    float* data = gradient ? logits.mutable_data() : const_cast<float*>(logits.data());
    const Rows rows{data, n_columns, targets.data(), scale, nll.mutable_data(), gradient};
    bool inside = true;
    {
        py::gil_scoped_release release;
        for (int64_t row = 0; row < n; ++row) inside &= rows.targets[row] >= 0 && rows.targets[row] < n_columns;
        if (inside)
            vectors::in_threads(n, n_columns, n_threads, [&](int64_t begin, int64_t end) {
                (HAS_AVX2 ? avx2::do_rows : plain::do_rows)(rows, begin, end);
            });
    }
    if (!inside) throw std::out_of_range("targets: got a target outside 0.." + std::to_string(n_columns - 1));
    return nll;
}

inline void bind(py::module_& m) {
    m.def(
        "softmax_nll",
        [](Floats2 logits, const Targets& targets, int64_t n_threads) {
            return run(logits, targets, nullptr, false, n_threads);
        },
        py::arg("logits").noconvert(), py::arg("targets").noconvert(), py::arg("n_threads"),
        "-log softmax(logits)[target] of each row, float32 [N]; logits float32 [N, V], targets int64 [N].");
    m.def(
        "softmax_nll_gradient",
        [](Floats2 logits, const Targets& targets, const std::optional<Floats2>& scale, int64_t n_threads) {
            if (scale && (scale->ndim() != 1 || scale->shape(0) != targets.size()))
                throw std::invalid_argument("scale: got a wrong shape, expected one number per target");
            return run(logits, targets, scale ? scale->data() : nullptr, true, n_threads);
        },
        py::arg("logits").noconvert(), py::arg("targets").noconvert(), py::arg("scale").noconvert(),
        py::arg("n_threads"),
        "As softmax_nll, unweighted; scale * (softmax - onehot) overwrites the logits. scale: float32 [N], or None: 1.");
}

}  // namespace softmax_nll
