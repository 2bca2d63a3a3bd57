// Vocabularies of characters with byte fallback, as SentencePiece trains them (Llama-2, Mistral).
//
// Merges apply to a whole text, in which every blank is U+2581. No merge joins two characters that never meet inside a
// piece, so the text is cut between them: each unit has the same ids alone as in the text.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "automaton.h"

namespace bpe {

class Characters {
  public:
    // Which parts of a text (between added tokens) begin with a blank that the text lacks.
    enum Prefix : uint8_t {
        kNone,
        kEvery,         // normalizer Prepend
        kMissing,       // Metaspace "always": parts that do not begin with a blank
        kFirstMissing,  // Metaspace "first": the same for the start of the text only
    };
    struct Settings {
        Prefix prefix = kNone;
        bool splits_words = false;  // a word begins at every blank (Metaspace with split)
        bool normalizes = false;    // blanks are replaced before added tokens of normalized text are searched
    };
    static constexpr uint32_t kNoId = ~uint32_t{0};

    bool empty() const { return byte_ids_.empty(); }
    const Settings& settings() const { return settings_; }

    // Set the ids of characters and of the 256 bytes. The vocabulary has U+2581; else throws std::invalid_argument.
    void build(const std::vector<std::pair<uint32_t, uint32_t>>& point_ids, std::vector<uint32_t> byte_ids, Settings);

    // Add the characters between which merge (left, right) joins two pieces.
    void add_merge(std::string_view left, std::string_view right);

    // Call symbol(id, offset) for each character of text[0, n), or for its bytes.
    template <typename Symbol>
    void for_symbols(const uint8_t* text, size_t n, Symbol symbol) const {
        for (size_t at = 0; at < n;) {
            uint32_t point;
            const size_t length = static_cast<size_t>(point_at(text + at, point));
            const uint32_t id = id_of(point);
            if (id != kNoId) symbol(id, at);
            else
                for (size_t i = 0; i < length; ++i) symbol(byte_ids_[text[at + i]], at + i);
            at += length;
        }
    }

    // Return whether no merge joins these neighbours, each from point_at.
    bool is_cut(uint32_t left, uint32_t right) const {
        if (right == ' ' && settings_.splits_words) return true;
        if ((left | right) < 128) return !(ascii_joins_[left << 7 | right]);
        return !has_pair(left, right);
    }

    // Return the end of the unit that begins at p, p < end. kPadding bytes after `end` are readable.
    const uint8_t* unit_end(const uint8_t* p, const uint8_t* end) const {
        for (;;) {
            uint32_t left, right;
            const uint8_t* after = skip_ascii_letters(p);  // letters are not cut: longer units take fewer lookups
            if (after > p) {
                p = std::min(after, end);
                left = p[-1];
            } else {
                p += point_at(p, left);
            }
            if (p >= end) return end;
            point_at(p, right);
            if (is_cut(left, right)) return p;
        }
    }

    // Decode a character; a blank stands for U+2581 too.
    static int point_at(const uint8_t* p, uint32_t& point) {
        const int length = decode(p, point);
        if (point == kBlank) point = ' ';
        return length;
    }

    static bool is_blank(const uint8_t* p, const uint8_t* end) {
        uint32_t point = 0;
        if (p < end) point_at(p, point);
        return point == ' ';
    }

    // Return the text with U+2581 for each blank, and for the prefix, and zero padding after it.
    std::vector<uint8_t> normalize(const uint8_t* p, const uint8_t* end, bool has_prefix) const;

  private:
    static constexpr uint32_t kBlank = 0x2581, kPage = 256;
    uint32_t id_of(uint32_t point) const { return ids_[pages_[point / kPage] * kPage + point % kPage]; }
    bool has_pair(uint32_t left, uint32_t right) const;
    void add_pair(uint64_t pair);

    Settings settings_;
    std::vector<uint16_t> pages_;     // of 256 code points, as numbers of pages of `ids_`; page 0 has no characters
    std::vector<uint32_t> ids_;
    std::vector<uint32_t> byte_ids_;
    bool ascii_joins_[128 * 128] = {};
    std::vector<uint64_t> pairs_;  // hash table of (left, right) beyond ASCII; 0: empty
    size_t n_pairs_ = 0;
};

}  // namespace bpe
