#include "automaton.h"

#include <algorithm>
#include <bit>
#include <stdexcept>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace bpe {

const uint8_t* skip_ascii_letters(const uint8_t* p) {
#if defined(__SSE2__)
    for (;; p += 16) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        const __m128i lower = _mm_or_si128(bytes, _mm_set1_epi8(0x20));
        // Signed comparison: bytes >= 0x80 are negative and thus no letters.
        const __m128i letters = _mm_and_si128(_mm_cmpgt_epi8(lower, _mm_set1_epi8('a' - 1)),
                                              _mm_cmplt_epi8(lower, _mm_set1_epi8('z' + 1)));
        const unsigned others = ~static_cast<unsigned>(_mm_movemask_epi8(letters)) & 0xFFFFu;
        if (others) return p + std::countr_zero(others);
    }
#else
    while (static_cast<uint8_t>((*p | 0x20) - 'a') < 26) ++p;
    return p;
#endif
}

Automaton::Automaton(const uint8_t* classes, const uint16_t* transitions, size_t n_states, size_t n_classes)
    : classes_(classes, classes + 0x110000), n_classes_(n_classes) {
    if (n_states < 2 || n_states > kState || !n_classes) throw std::invalid_argument("transitions: got no states");
    if (*std::max_element(classes_.begin(), classes_.end()) >= n_classes)
        throw std::invalid_argument("classes: got a class without a transition");
    for (size_t i = 0; i < n_states * (n_classes + 1); ++i)
        if ((transitions[i] & kState) >= n_states) throw std::invalid_argument("transitions: got an unknown state");
    ascii_.resize(n_states * 128);
    wide_.resize(n_states * n_classes);
    for (size_t state = 0; state < n_states; ++state) {
        const uint16_t* row = transitions + state * (n_classes + 1);
        std::copy(row, row + n_classes, &wide_[state * n_classes]);
        for (size_t c = 0; c < 128; ++c) ascii_[state << 7 | c] = row[classes_[c]];
        matches_at_end_.push_back(row[n_classes] >> 15);
    }
    find_properties(n_states);
}

void Automaton::find_properties(size_t n_states) {
    for (size_t c = 0; c < 128; ++c) can_start_[c] = (ascii_[kStart << 7 | c] & kState) != 0;
    auto is_letter = [](size_t c) { return static_cast<uint8_t>((c | 0x20) - 'a') < 26; };
    for (size_t state = 0; state < n_states; ++state) {
        const uint16_t first = ascii_[state << 7 | 'A'];
        bool is_loop = state && (first & kState) == state;
        for (size_t c = 'A'; c <= 'z'; ++c) {
            if (!is_letter(c)) continue;
            const uint16_t next = ascii_[state << 7 | c];
            is_loop &= next == first;
            const uint32_t after = next & kState, blank = ascii_[after << 7 | ' '];
            if (state == kStart) splits_before_blank_ &= after != 0;  // so every letter can start a word
            if (!after) continue;
            ends_before_blank_ &= (blank & kState) == 0 && (blank & kMatch) == (matches_at_end_[after] ? kMatch : 0);
            splits_before_blank_ &= blank == kMatch;
        }
        letter_loop_.push_back(!is_loop ? kNoLoop : first & kMatch ? kMatchingLoop : kPlainLoop);
    }
}

const uint8_t* Automaton::gap_end(const uint8_t* p, const uint8_t* end) const {
    for (;;) {
        uint32_t point;
        p += decode(p, point);
        while (p < end && *p < 0x80 && !can_start_[*p]) ++p;
        if (p >= end) return end;
        if (match(p, end)) return p;
    }
}

}  // namespace bpe
