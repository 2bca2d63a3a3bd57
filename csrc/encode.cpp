// Text to ids, bound to Python: a vocabulary that all threads read, and a worker with a cache and buffers for each.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <stdexcept>
#include <system_error>

#include "bpe.h"

namespace py = pybind11;
using Ints = py::array_t<int64_t, py::array::c_style>;
using Bytes = py::array_t<uint8_t, py::array::c_style>;

namespace {

constexpr size_t kBlock = 1 << 20;          // bytes of input read at a time, unless a line is longer
constexpr size_t kFlushedIds = 1 << 17;     // ids held before they are written
constexpr size_t kCodePoints = 0x110000;

struct Worker {
    explicit Worker(std::shared_ptr<bpe::Vocabulary> of) : vocabulary(std::move(of)) {}
    std::shared_ptr<bpe::Vocabulary> vocabulary;
    bpe::WordCache cache;
    bpe::Ids ids;
    std::vector<int32_t> lengths;
    std::vector<uint16_t> narrow;
    std::vector<uint8_t> block, text;
};

std::shared_ptr<bpe::Vocabulary> vocabulary_of(const Ints& byte_ids, const Ints& merges, const Bytes& classes,
                                               const std::string& special, int64_t special_id) {
    if (byte_ids.ndim() != 1 || byte_ids.size() != 256) throw std::invalid_argument("byte_ids: wanted [256]");
    if (merges.ndim() != 2 || merges.shape(1) != 3) throw std::invalid_argument("merges: wanted [n, 3]");
    if (classes.ndim() != 1 || static_cast<size_t>(classes.size()) != kCodePoints)
        throw std::invalid_argument("classes: wanted [0x110000]");
    auto made = std::make_shared<bpe::Vocabulary>();
    for (int i = 0; i < 256; ++i) made->byte_id[i] = static_cast<uint32_t>(byte_ids.data()[i]);
    made->pairs.build(merges.data(), static_cast<size_t>(merges.shape(0)));
    for (uint32_t left : made->byte_id)
        for (uint32_t right : made->byte_id) made->byte_pairs.push_back(made->pairs.find(left, right));
    made->classes.assign(classes.data(), classes.data() + kCodePoints);
    for (int64_t i = 0; i < merges.shape(0); ++i) made->is_narrow &= merges.data()[3 * i + 2] <= 0xFFFF;
    for (uint32_t id : made->byte_id) made->is_narrow &= id <= 0xFFFF;
    made->special = special;
    made->special_id = static_cast<uint32_t>(special_id);
    return made;
}

void write_all(int descriptor, const void* data, size_t n) {
    const char* p = static_cast<const char*>(data);
    while (n > 0) {
        const ssize_t written = ::write(descriptor, p, n);
        if (written < 0) {
            if (errno == EINTR) continue;
            throw std::system_error(errno, std::generic_category());
        }
        p += written;
        n -= static_cast<size_t>(written);
    }
}

void flush(Worker& w, bool wide, int ids_out, int lengths_out) {
    if (wide) {
        write_all(ids_out, w.ids.data(), 4 * w.ids.size());
    } else {
        w.narrow.assign(w.ids.data(), w.ids.data() + w.ids.size());
        write_all(ids_out, w.narrow.data(), 2 * w.narrow.size());
    }
    write_all(lengths_out, w.lengths.data(), 4 * w.lengths.size());
    w.ids.clear();
    w.lengths.clear();
}

// Reads [at, end) of the input until the block holds at least one whole line; returns how many bytes of whole lines.
size_t fill(Worker& w, int input, int64_t at, int64_t end) {
    for (size_t wanted = kBlock;; wanted *= 2) {
        const size_t n = static_cast<size_t>(std::min<int64_t>(static_cast<int64_t>(wanted), end - at));
        if (w.block.size() < n + bpe::kPadding) w.block.resize(n + bpe::kPadding);
        size_t held = 0;
        while (held < n) {
            const ssize_t got = ::pread(input, w.block.data() + held, n - held, at + static_cast<int64_t>(held));
            if (got < 0) {
                if (errno == EINTR) continue;
                throw std::system_error(errno, std::generic_category());
            }
            if (got == 0) throw std::runtime_error("the input became shorter while it was read");
            held += static_cast<size_t>(got);
        }
        std::memset(w.block.data() + n, 0, bpe::kPadding);
        if (at + static_cast<int64_t>(n) == end) return n;
        for (size_t i = n; i > 0; --i)
            if (w.block[i - 1] == '\n') return i;
    }
}

struct Told {
    int64_t next, n_documents, n_tokens, n_lines;
    bool refused;
};

Told encode_range(Worker& w, int input, int64_t begin, int64_t end, const std::string& key, bool special, int64_t eod,
                  bool wide, int ids_out, int lengths_out) {
    Told told{begin, 0, 0, 0, false};
    w.ids.clear();
    w.lengths.clear();
    while (told.next < end && !told.refused) {
        const size_t n = fill(w, input, told.next, end);
        const uint8_t *p = w.block.data(), *stop = p + n;
        while (p < stop) {
            const void* found = std::memchr(p, '\n', static_cast<size_t>(stop - p));
            const uint8_t* line_end = found ? static_cast<const uint8_t*>(found) : stop;
            size_t n_text = 0;
            const bpe::Line kind = bpe::text_of_line(p, line_end, key, w.text, n_text);
            if (kind == bpe::Line::kRefused) {
                told.refused = true;
                break;
            }
            if (kind == bpe::Line::kText) {
                const size_t before = w.ids.size();
                bpe::encode_text(*w.vocabulary, w.cache, w.text.data(), n_text, special, w.ids);
                if (eod >= 0) w.ids.push(static_cast<uint32_t>(eod));
                w.lengths.push_back(static_cast<int32_t>(w.ids.size() - before));
                told.n_tokens += w.lengths.back();
                ++told.n_documents;
                if (w.ids.size() >= kFlushedIds) flush(w, wide, ids_out, lengths_out);
            }
            ++told.n_lines;
            p = found ? line_end + 1 : stop;
        }
        told.next += p - w.block.data();
    }
    flush(w, wide, ids_out, lengths_out);
    return told;
}

py::tuple encode_lines(Worker& w, int input, int64_t begin, int64_t end, const std::string& key, bool special,
                       int64_t eod, bool wide, int ids_out, int lengths_out) {
    Told told{};
    int failed = 0;
    {
        py::gil_scoped_release release;
        try {
            told = encode_range(w, input, begin, end, key, special, eod, wide, ids_out, lengths_out);
        } catch (const std::system_error& error) {
            failed = error.code().value();
        }
    }
    if (failed) {
        errno = failed;
        PyErr_SetFromErrno(PyExc_OSError);
        throw py::error_already_set();
    }
    return py::make_tuple(told.next, told.n_documents, told.n_tokens, told.n_lines, told.refused);
}

py::tuple encode_texts(Worker& w, const Bytes& texts, const Ints& ends, bool special, int64_t eod) {
    if (texts.ndim() != 1 || ends.ndim() != 1) throw std::invalid_argument("texts, ends: wanted one dimension");
    const int64_t n = texts.size();
    int64_t begin = 0;
    for (int64_t i = 0; i < ends.size(); begin = ends.data()[i++])
        if (ends.data()[i] < begin || ends.data()[i] > n) throw std::invalid_argument("ends: wanted rising, within texts");
    py::array_t<int32_t> lengths(ends.size());
    int32_t* length = lengths.mutable_data();
    bool valid = true;
    {
        py::gil_scoped_release release;
        w.ids.clear();
        begin = 0;
        for (int64_t i = 0; i < ends.size() && valid; ++i) {
            const size_t size = static_cast<size_t>(ends.data()[i] - begin), before = w.ids.size();
            // a copy, for the padding behind it
            w.text.resize(std::max(w.text.size(), size + bpe::kPadding));
            std::memcpy(w.text.data(), texts.data() + begin, size);
            std::memset(w.text.data() + size, 0, bpe::kPadding);
            for (const uint8_t *p = w.text.data(), *stop = p + size; p < stop && valid;) {
                const int step = bpe::utf8_length(p, stop);
                valid = step > 0;
                p += step;
            }
            if (!valid) break;
            bpe::encode_text(*w.vocabulary, w.cache, w.text.data(), size, special, w.ids);
            if (eod >= 0) w.ids.push(static_cast<uint32_t>(eod));
            length[i] = static_cast<int32_t>(w.ids.size() - before);
            begin = ends.data()[i];
        }
    }
    if (!valid) throw std::invalid_argument("texts: not UTF-8");
    py::array_t<uint32_t> ids(static_cast<py::ssize_t>(w.ids.size()));
    std::memcpy(ids.mutable_data(), w.ids.data(), 4 * w.ids.size());
    return py::make_tuple(ids, lengths);
}

// Adds to counts[id] how often each id stands in `ids`.
template <typename T>
void count_ids(const py::array_t<T, py::array::c_style>& ids, Ints& counts) {
    const T* id = ids.data();
    const int64_t n = ids.size(), n_counts = counts.size();
    int64_t* count = counts.mutable_data();
    bool within = true;
    {
        py::gil_scoped_release release;
        for (int64_t i = 0; i < n && within; ++i) {
            within = id[i] >= 0 && static_cast<int64_t>(id[i]) < n_counts;
            if (within) ++count[id[i]];
        }
    }
    if (!within) throw std::invalid_argument("ids: one is past the counts");
}

}  // namespace

