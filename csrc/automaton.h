// Automata that find the words of a split pattern. megatron/tokenizer/automaton.py compiles them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace bpe {

// Decode one code point of valid UTF-8; return its length in bytes.
inline int decode(const uint8_t* p, uint32_t& point) {
    if (p[0] < 0x80) return point = p[0], 1;
    if (p[0] < 0xE0) return point = (p[0] & 0x1Fu) << 6 | (p[1] & 0x3Fu), 2;
    if (p[0] < 0xF0) return point = (p[0] & 0x0Fu) << 12 | (p[1] & 0x3Fu) << 6 | (p[2] & 0x3Fu), 3;
    return point = (p[0] & 0x07u) << 18 | (p[1] & 0x3Fu) << 12 | (p[2] & 0x3Fu) << 6 | (p[3] & 0x3Fu), 4;
}

// Return the first byte after the ASCII letters at p. It may be in the zero padding after the end of the text.
const uint8_t* skip_ascii_letters(const uint8_t* p);

class Automaton {
  public:
    // `transitions` is [n_states, n_classes + 1]: next state, and kMatch if the text before the character is a match;
    // the last column is the end of the text. State 0 is dead, state 1 the start. Throws std::invalid_argument.
    Automaton(const uint8_t* classes, const uint16_t* transitions, size_t n_states, size_t n_classes);

    // Return the end of the match at p, or null. kPadding bytes after `end` are readable.
    const uint8_t* match(const uint8_t* p, const uint8_t* end) const {
        uint32_t state = kStart;
        const uint8_t* last = nullptr;
        while (p < end) {
            uint32_t next;
            int length = 1;
            if (*p < 0x80) {
                next = ascii_[state << 7 | *p];
            } else {
                uint32_t point;
                length = decode(p, point);
                next = wide_[state * n_classes_ + classes_[point]];
            }
            if (next & kMatch) last = p;
            state = next & kState;
            if (!state) return last;
            p += length;
            if (const uint8_t loop = letter_loop_[state]) {
                const uint8_t* after = skip_ascii_letters(p);
                if (after > end) after = end;
                if (after > p && loop == kMatchingLoop) last = after - 1;
                p = after;
            }
        }
        return matches_at_end_[state] ? end : last;
    }

    // Return the end of the text without a match at p: the start of the next match, or `end`.
    const uint8_t* gap_end(const uint8_t* p, const uint8_t* end) const;

    // Return whether no match reads on from an ASCII letter to a blank, and the end of the text has the same effect.
    bool ends_before_blank() const { return ends_before_blank_; }

    // Return whether in addition a match ends there, whatever the text around them.
    bool splits_before_blank() const { return splits_before_blank_; }

  private:
    static constexpr uint32_t kStart = 1, kMatch = 0x8000, kState = 0x7FFF;
    enum Loop : uint8_t { kNoLoop, kPlainLoop, kMatchingLoop };
    void find_properties(size_t n_states);

    std::vector<uint16_t> ascii_;  // [n_states * 128]
    std::vector<uint16_t> wide_;   // [n_states * n_classes]
    std::vector<uint8_t> classes_;
    std::vector<uint8_t> matches_at_end_;
    std::vector<uint8_t> letter_loop_;  // whether ASCII letters lead from a state to itself, with or without a match
    size_t n_classes_;
    bool can_start_[128];  // ASCII characters that do not lead from the start to the dead state
    bool ends_before_blank_ = true, splits_before_blank_ = true;
};

}  // namespace bpe
