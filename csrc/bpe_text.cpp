// GPT-2's pre-tokeniser, written by hand. Its regular expression is
//   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
// The classes of code points are derived from the `tokenizers` library (tools/derive_code_points.py).
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

// Return the first byte after the ASCII letters at p. It may be in the zero padding after the end of the text.
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

// Return the length of the contraction at p ('s 't 're 've 'm 'll 'd), or 0. Zero padding follows the end.
int contraction(const uint8_t* p, const uint8_t* end) {
    const uint8_t a = p[1], b = p[2];
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return p + 2 <= end ? 2 : 0;
    const bool two = (a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l');
    return two && p + 3 <= end ? 3 : 0;
}

// Return the end of the white-space word at p. If other text follows the run, the run's last character belongs to that.
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

// Return the end of the word that begins at p.
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

#if defined(__SSE2__)
// One bit for each of 64 bytes.
struct Masks {
    uint64_t letter = 0, number = 0, white = 0, space = 0, quote = 0, beyond_ascii = 0;
};

Masks masks_of(const uint8_t* p) {
    Masks all;
    for (int part = 0; part < 4; ++part) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p) + part);
        // Signed comparison: bytes >= 0x80 are below all others.
        auto within = [](__m128i values, char low, char high) {
            return _mm_and_si128(_mm_cmpgt_epi8(values, _mm_set1_epi8(static_cast<char>(low - 1))),
                                 _mm_cmplt_epi8(values, _mm_set1_epi8(static_cast<char>(high + 1))));
        };
        auto bits = [part](__m128i values) {
            return static_cast<uint64_t>(static_cast<unsigned>(_mm_movemask_epi8(values))) << 16 * part;
        };
        const __m128i space = _mm_cmpeq_epi8(bytes, _mm_set1_epi8(' '));
        all.letter |= bits(within(_mm_or_si128(bytes, _mm_set1_epi8(0x20)), 'a', 'z'));
        all.number |= bits(within(bytes, '0', '9'));
        all.white |= bits(_mm_or_si128(space, within(bytes, '\t', '\r')));
        all.space |= bits(space);
        all.quote |= bits(_mm_cmpeq_epi8(bytes, _mm_set1_epi8('\'')));
        all.beyond_ascii |= bits(bytes);
    }
    return all;
}

// Return a bit mask of the word starts in the 64 bytes from p, where p is a word start. Only starts that these bytes
// alone determine are set, and none before the last of them is missing. If the text ends within the 64 bytes and all
// starts are certain, the end of the text is the last bit.
uint64_t word_starts(const uint8_t* p, const uint8_t* end) {
    const Masks masks = masks_of(p);
    const size_t left = static_cast<size_t>(end - p);
    const uint64_t inside = left < 64 ? (uint64_t{1} << left) - 1 : ~uint64_t{0};
    uint64_t certain = left < 64 ? inside : ~uint64_t{0} >> 1;  // bit 63 depends on the next byte
    const uint64_t beyond_ascii = masks.beyond_ascii & inside;
    if (beyond_ascii) {
        const int first = std::countr_zero(beyond_ascii);
        if (first < 2) return 1;
        certain = (uint64_t{1} << (first - 1)) - 1;
    }
    const uint64_t white = masks.white | ~inside, other = ~(masks.letter | masks.number | white);
    auto first_of = [](uint64_t run) { return run & ~(run << 1); };
    // A run of white space starts a word. So does its last character if other text follows; a blank joins that text.
    uint64_t starts = first_of(white) | (white & ~(white >> 1));
    starts |= (first_of(masks.letter) | first_of(masks.number) | first_of(other)) & ~(masks.space << 1);
    starts = (starts | 1) & certain;
    for (uint64_t quotes = masks.quote & starts; quotes; quotes &= quotes - 1) {
        const int at = std::countr_zero(quotes), length = contraction(p + at, end);
        if (!length) continue;
        if (at + length > 62) {
            starts &= (uint64_t{2} << at) - 1;
            break;
        }
        starts = (starts & ~(uint64_t{2} << at)) | (uint64_t{1} << (at + length) & certain);
    }
    return left < 64 && !beyond_ascii ? starts | uint64_t{1} << left : starts;
}
#endif

// Lookups in flight. The word cache is larger than a core's L2 cache: the prefetched lines arrive while the next words
// are cut.
struct Batch {
    WordCache::Probe probes[64];
    size_t n = 0;
};