void bind_encode(py::module_& m) {
    py::class_<bpe::Vocabulary, std::shared_ptr<bpe::Vocabulary>>(m, "BpeVocabulary");
    py::class_<Worker>(m, "BpeWorker").def(py::init<std::shared_ptr<bpe::Vocabulary>>());
    m.def("bpe_vocabulary", &vocabulary_of, py::arg("byte_ids").noconvert(), py::arg("merges").noconvert(),
          py::arg("classes").noconvert(), py::arg("special"), py::arg("special_id"),
          "Byte-level BPE: id of each byte [256]; (left, right, merged) ids in the order of rank [n, 3]; class of each "
          "code point; text and id of the special token.");
    m.def("encode_lines", &encode_lines, py::arg("worker"), py::arg("input"), py::arg("begin"), py::arg("end"),
          py::arg("key"), py::arg("special"), py::arg("eod"), py::arg("wide"), py::arg("ids_out"), py::arg("lengths_out"),
          "Encode the JSON lines in bytes [begin, end) of a file descriptor; ids (uint16, or int32 where wide) and int32 "
          "lengths go to two others. Returns (next, documents, tokens, lines, refused): where refused, the line at byte "
          "`next` is for Python to judge, and all before it is written.");
    m.def("encode_texts", &encode_texts, py::arg("worker"), py::arg("texts").noconvert(), py::arg("ends").noconvert(),
          py::arg("special"), py::arg("eod"),
          "Ids (uint32) and int32 lengths of UTF-8 texts laid end to end, text i ending at byte ends[i].");
    m.def("count_ids", &count_ids<uint16_t>, py::arg("ids").noconvert(), py::arg("counts").noconvert(),
          "Add to counts[id] how often each id stands in ids.");
    m.def("count_ids", &count_ids<int32_t>, py::arg("ids").noconvert(), py::arg("counts").noconvert());
}
