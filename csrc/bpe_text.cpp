// Text to words. Most patterns run as automata; GPT-2's is written by hand, with vector instructions. It is
//   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
// The classes of code points are derived from the `tokenizers` library (csrc/derive_code_points.py).
#include <algorithm>
#include <bit>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "bpe.h"
#include "lookups.h"

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

}  // namespace

const uint8_t* gpt2_word_end(const Vocabulary& v, const uint8_t* p, const uint8_t* end) {
    if (*p == '\'') {
        if (const int length = contraction(p, end)) return p + length;
    }
    const uint8_t* q = p + (*p == ' ');
    const uint8_t kind = q < end ? point_at(v, q).kind : static_cast<uint8_t>(kSpace);
    if (kind == kLetter) return skip_letters(v, q, end);
    if (kind == kSpace) return space_word(v, p, end);
    return skip_class(v, q, end, kind);
}

namespace {

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
        const uint8_t* next = gpt2_word_end(v, p, end);
        cache.begin(p, static_cast<size_t>(next - p), batch.probes[batch.n++]);
        p = next;
    } while (batch.n < kBatch && p < end && (p[0] | p[1]) >= 0x80);
    return p;
}

// Text of GPT-2's pattern to ids.
template <typename Id>
Id* encode_gpt2(const Vocabulary& v, WordCache& cache, const uint8_t* p, const uint8_t* end, Id* out) {
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
    return out;
}

// Text to ids by the stages of a vocabulary.
template <typename Id>
class Stages {
  public:
    Stages(const Vocabulary& v, WordCache& cache, Id* out) : v_(v), lookups_(v, cache, out) {}

    Id* encode(const uint8_t* p, const uint8_t* end) {
        cut(0, p, end);
        return lookups_.finish();
    }

  private:
    // Split [p, end) by stage `number` and all that follow.
    void cut(size_t number, const uint8_t* p, const uint8_t* end) {
        if (number == v_.stages.size()) return cut_last(p, end);
        const Stage& stage = v_.stages[number];
        const bool is_last = number + 1 == v_.stages.size() && !v_.is_gpt2;
        while (p < end) {
            const uint8_t* after = stage.automaton.match(p, end);
            const bool is_gap = !after;
            if (is_gap) after = stage.automaton.gap_end(p, end);
            if (!(is_gap && stage.drops_gaps)) {
                if (is_last) lookups_.push(p, after);
                else cut(number + 1, p, after);
            }
            p = after;
        }
    }

    void cut_last(const uint8_t* p, const uint8_t* end) {
        if (!v_.is_gpt2) return lookups_.push(p, end);
        for (const uint8_t* after; p < end; p = after) lookups_.push(p, after = gpt2_word_end(v_, p, end));
    }

    const Vocabulary& v_;
    Lookups<Id> lookups_;
};

template <typename Id>
void encode_part(const Vocabulary& v, WordCache& cache, const uint8_t* p, const uint8_t* end, Ids<Id>& ids) {
    Id* out = ids.room(static_cast<size_t>(end - p));
    if (v.is_gpt2 && v.stages.empty()) ids.end_at(encode_gpt2(v, cache, p, end, out));
    else ids.end_at(Stages<Id>(v, cache, out).encode(p, end));
}

// A part between added tokens, for a vocabulary of characters. `has_prefix`: a blank comes before it.
template <typename Id>
void encode_characters(const Vocabulary& v, WordCache& cache, const uint8_t* p, const uint8_t* end, bool has_prefix,
                       Ids<Id>& ids) {
    std::vector<uint8_t> first;  // the first unit, after the blank
    Lookups<Id> lookups(v, cache, ids.room(static_cast<size_t>(end - p) + has_prefix));
    if (has_prefix) {
        uint32_t point;
        Characters::point_at(p, point);
        const uint8_t* unit = v.characters.is_cut(' ', point) ? p : v.characters.unit_end(p, end);
        first.assign(1, ' ');
        first.insert(first.end(), p, unit);
        first.resize(first.size() + kPadding);
        lookups.push(first.data(), first.data() + first.size() - kPadding);
        p = unit;
    }
    for (const uint8_t* after; p < end; p = after) lookups.push(p, after = v.characters.unit_end(p, end));
    ids.end_at(lookups.finish());
}

// Text of a vocabulary of characters. Blanks are added to parts at the places where the tokenizer's normalizer or
// Metaspace adds them.
template <typename Id>
void encode_marked(const Vocabulary& v, WordCache& cache, const uint8_t* text, size_t n, bool special, bool continues,
                   Ids<Id>& out) {
    const Characters& characters = v.characters;
    const Characters::Settings& settings = characters.settings();
    auto push = [&](uint32_t id) { out.push(static_cast<Id>(id)); };
    // `is_first`: the text begins here. `is_inside`: it begins earlier, and no added token is before it.
    auto encode = [&](const uint8_t* p, const uint8_t* end, bool is_first, bool is_inside) {
        const bool is_missing = settings.prefix == Characters::kMissing ||
                                (settings.prefix == Characters::kFirstMissing && is_first);
        const bool has_prefix = !is_inside && (settings.prefix == Characters::kEvery ||
                                               (is_missing && !Characters::is_blank(p, end)));
        encode_characters(v, cache, p, end, has_prefix, out);
    };
    auto encode_rest = [&](const uint8_t* p, const uint8_t* end) {
        const bool is_start = p == text, is_inside = is_start && continues;
        if (v.added_after.empty()) return encode(p, end, is_start, is_inside);
        if (!settings.normalizes) {
            auto part = [&](const uint8_t* q, const uint8_t* stop) { encode(q, stop, q == text, q == p && is_inside); };
            return v.added_after.split(p, end, special, part, push);
        }
        const bool is_prefixed = settings.prefix == Characters::kEvery;
        const std::vector<uint8_t> normalized = characters.normalize(p, end, is_prefixed && !is_inside);
        const uint8_t* begin = normalized.data();
        v.added_after.split(begin, begin + normalized.size() - kPadding, special,
                            [&](const uint8_t* q, const uint8_t* stop) {
                                const bool is_begin = q == begin;
                                encode(q, stop, is_begin && is_start, is_prefixed || (is_begin && is_inside));
                            }, push);
    };
    if (v.added.empty()) {
        if (n) encode_rest(text, text + n);
    } else {
        v.added.split(text, text + n, special, encode_rest, push);
    }
}

}  // namespace

template <typename Id>
void encode_text(const Vocabulary& v, WordCache& cache, const uint8_t* text, size_t n, bool special, Ids<Id>& out,
                 bool continues) {
    if (!v.characters.empty()) return encode_marked(v, cache, text, n, special, continues, out);
    auto push = [&](uint32_t id) { out.push(static_cast<Id>(id)); };
    auto encode = [&](const uint8_t* p, const uint8_t* end) { encode_part(v, cache, p, end, out); };
    auto encode_rest = [&](const uint8_t* p, const uint8_t* end) {
        if (v.added_after.empty()) encode(p, end);
        else v.added_after.split(p, end, special, encode, push);
    };
    if (v.added.empty()) encode_rest(text, text + n);
    else v.added.split(text, text + n, special, encode_rest, push);
}

template void encode_text(const Vocabulary&, WordCache&, const uint8_t*, size_t, bool, Ids<uint16_t>&, bool);
template void encode_text(const Vocabulary&, WordCache&, const uint8_t*, size_t, bool, Ids<uint32_t>&, bool);

}  // namespace bpe
