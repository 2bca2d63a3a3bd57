// Python bindings of the encoder: a vocabulary that all threads share, and a worker (cache and buffers) per thread.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include "encode_lines.h"

namespace py = pybind11;
using Ints = py::array_t<int64_t, py::array::c_style>;
using Bytes = py::array_t<uint8_t, py::array::c_style>;
using Shorts = py::array_t<uint16_t, py::array::c_style>;

namespace {

constexpr size_t kCodePoints = 0x110000;

// Return a view of a str, valid as long as the object.
std::string_view text_of(const py::handle& word) {
    Py_ssize_t n = 0;
    const char* text = PyUnicode_AsUTF8AndSize(word.ptr(), &n);
    if (!text) throw py::error_already_set();
    return std::string_view(text, static_cast<size_t>(n));
}

using Vocabulary = bpe::Vocabulary;

std::shared_ptr<Vocabulary> make_vocabulary(const Ints& byte_ids, const Ints& merges) {
    if (byte_ids.ndim() != 1 || byte_ids.size() != 256) throw std::invalid_argument("byte_ids: expected [256]");
    if (merges.ndim() != 2 || merges.shape(1) != 3) throw std::invalid_argument("merges: expected [n, 3]");
    auto vocabulary = std::make_shared<Vocabulary>();
    for (int i = 0; i < 256; ++i) vocabulary->byte_id[i] = static_cast<uint32_t>(byte_ids.data()[i]);
    vocabulary->pairs.build(merges.data(), static_cast<size_t>(merges.shape(0)));
    for (uint32_t left : vocabulary->byte_id)
        for (uint32_t right : vocabulary->byte_id)
            vocabulary->byte_pairs.push_back(vocabulary->pairs.find(left, right));
    for (int64_t i = 0; i < merges.shape(0); ++i) vocabulary->is_narrow &= merges.data()[3 * i + 2] <= 0xFFFF;
    for (uint32_t id : vocabulary->byte_id) vocabulary->is_narrow &= id <= 0xFFFF;
    return vocabulary;
}

const uint8_t* check_table(const Bytes& table, const char* name) {
    if (table.ndim() != 1 || static_cast<size_t>(table.size()) != kCodePoints)
        throw std::invalid_argument(std::string(name) + ": expected [0x110000]");
    return table.data();
}

void use_gpt2_pattern(Vocabulary& v, const Bytes& classes) {
    const uint8_t* kinds = check_table(classes, "classes");
    for (int c = 0; c < 128; ++c)
        if (kinds[c] != bpe::class_of_ascii(static_cast<uint8_t>(c)))
            throw std::invalid_argument("classes: got an ASCII character whose class differs from the built-in one");
    v.classes.assign(kinds, kinds + kCodePoints);
    v.is_gpt2 = true;
}

void add_stage(Vocabulary& v, const Bytes& classes, const Shorts& transitions, bool drops_gaps) {
    if (transitions.ndim() != 2 || transitions.shape(1) < 2)
        throw std::invalid_argument("transitions: expected [states, classes + 1]");
    v.stages.push_back({bpe::Automaton(check_table(classes, "classes"), transitions.data(),
                                       static_cast<size_t>(transitions.shape(0)),
                                       static_cast<size_t>(transitions.shape(1) - 1)),
                        drops_gaps});
}

// (text, id, single_word, lstrip, rstrip, special)
using TokenRow = std::tuple<std::string, uint32_t, bool, bool, bool, bool>;

void set_added_tokens(Vocabulary& v, const std::vector<TokenRow>& first, const std::vector<TokenRow>& after,
                      const Bytes& kinds) {
    const uint8_t* table = check_table(kinds, "kinds");
    v.point_kinds.assign(table, table + kCodePoints);
    auto tokens_of = [](const std::vector<TokenRow>& rows) {
        std::vector<bpe::AddedToken> tokens;
        for (const auto& [text, id, single_word, lstrip, rstrip, special] : rows)
            tokens.push_back({text, id, single_word, lstrip, rstrip, special});
        return tokens;
    };
    v.added.build(tokens_of(first), &v.point_kinds);
    v.added_after.build(tokens_of(after), &v.point_kinds);
}

// Pieces of other characters than those of `letters`, which have the bytes 0 to 255, occur in no word.
void set_whole_words(Vocabulary& v, const py::dict& pieces, const Ints& letters) {
    std::vector<int> byte_of(0x200, -1);
    if (letters.ndim() != 1 || letters.size() != 256) throw std::invalid_argument("letters: expected [256]");
    for (int byte = 0; byte < 256; ++byte) byte_of.at(static_cast<size_t>(letters.data()[byte])) = byte;
    std::vector<uint8_t> bytes;
    std::vector<uint32_t> ends, ids;
    for (const auto& [piece, id] : pieces) {
        const std::string_view text = text_of(piece);
        const size_t begin = bytes.size();
        bool is_word = false;
        const uint8_t *p = reinterpret_cast<const uint8_t*>(text.data()), *end = p + text.size();
        while (p < end) {
            uint32_t point;
            p += bpe::decode(p, point);
            if (point >= byte_of.size() || byte_of[point] < 0) break;
            bytes.push_back(static_cast<uint8_t>(byte_of[point]));
            is_word = p == end;
        }
        if (!is_word) {
            bytes.resize(begin);
            continue;
        }
        ends.push_back(static_cast<uint32_t>(bytes.size()));
        ids.push_back(id.cast<uint32_t>());
    }
    for (uint32_t id : ids) v.is_narrow &= id <= 0xFFFF;
    v.whole.build(std::move(bytes), ends, ids);
}

// Hash table piece -> id with open addressing. A program that encodes little text spends much of its time filling it.
class PieceIds {
  public:
    explicit PieceIds(size_t n) : slots_(std::bit_ceil(2 * n + 2)) {}
    void add(std::string_view piece, int64_t id) { slots_[find_slot(piece)] = {piece, id}; }
    const int64_t* find(std::string_view piece) const {
        const Slot& slot = slots_[find_slot(piece)];
        return slot.piece.data() ? &slot.id : nullptr;
    }

