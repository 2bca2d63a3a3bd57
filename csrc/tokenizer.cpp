// Vocabularies, and the encoding of text with them.
#include <pybind11/pybind11.h>

#include "encode.h"
#include "vocabulary.h"

void bind_tokenizer(py::module_& m) {
    vocabulary::bind(m);
    encode::bind(m);
}
