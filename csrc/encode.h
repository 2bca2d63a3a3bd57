// Python bindings of encoding; the vocabulary is in vocabulary.h.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>

#include "encode_lines.h"

namespace py = pybind11;

namespace encode {

using Ints = py::array_t<int64_t, py::array::c_style>;
using Bytes = py::array_t<uint8_t, py::array::c_style>;

namespace {

// Run `work` without the GIL. A std::system_error becomes an OSError.
template <typename Work>
void without_gil(Work work) {
    int failed = 0;
    {
        py::gil_scoped_release release;
        try {
            work();
        } catch (const std::system_error& error) {
            failed = error.code().value();
        }
    }
    if (!failed) return;
    errno = failed;
    PyErr_SetFromErrno(PyExc_OSError);
    throw py::error_already_set();
}

bpe::LinesJob job_of(const bpe::Worker& w, const std::string& key, bool special, int64_t eod, bool wide, int ids_out,
                     int lengths_out) {
    if (!wide && (!w.vocabulary->is_narrow || eod > 0xFFFF))
        throw std::invalid_argument("wide: got false, expected true: the vocabulary has ids that need 32 bits");
    return {key, special, eod, wide, ids_out, lengths_out};
}

py::tuple as_tuple(const bpe::LinesResult& result) {
    return py::make_tuple(result.next, result.n_documents, result.n_tokens, result.n_lines, result.refused);
}

py::tuple encode_lines(bpe::Worker& w, int input, int64_t begin, int64_t end, const std::string& key, bool special,
                       int64_t eod, bool wide, int ids_out, int lengths_out) {
    const bpe::LinesJob job = job_of(w, key, special, eod, wide, ids_out, lengths_out);
    bpe::LinesResult result;
    without_gil([&] { result = bpe::encode_range(w, input, begin, end, job); });
    return as_tuple(result);
}

py::tuple encode_texts(bpe::Worker& w, const Bytes& texts, const Ints& ends, bool special, int64_t eod,
                       bool is_normalized) {
    if (texts.ndim() != 1 || ends.ndim() != 1) throw std::invalid_argument("texts, ends: expected one dimension");
    const int64_t n = texts.size();
    int64_t begin = 0;
    for (int64_t i = 0; i < ends.size(); begin = ends.data()[i++])
        if (ends.data()[i] < begin || ends.data()[i] > n)
            throw std::invalid_argument("ends: expected ascending offsets within texts");
    py::array_t<int32_t> lengths(ends.size());
    int32_t* length = lengths.mutable_data();
    bool valid = true;
    {
        py::gil_scoped_release release;
        w.wide_ids.clear();
        begin = 0;
        for (int64_t i = 0; i < ends.size() && valid; ++i) {
            const size_t size = static_cast<size_t>(ends.data()[i] - begin), before = w.wide_ids.size();
            // a copy, to append the padding
            w.text.resize(std::max(w.text.size(), size + bpe::kPadding));
            std::memcpy(w.text.data(), texts.data() + begin, size);
            std::memset(w.text.data() + size, 0, bpe::kPadding);
            for (const uint8_t *p = w.text.data(), *stop = p + size; p < stop && valid;) {
                const int step = bpe::utf8_length(p, stop);
                valid = step > 0;
                p += step;
            }
            if (!valid) break;
            begin = ends.data()[i];
            uint8_t rank = 0;
            if (!is_normalized && !bpe::is_nfc(*w.vocabulary, w.text.data(), size, rank)) {
                length[i] = -1;
                continue;
            }
            bpe::encode_text(*w.vocabulary, w.cache, w.text.data(), size, special, w.wide_ids);
            if (eod >= 0) w.wide_ids.push(static_cast<uint32_t>(eod));
            length[i] = static_cast<int32_t>(w.wide_ids.size() - before);
        }
    }
    if (!valid) throw std::invalid_argument("texts: got bytes that are not UTF-8");
    py::array_t<uint32_t> ids(static_cast<py::ssize_t>(w.wide_ids.size()));
    std::memcpy(ids.mutable_data(), w.wide_ids.data(), 4 * w.wide_ids.size());
    return py::make_tuple(ids, lengths);
}

}  // namespace

inline void bind(py::module_& m) {
    py::class_<bpe::Worker>(m, "BpeWorker").def(py::init<std::shared_ptr<bpe::Vocabulary>>());
    m.def("encode_lines", &encode_lines, py::arg("worker"), py::arg("input"), py::arg("begin"), py::arg("end"),
          py::arg("key"), py::arg("special"), py::arg("eod"), py::arg("wide"), py::arg("ids_out"),
          py::arg("lengths_out"),
          "Encode the JSON lines in bytes [begin, end) of a file descriptor; write ids (uint16, or int32 if wide) and "
          "int32 lengths to two others. Returns (next, documents, tokens, lines, refused): if refused, Python must "
          "parse the line at byte `next`, and all lines before it are written.");
    m.def("encode_texts", &encode_texts, py::arg("worker"), py::arg("texts").noconvert(), py::arg("ends").noconvert(),
          py::arg("special"), py::arg("eod"), py::arg("is_normalized") = false,
          "Ids (uint32) and int32 lengths of concatenated UTF-8 texts; text i ends at byte ends[i]. A text that may "
          "not be in NFC has the length -1 and no ids, if the vocabulary requires NFC and the texts are not normalized.");
}

}  // namespace encode