  private:
    struct Slot {
        std::string_view piece;  // null: empty
        int64_t id = 0;
    };
    size_t find_slot(std::string_view piece) const {
        uint64_t hash = piece.size();
        for (size_t i = 0; i < piece.size(); i += 8) {
            uint64_t word = 0;
            std::memcpy(&word, piece.data() + i, std::min<size_t>(8, piece.size() - i));
            hash = (hash ^ word) * 0x9E3779B97F4A7C15ULL;
            hash ^= hash >> 32;
        }
        size_t i = hash & (slots_.size() - 1);
        while (slots_[i].piece.data() && slots_[i].piece != piece) i = (i + 1) & (slots_.size() - 1);
        return i;
    }
    std::vector<Slot> slots_;
};

// Return rows (left, right, merged) of ids for the merges of a tokenizer.json, each "left right" or [left, right].
// Raises KeyError for a piece that the vocabulary lacks, and ValueError for a merge of another form.
Ints merge_ids(const py::dict& vocabulary, const py::list& merges) {
    Ints rows({static_cast<py::ssize_t>(merges.size()), static_cast<py::ssize_t>(3)});
    int64_t* row = rows.mutable_data();
    PieceIds ids(vocabulary.size());
    for (const auto& [piece, id] : vocabulary) ids.add(text_of(piece), PyLong_AsLongLong(id.ptr()));
    if (PyErr_Occurred()) throw py::error_already_set();
    auto id_of = [&](std::string_view piece) {
        const int64_t* id = ids.find(piece);
        if (!id) throw py::key_error(std::string(piece));
        return *id;
    };
    std::string joined;
    for (const py::handle merge : merges) {
        std::string_view left, right;
        if (py::isinstance<py::str>(merge)) {
            const std::string_view both = text_of(merge);
            const size_t blank = both.find(' ');
            if (blank == std::string_view::npos)
                throw std::invalid_argument("merges: got " + std::string(both) + ", expected two pieces");
            left = both.substr(0, blank), right = both.substr(blank + 1);
        } else {
            const py::sequence pair = py::cast<py::sequence>(merge);
            if (pair.size() != 2) throw std::invalid_argument("merges: expected two pieces");
            left = text_of(pair[0]), right = text_of(pair[1]);
        }
        joined.assign(left).append(right);
        *row++ = id_of(left), *row++ = id_of(right), *row++ = id_of(joined);
    }
    return rows;
}

// As merge_ids, for a vocabulary that its merges define, as GPT-2's: the lines of `pieces` have the first ids, and each
// line of `merges`, "left right", defines the next id. Raises KeyError for a piece that no earlier line defines, and
// ValueError for a line of another form.
Ints ranked_merge_ids(const std::string& pieces, const std::string& merges) {
    auto for_lines = [](std::string_view text, auto visit) {
        while (!text.empty()) {
            const size_t end = std::min(text.find('\n'), text.size());
            visit(text.substr(0, end));
            text.remove_prefix(std::min(text.size(), end + 1));
        }
    };
    const auto n_lines = [](const std::string& text) { return std::count(text.begin(), text.end(), '\n') + 1; };
    PieceIds ids(static_cast<size_t>(n_lines(pieces) + n_lines(merges)));
    int64_t next = 0;
    for_lines(pieces, [&](std::string_view piece) { ids.add(piece, next++); });
    std::string joined;  // all merged pieces; `ids` holds views of it, so it must not reallocate
    joined.reserve(merges.size());
    std::vector<int64_t> rows;
    auto id_of = [&](std::string_view piece) {
        const int64_t* id = ids.find(piece);
        if (!id) throw py::key_error(std::string(piece));
        return *id;
    };
    for_lines(merges, [&](std::string_view line) {
        const size_t blank = line.find(' ');
        if (blank == std::string_view::npos)
            throw std::invalid_argument("merges: got " + std::string(line) + ", expected two pieces");
        const std::string_view left = line.substr(0, blank), right = line.substr(blank + 1);
        const size_t begin = joined.size();
        joined.append(left).append(right);
        rows.insert(rows.end(), {id_of(left), id_of(right), next});
        ids.add(std::string_view(joined).substr(begin), next++);
    });
    Ints result({static_cast<py::ssize_t>(rows.size() / 3), static_cast<py::ssize_t>(3)});
    std::copy(rows.begin(), rows.end(), result.mutable_data());
    return result;
}

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

py::tuple encode_buffer(bpe::Worker& w, const py::buffer& lines, const std::string& key, bool special, int64_t eod,
                        bool wide, int ids_out, int lengths_out) {
    const bpe::LinesJob job = job_of(w, key, special, eod, wide, ids_out, lengths_out);
    const py::buffer_info info = lines.request();
    if (info.itemsize != 1 || info.ndim != 1) throw std::invalid_argument("lines: expected bytes");
    bpe::LinesResult result;
    without_gil([&] {
        result = bpe::encode_block(w, static_cast<const uint8_t*>(info.ptr), static_cast<size_t>(info.size), job);
    });
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

// Add the number of occurrences of each id in `ids` to counts[id].
template <typename T>
void count_ids(const py::array_t<T, py::array::c_style>& ids, Ints& counts) {
    const T* id = ids.data();
    const int64_t n = ids.size(), n_counts = counts.size();
    int64_t* count = counts.mutable_data();
    bool within = true;
    {
        py::gil_scoped_release release;
        int64_t i = 0;
        // A 16-bit id is below n_counts here, so no check is needed; one load reads four ids.
        for (uint64_t four; sizeof(T) == 2 && n_counts > 0xFFFF && i + 4 <= n; i += 4) {
            std::memcpy(&four, id + i, 8);
            ++count[four & 0xFFFF], ++count[four >> 16 & 0xFFFF], ++count[four >> 32 & 0xFFFF], ++count[four >> 48];
        }
        for (; i < n && within; ++i) {
            within = id[i] >= 0 && static_cast<int64_t>(id[i]) < n_counts;
            if (within) ++count[id[i]];
        }
    }
    if (!within) throw std::invalid_argument("ids: got an id that counts has no element for");
}

}  // namespace

void bind_encode(py::module_& m) {
    py::class_<Vocabulary, std::shared_ptr<Vocabulary>>(m, "BpeVocabulary")
        .def("use_gpt2_pattern", &use_gpt2_pattern, py::arg("classes").noconvert(),
             "Split words as GPT-2's pattern does, after all stages; class of each code point.")
        .def("add_stage", &add_stage, py::arg("classes").noconvert(), py::arg("transitions").noconvert(),
             py::arg("drops_gaps"), "Split the pieces of the previous stage by an automaton (automaton.py).")
        .def("set_added_tokens", &set_added_tokens, py::arg("first"), py::arg("after"), py::arg("kinds").noconvert(),
             "Tokens (text, id, single_word, lstrip, rstrip, special) that are searched first, and in what remains; "
             "for each code point 1 if it is a word character, plus 2 if it is stripped.")
        .def("set_combining", [](Vocabulary& v, const Bytes& ranks) {
                 const uint8_t* table = check_table(ranks, "ranks");
                 v.combining.assign(table, table + kCodePoints);
             }, py::arg("ranks").noconvert(),
             "Refuse texts that may not be in NFC: rank of each code point's combining class, or 255.")
        .def("set_whole_words", &set_whole_words, py::arg("pieces"), py::arg("letters").noconvert(),
             "Use the id of a word that is a piece of the vocabulary; character of each byte in pieces.");
    py::class_<bpe::Worker>(m, "BpeWorker").def(py::init<std::shared_ptr<bpe::Vocabulary>>());
    m.def("bpe_vocabulary", &make_vocabulary, py::arg("byte_ids").noconvert(), py::arg("merges").noconvert(),
          "Byte-level BPE vocabulary: id of each byte [256]; ids (left, right, merged) in the order of rank [n, 3].");
    m.def("merge_ids", &merge_ids, py::arg("vocabulary"), py::arg("merges"),
          "Ids (left, right, merged) of the merges of a tokenizer.json, [n, 3].");
    m.def("ranked_merge_ids", &ranked_merge_ids, py::arg("pieces"), py::arg("merges"),
          "As merge_ids, for a vocabulary whose first ids belong to the lines of `pieces`, and the next ones to the "
          "lines of `merges`.");
    m.def("encode_lines", &encode_lines, py::arg("worker"), py::arg("input"), py::arg("begin"), py::arg("end"),
          py::arg("key"), py::arg("special"), py::arg("eod"), py::arg("wide"), py::arg("ids_out"),
          py::arg("lengths_out"),
          "Encode the JSON lines in bytes [begin, end) of a file descriptor; write ids (uint16, or int32 if wide) and "
          "int32 lengths to two others. Returns (next, documents, tokens, lines, refused): if refused, Python must "
          "parse the line at byte `next`, and all lines before it are written.");
    m.def("encode_buffer", &encode_buffer, py::arg("worker"), py::arg("lines"), py::arg("key"), py::arg("special"),
          py::arg("eod"), py::arg("wide"), py::arg("ids_out"), py::arg("lengths_out"),
          "As encode_lines, for whole lines in memory.");
    m.def("encode_texts", &encode_texts, py::arg("worker"), py::arg("texts").noconvert(), py::arg("ends").noconvert(),
          py::arg("special"), py::arg("eod"), py::arg("is_normalized") = false,
          "Ids (uint32) and int32 lengths of concatenated UTF-8 texts; text i ends at byte ends[i]. A text that may "
          "not be in NFC has the length -1 and no ids, if the vocabulary requires NFC and the texts are not normalized.");
    m.def("count_ids", &count_ids<uint16_t>, py::arg("ids").noconvert(), py::arg("counts").noconvert(),
          "Add the number of occurrences of each id in ids to counts[id].");
    m.def("count_ids", &count_ids<int32_t>, py::arg("ids").noconvert(), py::arg("counts").noconvert());
}
