// megatron._csrc: pure functions over arrays. Arrays of another dtype are rejected, not converted. The GIL is released
// during the computation.
#include <pybind11/pybind11.h>

namespace py = pybind11;

void bind_check_index(py::module_& m);
void bind_encode(py::module_& m);
void bind_map_file(py::module_& m);
void bind_mixture(py::module_& m);
void bind_rms_norm(py::module_& m);
void bind_sample_starts(py::module_& m);
void bind_short_attention(py::module_& m);
void bind_shuffled(py::module_& m);
void bind_softmax_nll(py::module_& m);

PYBIND11_MODULE(_csrc, m) {
    m.doc() = "C++ extension of megatron: pure functions over numpy arrays.";
    bind_check_index(m);
    bind_encode(m);
    bind_map_file(m);
    bind_mixture(m);
    bind_rms_norm(m);
    bind_sample_starts(m);
    bind_short_attention(m);
    bind_shuffled(m);
    bind_softmax_nll(m);
}
