// Byte-level BPE with GPT-2's pre-tokeniser: what the encoder's parts share.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace bpe {

// Readers look at whole vectors: every buffer of text has this many zero bytes behind its end.
constexpr size_t kPadding = 64;

enum Class : uint8_t { kOther = 0, kLetter = 1, kNumber = 2, kSpace = 3 };

struct Merge {
    uint32_t rank;
    uint32_t id;
};

// (left id, right id) -> merge, open addressing.
class Pairs {
  public:
    void build(const int64_t* left_right_id, size_t n);

    const Merge* find(uint32_t left, uint32_t right) const {
        const uint64_t key = uint64_t{left} << 32 | right;
        for (uint64_t i = spread(key) & mask_;; i = (i + 1) & mask_) {
            if (keys_[i] == key) return &merges_[i];
            if (keys_[i] == kEmpty) return nullptr;
        }
    }

  private:
    static constexpr uint64_t kEmpty = ~uint64_t{0};
    static uint64_t spread(uint64_t key) {
        key *= 0x9E3779B97F4A7C15ULL;
        return key ^ (key >> 29);
    }
    std::vector<uint64_t> keys_;
    std::vector<Merge> merges_;
    uint64_t mask_ = 0;
};

// Read-only after building, shared by all threads.
struct Vocabulary {
    uint32_t byte_id[256];
    Pairs pairs;
    std::vector<uint8_t> classes;  // of every code point
    std::string special;           // the one special token's text, empty: none is looked for
    uint32_t special_id = 0;
};

// Ids of one word by its merges, appended to `out`: lowest rank first, the leftmost of equals.
void merge_word(const Vocabulary& vocabulary, const uint8_t* word, size_t n, std::vector<uint32_t>& out);

// Words seen before, two to a set: most are short and of few ids, and lie in half a cache line. A word that fits
// neither kind is merged each time.
class WordCache {
  public:
    WordCache();

    // Appends the ids of word[0, n) to `out`. kPadding bytes behind the word are readable.
    void encode(const Vocabulary& vocabulary, const uint8_t* word, size_t n, std::vector<uint32_t>& out);

  private:
    static constexpr size_t kShortBytes = 15, kLongBytes = 31, kShortIds = 3, kLongIds = 7;
    static constexpr int kShortBits = 17, kLongBits = 14;  // log2 of the number of sets
    struct Short {
        uint64_t low, high;  // the bytes, and in the last one how many they are
        uint32_t ids[kShortIds];
        uint32_t n;
    };
    struct Long {
        uint64_t key[4];  // likewise
        uint32_t ids[kLongIds];
        uint32_t n;
    };
    std::vector<Short> short_;
    std::vector<Long> long_;
};

// Cuts text[0, n) into words as GPT-2's expression does and appends their ids. `special` true: each occurrence of the
// special token's text becomes its id and parts the text.
void encode_text(const Vocabulary&, WordCache&, const uint8_t* text, size_t n, bool special, std::vector<uint32_t>& out);

// One code point of valid UTF-8; returns its length in bytes.
inline int decode(const uint8_t* p, uint32_t& point) {
    if (p[0] < 0x80) return point = p[0], 1;
    if (p[0] < 0xE0) return point = (p[0] & 0x1Fu) << 6 | (p[1] & 0x3Fu), 2;
    if (p[0] < 0xF0) return point = (p[0] & 0x0Fu) << 12 | (p[1] & 0x3Fu) << 6 | (p[2] & 0x3Fu), 3;
    return point = (p[0] & 0x07u) << 18 | (p[1] & 0x3Fu) << 12 | (p[2] & 0x3Fu) << 6 | (p[3] & 0x3Fu), 4;
}

// Length of the UTF-8 sequence at p, 0 where it is not valid (overlong, surrogate, too large, cut off).
int utf8_length(const uint8_t* p, const uint8_t* end);

enum class Line { kText, kBlank, kRefused };

// Finds the string under `key` of the JSON object on one line and writes its UTF-8 to `text`, padding behind it.
// kRefused: not certainly what Python's json would accept (or an odd case left to it); nothing is decided then.
// Behind `end` kPadding bytes are readable.
Line text_of_line(const uint8_t* line, const uint8_t* end, const std::string& key, std::vector<uint8_t>& text,
                  size_t& n_text);

}  // namespace bpe
