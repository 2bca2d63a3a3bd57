// Ids of whole words, for tokenizers that take a word of the vocabulary before any merge (ignore_merges).
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace bpe {

// Hash table of words with open addressing. The bytes of all words are in one array.
class WholeWords {
  public:
    bool empty() const { return slots_.empty(); }

    // `ends[i]` is the end of word i in `bytes`; words are distinct.
    void build(std::vector<uint8_t> bytes, const std::vector<uint32_t>& ends, const std::vector<uint32_t>& ids) {
        bytes_ = std::move(bytes);
        slots_.assign(std::bit_ceil(2 * ends.size() + 2), Slot{});
        uint32_t begin = 0;
        for (size_t i = 0; i < ends.size(); begin = ends[i++]) {
            const uint32_t n = ends[i] - begin;
            if (!n) continue;
            const uint64_t hash = hash_of(bytes_.data() + begin, n);
            size_t at = hash & (slots_.size() - 1);
            while (slots_[at].n) at = (at + 1) & (slots_.size() - 1);
            slots_[at] = {static_cast<uint32_t>(hash >> 32), begin, n, ids[i]};
        }
    }

    // Return the id of word[0, n), or null.
    const uint32_t* find(const uint8_t* word, size_t n) const {
        const uint64_t hash = hash_of(word, n);
        for (size_t at = hash & (slots_.size() - 1); slots_[at].n; at = (at + 1) & (slots_.size() - 1)) {
            const Slot& slot = slots_[at];
            if (slot.hash == hash >> 32 && slot.n == n && std::memcmp(&bytes_[slot.begin], word, n) == 0)
                return &slot.id;
        }
        return nullptr;
    }

  private:
    struct Slot {
        uint32_t hash = 0, begin = 0, n = 0, id = 0;  // n == 0: empty
    };
    static uint64_t hash_of(const uint8_t* word, size_t n) {
        uint64_t hash = n;
        for (; n; word += 8, n -= n < 8 ? n : 8) {
            uint64_t part = 0;
            std::memcpy(&part, word, n < 8 ? n : 8);
            hash = (hash ^ part) * 0x9E3779B97F4A7C15ULL;
            hash ^= hash >> 32;
        }
        return hash * 0xD6E8FEB86659FD93ULL;
    }
    std::vector<uint8_t> bytes_;
    std::vector<Slot> slots_;
};

}  // namespace bpe
