// GPT-2's pre-tokeniser, by hand:
//   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
// The classes of code points come from the `tokenizers` library (megatron/tokenizer/classes.py).
#include <algorithm>
#include <bit>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "bpe.h"

namespace bpe {

int utf8_length(const uint8_t* p, const uint8_t* end) {
    auto next = [&](int i) { return p + i < end && (p[i] & 0xC0) == 0x80; };
    if (p[0] < 0x80) return 1;
    if (p[0] < 0xC2) return 0;
    if (p[0] < 0xE0) return next(1) ? 2 : 0;
    if (p[0] < 0xF0) {
        if (!next(1) || !next(2)) return 0;
        if (p[0] == 0xE0 && p[1] < 0xA0) return 0;
        return p[0] == 0xED && p[1] > 0x9F ? 0 : 3;
    }
    if (p[0] > 0xF4 || !next(1) || !next(2) || !next(3)) return 0;
    if (p[0] == 0xF0 && p[1] < 0x90) return 0;
    return p[0] == 0xF4 && p[1] > 0x8F ? 0 : 4;
}

namespace {

struct Point {
    uint8_t kind;
    int length;
};

Point point_at(const Vocabulary& v, const uint8_t* p) {
    uint32_t point;
    const int length = decode(p, point);
    return {v.classes[point], length};
}

// First byte behind the ASCII letters at p; may be past the text's end, where zeros lie.
const uint8_t* skip_ascii_letters(const uint8_t* p) {
#if defined(__SSE2__)
    for (;; p += 16) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        const __m128i lower = _mm_or_si128(bytes, _mm_set1_epi8(0x20));
        // signed comparisons; bytes of 0x80 and over are negative and no letters
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

const uint8_t* skip_letters(const Vocabulary& v, const uint8_t* p, const uint8_t* end) {
    for (;;) {
        p = skip_ascii_letters(p);
        if (p >= end) return end;
        if (*p < 0x80) return p;
        const Point point = point_at(v, p);
        if (point.kind != kLetter) return p;
        p += point.length;
    }
}

const uint8_t* skip_class(const Vocabulary& v, const uint8_t* p, const uint8_t* end, uint8_t kind) {
    while (p < end) {
        const Point point = point_at(v, p);
        if (point.kind != kind) break;
        p += point.length;
    }
    return p;
}

// Length of the contraction at p ('s 't 're 've 'm 'll 'd), 0 for none. Zeros lie behind the end.
int contraction(const uint8_t* p, const uint8_t* end) {
    const uint8_t a = p[1], b = p[2];
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return p + 2 <= end ? 2 : 0;
    const bool two = (a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l');
    return two && p + 3 <= end ? 3 : 0;
}

// End of the word made of white space at p: a run that something follows leaves its last one to it.
const uint8_t* space_word(const Vocabulary& v, const uint8_t* p, const uint8_t* end) {
    const uint8_t *q = p, *last = p;
    while (q < end) {
        const Point point = point_at(v, q);
        if (point.kind != kSpace) break;
        last = q;
        q += point.length;
    }
    return q < end && last > p ? last : q;
}

// End of the word that begins at p.
const uint8_t* word_end(const Vocabulary& v, const uint8_t* p, const uint8_t* end) {
    if (*p == '\'') {
        if (const int length = contraction(p, end)) return p + length;
    }
    const uint8_t* q = p + (*p == ' ');
    const uint8_t kind = q < end ? point_at(v, q).kind : static_cast<uint8_t>(kSpace);
    if (kind == kLetter) return skip_letters(v, q, end);
    if (kind == kSpace) return space_word(v, p, end);
    return skip_class(v, q, end, kind);
}

// The cache is larger than a core's own: words are begun kAhead before they are finished, so that a fetch from farther
// away has time to arrive.
constexpr size_t kAhead = 16;

void encode_part(const Vocabulary& v, WordCache& cache, const uint8_t* p, const uint8_t* end, Ids& ids) {
    uint32_t* out = ids.room(static_cast<size_t>(end - p));
    WordCache::Probe probes[kAhead];
    size_t begun = 0, finished = 0;
    while (p < end) {
        const uint8_t* stop = word_end(v, p, end);
        if (begun - finished == kAhead) out = cache.finish(v, probes[finished++ % kAhead], out);
        probes[begun++ % kAhead] = cache.begin(p, static_cast<size_t>(stop - p));
        p = stop;
    }
    while (finished < begun) out = cache.finish(v, probes[finished++ % kAhead], out);
    ids.end_at(out);
}

}  // namespace

void encode_text(const Vocabulary& v, WordCache& cache, const uint8_t* text, size_t n, bool special, Ids& out) {
    const uint8_t *p = text, *end = text + n;
    if (special && !v.special.empty()) {
        const size_t length = v.special.size();
        for (const uint8_t* at = p; at + length <= end;) {
            at = static_cast<const uint8_t*>(std::memchr(at, v.special[0], end - at));
            if (!at || at + length > end) break;
            if (std::memcmp(at, v.special.data(), length) != 0) {
                ++at;
                continue;
            }
            encode_part(v, cache, p, at, out);
            out.push(v.special_id);
            p = at += length;
        }
    }
    encode_part(v, cache, p, end, out);
}

}  // namespace bpe
