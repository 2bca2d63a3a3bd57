// Python bindings of vocabularies: tables that all threads share. Workers (encode.h) have caches and buffers.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdlib.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include "bpe.h"
#include "tokenizer_model.h"

namespace py = pybind11;

namespace vocabulary {

using Ints = py::array_t<int64_t, py::array::c_style>;
using Bytes = py::array_t<uint8_t, py::array::c_style>;
using Shorts = py::array_t<uint16_t, py::array::c_style>;
using bpe::TokenizerModel;
using bpe::Vocabulary;

namespace {

constexpr size_t kCodePoints = 0x110000;

// Rows (left, right, merged) of ids, in the order of rank.
Ints merge_ids(const TokenizerModel& model) {
    Ints rows({static_cast<py::ssize_t>(model.merges().size()), static_cast<py::ssize_t>(3)});
    int64_t* row = rows.mutable_data();
    for (const TokenizerModel::Merge& merge : model.merges())
        for (const uint32_t number : {merge.left, merge.right, merge.joined}) *row++ = model.id(number);
    return rows;
}

void set_merges(Vocabulary& v, const Ints& merges) {
    if (merges.ndim() != 2 || merges.shape(1) != 3) throw std::invalid_argument("merges: expected [n, 3]");
    v.pairs.build(merges.data(), static_cast<size_t>(merges.shape(0)));
    for (int64_t i = 0; i < merges.shape(0); ++i) v.is_narrow &= merges.data()[3 * i + 2] <= 0xFFFF;
}

std::shared_ptr<Vocabulary> make_vocabulary(const Ints& byte_ids, const Ints& merges) {
    if (byte_ids.ndim() != 1 || byte_ids.size() != 256) throw std::invalid_argument("byte_ids: expected [256]");
    auto vocabulary = std::make_shared<Vocabulary>();
    for (int i = 0; i < 256; ++i) vocabulary->byte_id[i] = static_cast<uint32_t>(byte_ids.data()[i]);
    set_merges(*vocabulary, merges);
    for (uint32_t left : vocabulary->byte_id)
        for (uint32_t right : vocabulary->byte_id)
            vocabulary->byte_pairs.push_back(vocabulary->pairs.find(left, right));
    for (uint32_t id : vocabulary->byte_id) vocabulary->is_narrow &= id <= 0xFFFF;
    return vocabulary;
}

// Return the only code point of a piece, or none.
std::optional<uint32_t> single_point(std::string_view piece) {
    uint32_t point;
    if (piece.empty()) return std::nullopt;
    const int length = bpe::decode(reinterpret_cast<const uint8_t*>(piece.data()), point);
    return static_cast<size_t>(length) == piece.size() ? std::optional(point) : std::nullopt;
}

std::string byte_piece(int byte) {
    static constexpr char kDigits[] = "0123456789ABCDEF";
    return std::string("<0x") + kDigits[byte >> 4] + kDigits[byte & 15] + ">";
}

std::shared_ptr<Vocabulary> make_character_vocabulary(const TokenizerModel& model, const std::string& prefix,
                                                      bool splits_words, bool normalizes) {
    using bpe::Characters;
    static const std::pair<const char*, Characters::Prefix> kPrefixes[] = {{"none", Characters::kNone},
                                                                           {"every", Characters::kEvery},
                                                                           {"missing", Characters::kMissing},
                                                                           {"first", Characters::kFirstMissing}};
    const auto named = std::find_if(std::begin(kPrefixes), std::end(kPrefixes),
                                    [&](const auto& known) { return prefix == known.first; });
    if (named == std::end(kPrefixes)) throw std::invalid_argument("prefix: got " + prefix);
    auto vocabulary = std::make_shared<Vocabulary>();
    std::vector<uint32_t> byte_ids;
    std::vector<bool> is_byte(model.size());
    for (int byte = 0; byte < 256; ++byte) {
        const size_t number = model.find(byte_piece(byte));
        const bool is_in_utf8 = byte != 0xC0 && byte != 0xC1 && byte < 0xF5, is_absent = number == TokenizerModel::kAbsent;
        if (is_absent && is_in_utf8) throw std::invalid_argument("the vocabulary lacks " + byte_piece(byte));
        byte_ids.push_back(is_absent ? 0 : model.id(number));
        if (!is_absent) is_byte[number] = true;
    }
    std::vector<std::pair<uint32_t, uint32_t>> point_ids;
    for (size_t i = 0; i < model.size(); ++i) {
        vocabulary->is_narrow &= model.id(i) <= 0xFFFF;
        if (const auto point = single_point(model.piece(i))) point_ids.emplace_back(*point, model.id(i));
    }
    vocabulary->characters.build(point_ids, std::move(byte_ids), {named->second, splits_words, normalizes});
    for (const TokenizerModel::Merge& merge : model.merges()) {
        if (is_byte[merge.left] || is_byte[merge.right])
            throw std::invalid_argument("a merge joins the token of a byte");
        vocabulary->characters.add_merge(model.piece(merge.left), model.piece(merge.right));
    }
    set_merges(*vocabulary, merge_ids(model));
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

// Pieces with characters outside `letters`, the characters of bytes 0 to 255, occur in no word.
void set_whole_words(Vocabulary& v, const TokenizerModel& model, const Ints& letters) {
    std::vector<int> byte_of(0x200, -1);
    if (letters.ndim() != 1 || letters.size() != 256) throw std::invalid_argument("letters: expected [256]");
    for (int byte = 0; byte < 256; ++byte) byte_of.at(static_cast<size_t>(letters.data()[byte])) = byte;
    std::vector<uint8_t> bytes;
    std::vector<uint32_t> ends, ids;
    for (size_t number = 0; number < model.size(); ++number) {
        const std::string_view text = model.piece(number);
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
        ids.push_back(model.id(number));
    }
    for (uint32_t id : ids) v.is_narrow &= id <= 0xFFFF;
    v.whole.build(std::move(bytes), ends, ids);
}

// Return rows (left, right, merged) of ids for a vocabulary that its merges define, as GPT-2's: the lines of `pieces`
// have the first ids, and each line of `merges`, "left right", defines the next id. Raises KeyError for a piece that no earlier line defines, and
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
    bpe::PieceNumbers ids(static_cast<size_t>(n_lines(pieces) + n_lines(merges)));
    for_lines(pieces, [&](std::string_view piece) { ids.add(piece); });
    std::string joined;  // all merged pieces; `ids` holds views of it, so it must not reallocate
    joined.reserve(merges.size());
    std::vector<int64_t> rows;
    auto id_of = [&](std::string_view piece) {
        const size_t id = ids.find(piece);
        if (id == TokenizerModel::kAbsent) throw py::key_error(std::string(piece));
        return static_cast<int64_t>(id);
    };
    for_lines(merges, [&](std::string_view line) {
        const size_t blank = line.find(' ');
        if (blank == std::string_view::npos)
            throw std::invalid_argument("merges: got " + std::string(line) + ", expected two pieces");
        const std::string_view left = line.substr(0, blank), right = line.substr(blank + 1);
        const size_t begin = joined.size();
        joined.append(left).append(right);
        rows.insert(rows.end(), {id_of(left), id_of(right), static_cast<int64_t>(ids.size())});
        if (!ids.add(std::string_view(joined).substr(begin)))
            throw std::invalid_argument("merges: got two of the result " + joined.substr(begin));
    });
    Ints result({static_cast<py::ssize_t>(rows.size() / 3), static_cast<py::ssize_t>(3)});
    std::copy(rows.begin(), rows.end(), result.mutable_data());
    return result;
}


py::object find_piece(const TokenizerModel& model, const std::string& piece) {
    const size_t number = model.find(piece);
    return number == TokenizerModel::kAbsent ? py::none() : py::object(py::int_(model.id(number)));
}

// Pieces of one character.
std::vector<std::string> single_characters(const TokenizerModel& model) {
    std::vector<std::string> pieces;
    for (size_t i = 0; i < model.size(); ++i)
        if (single_point(model.piece(i))) pieces.emplace_back(model.piece(i));
    return pieces;
}

// glibc keeps freed memory for later requests; what a vocabulary was built from is larger than the vocabulary.
void release_memory() {
#if defined(__GLIBC__)
    ::malloc_trim(0);
#endif
}

}  // namespace

inline void bind(py::module_& m) {
    py::class_<TokenizerModel>(m, "TokenizerModel", "Vocabulary and merges of a BPE tokenizer.json.")
        .def(py::init([](const py::bytes& content) { return TokenizerModel(std::string(content)); }),
             py::arg("content"))
        .def("__len__", &TokenizerModel::size)
        .def_property_readonly("largest_id", &TokenizerModel::largest_id)
        .def_property_readonly("settings", &TokenizerModel::settings,
                               "JSON of the file, with an empty vocabulary and no merges.")
        .def("find", &find_piece, py::arg("piece"), "Return the id of a piece, or None.")
        .def("single_characters", &single_characters, "Return the pieces of one character.")
        .def("vocab_json", [](const TokenizerModel& model) { return py::bytes(model.vocab_json()); },
             "Return the vocabulary in the order of ids, as `tokenizers` writes it.")
        .def("merges_json", [](const TokenizerModel& model) { return py::bytes(model.merges_json()); },
             "Return the merges as pairs of pieces, as `tokenizers` writes them.")
        .def("merge_ids", &merge_ids, "Return ids (left, right, merged) of the merges, [n, 3].");
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
        .def("set_whole_words", &set_whole_words, py::arg("model"), py::arg("letters").noconvert(),
             "Use the id of a word that is a piece of the vocabulary; character of each byte in pieces.");
    m.def("bpe_vocabulary", &make_vocabulary, py::arg("byte_ids").noconvert(), py::arg("merges").noconvert(),
          "Byte-level BPE vocabulary: id of each byte [256]; ids (left, right, merged) in the order of rank [n, 3].");
    m.def("character_vocabulary", &make_character_vocabulary, py::arg("model"), py::arg("prefix"),
          py::arg("splits_words"), py::arg("normalizes"),
          "BPE vocabulary of characters with byte fallback, in which U+2581 is a blank. A blank is added to `prefix` "
          "parts of a text between added tokens: none, every, missing (without one), first (the start of the text, if "
          "missing). `splits_words`: merges are within words. `normalizes`: blanks are replaced before added tokens "
          "of normalized text are searched. Raises ValueError for a vocabulary that is not of this kind.");
    m.def("release_memory", &release_memory, "Return freed memory to the operating system.");
    m.def("ranked_merge_ids", &ranked_merge_ids, py::arg("pieces"), py::arg("merges"),
          "Ids (left, right, merged) of merges [n, 3], for a vocabulary whose first ids belong to the lines of "
          "`pieces`, and the next ones to the lines of `merges`.");
}

}  // namespace vocabulary
