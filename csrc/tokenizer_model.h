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

// Hash table piece -> number with open addressing. The caller keeps the pieces in place.
class PieceIds {
  public:
    explicit PieceIds(size_t n) : slots_(std::bit_ceil(2 * n + 2)) {}

    // Return false if the piece is present; then it keeps its number.
    bool add(std::string_view piece, int64_t id) {
        Slot& slot = slots_[find_slot(piece)];
        if (slot.piece.data()) return false;
        slot = {piece, id};
        return true;
    }
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
            std::memcpy(&word, piece.data() + i, piece.size() - i < 8 ? piece.size() - i : 8);
            hash = (hash ^ word) * 0x9E3779B97F4A7C15ULL;
            hash ^= hash >> 32;
        }
        size_t i = hash & (slots_.size() - 1);
        while (slots_[i].piece.data() && slots_[i].piece != piece) i = (i + 1) & (slots_.size() - 1);
        return i;
    }
    std::vector<Slot> slots_;
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
    const int64_t* find(std::string_view piece) const { return numbers_.find(piece); }  // number of a piece
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
    std::vector<size_t> begins_;    // of the pieces in `text_`, and its end
    std::vector<uint32_t> ids_;
    PieceIds numbers_{0};
    std::vector<Merge> merges_;
    uint32_t largest_ = 0;
};

}  // namespace bpe
