// Quick check of NFC (Unicode Standard Annex 15, section 9), with tables derived from the `tokenizers` library.
#include "bpe.h"

namespace bpe {

namespace {

constexpr uint8_t kUnstable = 255;  // normalization may change a text with this character

}  // namespace

bool is_nfc(const Vocabulary& v, const uint8_t* text, size_t n, uint8_t& rank) {
    if (v.combining.empty()) return true;
    const uint8_t *p = text, *end = text + n;
    while (p < end) {
        uint64_t eight;
        std::memcpy(&eight, p, 8);
        if (!(eight & 0x8080808080808080ULL)) {  // ASCII: starters that never change
            p += 8;
            rank = 0;
            continue;
        }
        uint32_t point;
        p += decode(p, point);
        const uint8_t next = v.combining[point];
        // Marks are sorted by class: a lower class after a higher one would move before it.
        if (next == kUnstable || (next && next < rank)) return false;
        rank = next;
    }
    return true;
}

}  // namespace bpe
