// RMSNorm, x / sqrt(mean(x^2) + eps) * gain over rows in float32, and its gradients, in one pass each.
//
// PyTorch on the CPU uses five operations forward and about twelve backward.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cmath>
#include <stdexcept>

#include "vectors.h"

namespace py = pybind11;

namespace rms_norm {

using Array = py::array_t<float, py::array::c_style>;
using vectors::Floats;
using vectors::WIDTH;

constexpr int64_t BLOCK = 256;  // rows whose gradients of the gain are summed in float32

struct Rows {
    const float *x, *gain;
    float *out, *inverse;
    int64_t width;
    float eps;
};

struct GradientRows {
    const float *x, *gain, *inverse, *grad;
    float* grad_x;
    int64_t width;
};

#define KERNEL "norm_rows.inc"
#include "two_targets.inc"

static void check(bool fits) {
    if (!fits) throw std::invalid_argument("rms_norm: got wrong shapes, expected [N, D], [D] and [N]");
}

static bool is_matrix(const Array& a, int64_t n, int64_t width) {
    return a.ndim() == 2 && a.shape(0) == n && a.shape(1) == width;
}

static bool is_vector(const Array& a, int64_t n) { return a.ndim() == 1 && a.shape(0) == n; }

static void forward(const Array& x, const Array& gain, float eps, Array out, Array inverse, int64_t n_threads) {
    check(x.ndim() == 2 && x.shape(1) > 0);
    const int64_t n = x.shape(0), width = x.shape(1);
    check(is_vector(gain, width) && is_matrix(out, n, width) && is_vector(inverse, n));
    const Rows rows{x.data(), gain.data(), out.mutable_data(), inverse.mutable_data(), width, eps};
    py::gil_scoped_release release;
    vectors::in_threads(n, width, n_threads, [&](int64_t begin, int64_t end) {
        (HAS_AVX2 ? avx2::norm_rows : plain::norm_rows)(rows, begin, end);
    });
}

static void backward(const Array& x, const Array& gain, const Array& inverse, const Array& grad, Array grad_x,
                     Array grad_gain, int64_t n_threads) {
    check(x.ndim() == 2 && x.shape(1) > 0);
    const int64_t n = x.shape(0), width = x.shape(1), n_blocks = (n + BLOCK - 1) / BLOCK;
    check(is_vector(gain, width) && is_vector(inverse, n) && is_matrix(grad, n, width) &&
          is_matrix(grad_x, n, width) && is_vector(grad_gain, width));
    const GradientRows rows{x.data(), gain.data(), inverse.data(), grad.data(), grad_x.mutable_data(), width};
    float* total = grad_gain.mutable_data();
    py::gil_scoped_release release;
    // Partial sums per block, not per thread: the result does not depend on the number of threads.
    std::vector<float> sums(n_blocks * width);
    vectors::in_threads(n_blocks, BLOCK * width, n_threads, [&](int64_t first, int64_t last) {
        for (int64_t block = first; block < last; ++block)
            (HAS_AVX2 ? avx2::norm_rows_backward : plain::norm_rows_backward)(
                rows, block * BLOCK, std::min(n, (block + 1) * BLOCK), sums.data() + block * width);
    });
    std::vector<double> exact(width);
    for (int64_t block = 0; block < n_blocks; ++block)
        for (int64_t j = 0; j < width; ++j) exact[j] += static_cast<double>(sums[block * width + j]);
    for (int64_t j = 0; j < width; ++j) total[j] = static_cast<float>(exact[j]);
}

inline void bind(py::module_& m) {
    m.def("rms_norm", &forward, py::arg("x").noconvert(), py::arg("gain").noconvert(), py::arg("eps"),
          py::arg("out").noconvert(), py::arg("inverse").noconvert(), py::arg("n_threads"),
          "Write x / sqrt(mean(x^2) + eps) * gain to out, and the inverse root of each row to inverse; float32 [N, D], "
          "[D], [N].");
    m.def("rms_norm_backward", &backward, py::arg("x").noconvert(), py::arg("gain").noconvert(),
          py::arg("inverse").noconvert(), py::arg("grad").noconvert(), py::arg("grad_x").noconvert(),
          py::arg("grad_gain").noconvert(), py::arg("n_threads"),
          "Write the gradients of x [N, D] and gain [D], given the gradient of the result and the inverse roots.");
}

}  // namespace rms_norm
