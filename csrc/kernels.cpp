// Operations of a training step on the CPU.
#include <pybind11/pybind11.h>

#include "rms_norm.h"
#include "short_attention.h"
#include "softmax_nll.h"

void bind_kernels(py::module_& m) {
    rms_norm::bind(m);
    short_attention::bind(m);
    softmax_nll::bind(m);
}
