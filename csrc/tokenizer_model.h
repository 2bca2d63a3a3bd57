// Vocabulary and merges of a BPE tokenizer.json, read without objects of Python.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

namespace bpe {

// Numbers of pieces in the order of `add`, a hash table with open addressing. The caller keeps the pieces in place.
class PieceNumbers {
  public:
    explicit PieceNumbers(size_t n) : slots_(std::bit_ceil(2 * n + 2)) { pieces_.reserve(n); }

    size_t size() const { return pieces_.size(); }

    // Return false if the piece is present; then it keeps its number.
    bool add(std::string_view piece) {
        const uint64_t hash = hash_of(piece);
        uint64_t& slot = slots_[find_slot(piece, hash)];
        if (slot) return false;
        pieces_.push_back(piece);
        slot = hash << 32 | pieces_.size();
        return true;
    }

    // Return the number of a piece, or kAbsent.
    static constexpr size_t kAbsent = ~size_t{0};
    size_t find(std::string_view piece) const {
        const uint64_t slot = slots_[find_slot(piece, hash_of(piece))];
        return slot ? (slot & 0xFFFFFFFF) - 1 : kAbsent;
    }

  private:
    static uint64_t hash_of(std::string_view piece) {
        uint64_t hash = piece.size();
        for (size_t i = 0; i < piece.size(); i += 8) {
            uint64_t word = 0;
            std::memcpy(&word, piece.data() + i, piece.size() - i < 8 ? piece.size() - i : 8);
            hash = (hash ^ word) * 0x9E3779B97F4A7C15ULL;
            hash ^= hash >> 32;
        }
        return hash;
    }
    size_t find_slot(std::string_view piece, uint64_t hash) const {
        size_t i = hash & (slots_.size() - 1);
        while (slots_[i] && (slots_[i] >> 32 != (hash & 0xFFFFFFFF) || pieces_[(slots_[i] & 0xFFFFFFFF) - 1] != piece))
            i = (i + 1) & (slots_.size() - 1);
        return i;
    }
    std::vector<uint64_t> slots_;  // low half of the hash, and number + 1; 0: empty
    std::vector<std::string_view> pieces_;
};

class TokenizerModel {
  public:
    // Numbers of pieces.
    struct Merge {
        uint32_t left, right, joined;
    };

    // Parse a tokenizer.json. Throws std::invalid_argument for invalid JSON, a model without `vocab` and `merges`, and
    // for files that the library reads in a way of its own (equal pieces, ids or merges, a merge without its result).
    explicit TokenizerModel(const std::string& content);

    size_t size() const { return ids_.size(); }
    std::string_view piece(size_t number) const {
        return std::string_view(text_).substr(begins_[number], begins_[number + 1] - begins_[number]);
    }
    uint32_t id(size_t number) const { return ids_[number]; }
    uint32_t largest_id() const { return largest_; }
    static constexpr size_t kAbsent = PieceNumbers::kAbsent;
    size_t find(std::string_view piece) const { return numbers_.find(piece); }  // number of a piece, or kAbsent
    const std::vector<Merge>& merges() const { return merges_; }

    // JSON of the file, with an empty vocabulary and no merges.
    const std::string& settings() const { return settings_; }

    // The vocabulary in the order of ids, and the merges as pairs, as the library writes them.
    std::string vocab_json() const;
    std::string merges_json() const;

  private:
    void parse_vocab(std::string_view json);
    void parse_merges(std::string_view json);
    void add_merge(std::string_view left, std::string_view right);

    std::string settings_, text_;   // text_: all pieces
    std::vector<uint32_t> begins_;  // of the pieces in `text_`, and its end
    std::vector<uint32_t> ids_;
    PieceNumbers numbers_{0};
    std::vector<Merge> merges_;
    uint32_t largest_ = 0;
};

}  // namespace bpe
