// megatron._csrc: pure functions over arrays. Arrays of another dtype are rejected, not converted. The GIL is released
// during the computation.
//
// Three files include pybind11, which takes most of the time of a compilation: this one, kernels.cpp and tokenizer.cpp.
#include <pybind11/pybind11.h>

#include "check_index.h"
#include "map_file.h"
#include "mixture.h"
#include "sample_starts.h"
#include "shuffled.h"

void bind_kernels(py::module_& m);
void bind_tokenizer(py::module_& m);

PYBIND11_MODULE(_csrc, m) {
    m.doc() = "C++ extension of megatron: pure functions over numpy arrays.";
    check_index::bind(m);
    map_file::bind(m);
    mixture::bind(m);
    sample_starts::bind(m);
    shuffled::bind(m);
    bind_kernels(m);
    bind_tokenizer(m);
}