// Begin the lookup of up to 64 words from p; return the start of the next word.
const uint8_t* begin_words(const Vocabulary& v, WordCache& cache, const uint8_t* p, const uint8_t* end, Batch& batch) {
    batch.n = 0;
#if defined(__SSE2__)
    uint64_t starts = word_starts(p, end) & ~uint64_t{1};
    if (starts) {
        const uint8_t *block = p;
        for (; starts; starts &= starts - 1) {
            const uint8_t* next = block + std::countr_zero(starts);
            cache.begin(p, static_cast<size_t>(next - p), batch.probes[batch.n++]);
            p = next;
        }
        return p;
    }
#endif
    do {  // non-ASCII text occurs in runs
        const uint8_t* next = word_end(v, p, end);
        cache.begin(p, static_cast<size_t>(next - p), batch.probes[batch.n++]);
        p = next;
    } while (batch.n < 64 && p < end && (p[0] | p[1]) >= 0x80);
    return p;
}

template <typename Id>
void encode_part(const Vocabulary& v, WordCache& cache, const uint8_t* p, const uint8_t* end, Ids<Id>& ids) {
    Id* out = ids.room(static_cast<size_t>(end - p));
    Batch batches[2];
    auto finish = [&](const Batch& batch) {
        for (size_t i = 0; i < batch.n; ++i) out = cache.finish(v, batch.probes[i], out);
    };
    int now = 0;
    for (; p < end; now ^= 1) {
        p = begin_words(v, cache, p, end, batches[now]);
        finish(batches[now ^ 1]);
    }
    finish(batches[now ^ 1]);
    ids.end_at(out);
}

}  // namespace

template <typename Id>
void encode_text(const Vocabulary& v, WordCache& cache, const uint8_t* text, size_t n, bool special, Ids<Id>& out) {
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
            out.push(static_cast<Id>(v.special_id));
            p = at += length;
        }
    }
    encode_part(v, cache, p, end, out);
}

namespace {

// Return the number of leading bytes whose words are certain in a text that continues after its n bytes. The last
// bytes may be the start of a special token.
size_t certain_bytes(const Vocabulary& v, size_t n) {
    return n > v.special.size() + 16 ? n - v.special.size() - 16 : 0;
}

}  // namespace

size_t certain_start(const Vocabulary& v, const uint8_t* text, size_t n) {
    // Return whether a split at `at` would divide a special token, or a special token would split the words around it.
    auto near_special = [&](size_t at) {
        const size_t length = v.special.size(), from = at > length + 8 ? at - length - 8 : 0;
        const size_t to = std::min(n, at + length + 8);
        return length && ::memmem(text + from, to - from, v.special.data(), length) != nullptr;
    };
    const size_t last = certain_bytes(v, n);
    auto letter = [&](size_t i) { return class_of_ascii(text[i]) == kLetter; };
    for (size_t at = last; at > 1; --at)
        if (text[at] == ' ' && letter(at - 1) && letter(at + 1) && !near_special(at)) return at;
    size_t start = 0;
    for (const uint8_t *p = text, *end = text + n; p < end;) {
        p = word_end(v, p, end);
        const size_t at = static_cast<size_t>(p - text);
        if (at > last) break;
        if (!near_special(at)) start = at;
    }
    return start;
}

template <typename Id>
Beginning encode_beginning(const Vocabulary& v, const uint8_t* text, size_t n, Ids<Id>& ids) {
    const size_t certain = certain_bytes(v, n);
    if (word_end(v, text, text + n) < text + certain) return {nullptr, 0, 0};
    if (!v.special.empty() && ::memmem(text, n, v.special.data(), v.special.size())) return {nullptr, 0, 0};
    std::vector<uint32_t> merged(certain);
    const Beginning beginning = merge_beginning(v, text, certain, merged.data());
    for (const uint32_t* id = merged.data(); id < beginning.out; ++id) ids.push(static_cast<Id>(*id));
    return beginning;
}

template Beginning encode_beginning(const Vocabulary&, const uint8_t*, size_t, Ids<uint16_t>&);
template Beginning encode_beginning(const Vocabulary&, const uint8_t*, size_t, Ids<uint32_t>&);
template void encode_text(const Vocabulary&, WordCache&, const uint8_t*, size_t, bool, Ids<uint16_t>&);
template void encode_text(const Vocabulary&, WordCache&, const uint8_t*, size_t, bool, Ids<uint32_t>&);

}  // namespace bpe
