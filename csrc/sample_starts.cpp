// Where each sample begins in a corpus of documents laid end to end.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace py = pybind11;
using Ints = py::array_t<int64_t, py::array::c_style>;

// Row i = (document, token offset inside it) of the first token of sample i.
// A sample is seq_len + 1 tokens; neighbours share one token, documents may be split, empty ones are stepped over.
static Ints sample_starts(const Ints& doc_tokens, int64_t seq_len, int64_t n_samples) {
    if (doc_tokens.ndim() != 1) throw std::invalid_argument("doc_tokens: wanted one dimension");
    if (seq_len < 1) throw std::invalid_argument("seq_len: found " + std::to_string(seq_len) + ", wanted 1 or more");
    if (n_samples < 0) throw std::invalid_argument("n_samples: found " + std::to_string(n_samples) + ", wanted 0 or more");
    const int64_t n_docs = doc_tokens.size();
    const int64_t* sizes = doc_tokens.data();
    Ints starts({n_samples, int64_t{2}});
    int64_t* row = starts.mutable_data();
    int64_t n_held = 0;
    bool enough = true;
    {
        py::gil_scoped_release release;
        for (int64_t d = 0; d < n_docs; ++d) {
            if (sizes[d] < 0) throw std::invalid_argument("doc_tokens[" + std::to_string(d) + "] is negative");
            n_held += sizes[d];
        }
        enough = n_samples == 0 || (n_held - 1) / seq_len >= n_samples;
        int64_t document = 0, offset = 0;
        for (int64_t i = 0; enough && i < n_samples; ++i) {
            while (offset >= sizes[document]) offset -= sizes[document++];
            row[2 * i] = document;
            row[2 * i + 1] = offset;
            offset += seq_len;
        }
    }
    if (!enough)
        throw std::invalid_argument("n_samples: found " + std::to_string(n_samples) + ", but " +
                                    std::to_string(n_held) + " tokens hold fewer windows of " +
                                    std::to_string(seq_len) + " + 1");
    return starts;
}

void bind_sample_starts(py::module_& m) {
    m.def("sample_starts", &sample_starts, py::arg("doc_tokens").noconvert(), py::arg("seq_len"), py::arg("n_samples"),
          "Where each window of seq_len + 1 tokens begins: int64 [n_samples, 2], rows (document, offset).");
}
