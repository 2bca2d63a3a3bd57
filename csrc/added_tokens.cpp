#include "added_tokens.h"

#include <bit>
#include <stdexcept>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace bpe {

namespace {

constexpr size_t kFewFirsts = 3;

const uint8_t* previous(const uint8_t* p) {
    do --p;
    while ((*p & 0xC0) == 0x80);
    return p;
}

}  // namespace

void AddedTokens::build(std::vector<AddedToken> tokens, const std::vector<uint8_t>* kinds) {
    tokens_ = std::move(tokens);
    kinds_ = kinds;
    nodes_.assign(1, Node{});
    pairs_.assign(65536 / 64, 0);
    for (size_t number = 0; number < tokens_.size(); ++number) {
        const std::string& text = tokens_[number].text;
        if (text.empty()) throw std::invalid_argument("added tokens: got an empty text");
        longest_ = std::max(longest_, text.size());
        int32_t node = 0;
        for (const char letter : text) {
            const uint8_t byte = static_cast<uint8_t>(letter);
            int32_t child = nodes_[node].child;
            while (child >= 0 && nodes_[child].byte != byte) child = nodes_[child].sibling;
            if (child < 0) {
                child = static_cast<int32_t>(nodes_.size());
                nodes_.push_back({-1, nodes_[node].child, -1, byte});
                nodes_[node].child = child;
            }
            node = child;
        }
        if (nodes_[node].token < 0) nodes_[node].token = static_cast<int32_t>(number);  // the first of equal texts
        const size_t first = static_cast<uint8_t>(text[0]);
        if (std::find(firsts_.begin(), firsts_.end(), first) == firsts_.end()) firsts_.push_back(text[0]);
        for (size_t second = 0; second < 256; ++second) {
            const size_t pair = second << 8 | first;  // as a little-endian load
            if (text.size() == 1 || static_cast<uint8_t>(text[1]) == second)
                pairs_[pair / 64] |= uint64_t{1} << pair % 64;
        }
    }
}

const uint8_t* AddedTokens::next_candidate(const uint8_t* p, const uint8_t* end) const {
#if defined(__SSE2__)
    if (firsts_.size() <= kFewFirsts) {
        const __m128i first = _mm_set1_epi8(static_cast<char>(firsts_[0]));
        const __m128i second = _mm_set1_epi8(static_cast<char>(firsts_[firsts_.size() > 1]));
        const __m128i third = _mm_set1_epi8(static_cast<char>(firsts_[firsts_.size() - 1]));
        for (; p < end; p += 16) {  // padding follows the end
            const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
            const __m128i same = _mm_or_si128(_mm_or_si128(_mm_cmpeq_epi8(bytes, first), _mm_cmpeq_epi8(bytes, second)),
                                              _mm_cmpeq_epi8(bytes, third));
            if (const unsigned mask = static_cast<unsigned>(_mm_movemask_epi8(same)))
                return std::min(p + std::countr_zero(mask), end);
        }
        return end;
    }
#endif
    for (; p < end; ++p) {
        const size_t pair = static_cast<size_t>(p[1]) << 8 | p[0];
        if (pairs_[pair / 64] >> pair % 64 & 1) return p;
    }
    return end;
}

const AddedToken* AddedTokens::longest_at(const uint8_t* p, const uint8_t* end) const {
    const AddedToken* longest = nullptr;
    for (int32_t node = 0; p < end; ++p) {
        node = nodes_[node].child;
        while (node >= 0 && nodes_[node].byte != *p) node = nodes_[node].sibling;
        if (node < 0) break;
        if (nodes_[node].token >= 0) longest = &tokens_[nodes_[node].token];
    }
    return longest;
}

const uint8_t* AddedTokens::find(const uint8_t* p, const uint8_t* end, const AddedToken*& token) const {
    if (tokens_.empty()) return end;
    for (;; ++p) {
        p = next_candidate(p, end);
        if (p == end) return end;
        token = longest_at(p, end);
        if (token) return p;
    }
}

bool AddedTokens::is_word_before(const uint8_t* begin, const uint8_t* p) const {
    return p > begin && is_word_at(previous(p), p);
}

bool AddedTokens::is_word_at(const uint8_t* p, const uint8_t* end) const {
    uint32_t point;
    return p < end && (decode(p, point), (*kinds_)[point] & kWordCharacter);
}

const uint8_t* AddedTokens::strip_left(const uint8_t* begin, const uint8_t* p) const {
    while (p > begin) {
        const uint8_t* before = previous(p);
        uint32_t point;
        decode(before, point);
        if (!((*kinds_)[point] & kStripped)) break;
        p = before;
    }
    return p;
}

const uint8_t* AddedTokens::strip_right(const uint8_t* p, const uint8_t* end) const {
    while (p < end) {
        uint32_t point;
        const int length = decode(p, point);
        if (!((*kinds_)[point] & kStripped)) break;
        p += length;
    }
    return p;
}

}  // namespace bpe
