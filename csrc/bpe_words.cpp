// Words to ids: merges by rank, and a bounded cache of words seen before.
#include <algorithm>
#include <bit>
#include <queue>

#include "bpe.h"

namespace bpe {

void Pairs::build(const int64_t* left_right_id, size_t n) {
    const size_t size = std::bit_ceil(std::max<size_t>(16, 3 * n));
    keys_.assign(size, kEmpty);
    merges_.assign(size, Merge{0, 0});
    mask_ = size - 1;
    for (size_t rank = 0; rank < n; ++rank) {
        const int64_t* row = left_right_id + 3 * rank;
        const uint64_t key = static_cast<uint64_t>(row[0]) << 32 | static_cast<uint64_t>(row[1]);
        uint64_t i = spread(key) & mask_;
        while (keys_[i] != kEmpty && keys_[i] != key) i = (i + 1) & mask_;
        keys_[i] = key;
        merges_[i] = Merge{static_cast<uint32_t>(rank), static_cast<uint32_t>(row[2])};
    }
}

namespace {

constexpr uint32_t kNone = ~uint32_t{0};
constexpr size_t kScanned = 48;  // words up to this many bytes are merged by scanning, longer ones with a heap

uint32_t rank_of(const Vocabulary& v, uint32_t left, uint32_t right) {
    const Merge* merge = v.pairs.find(left, right);
    return merge ? merge->rank : kNone;
}

void merge_short(const Vocabulary& v, const uint8_t* word, size_t n, std::vector<uint32_t>& out) {
    uint32_t ids[kScanned], ranks[kScanned];
    for (size_t i = 0; i < n; ++i) ids[i] = v.byte_id[word[i]];
    for (size_t i = 0; i + 1 < n; ++i) ranks[i] = rank_of(v, ids[i], ids[i + 1]);
    while (n > 1) {
        const size_t at = std::min_element(ranks, ranks + n - 1) - ranks;  // the first of the lowest
        if (ranks[at] == kNone) break;
        ids[at] = v.pairs.find(ids[at], ids[at + 1])->id;
        std::copy(ids + at + 2, ids + n, ids + at + 1);
        std::copy(ranks + at + 1, ranks + n - 1, ranks + at);
        --n;
        if (at > 0) ranks[at - 1] = rank_of(v, ids[at - 1], ids[at]);
        if (at + 1 < n) ranks[at] = rank_of(v, ids[at], ids[at + 1]);
    }
    out.insert(out.end(), ids, ids + n);
}

// A linked list of pieces and a heap of (rank, place): n log n, for words of any length.
void merge_long(const Vocabulary& v, const uint8_t* word, size_t n, std::vector<uint32_t>& out) {
    struct Candidate {
        uint32_t rank;
        int64_t at;
        uint32_t left, right;  // as they were: a candidate whose neighbours have changed is stale
        bool operator>(const Candidate& other) const {
            return rank != other.rank ? rank > other.rank : at > other.at;
        }
    };
    std::vector<uint32_t> ids(n);
    std::vector<int64_t> next(n), before(n);
    for (size_t i = 0; i < n; ++i) {
        ids[i] = v.byte_id[word[i]];
        next[i] = i + 1 < n ? static_cast<int64_t>(i) + 1 : -1;
        before[i] = static_cast<int64_t>(i) - 1;
    }
    std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> heap;
    auto offer = [&](int64_t at) {
        if (at < 0 || next[at] < 0) return;
        const uint32_t left = ids[at], right = ids[next[at]];
        const uint32_t rank = rank_of(v, left, right);
        if (rank != kNone) heap.push({rank, at, left, right});
    };
    for (size_t i = 0; i + 1 < n; ++i) offer(static_cast<int64_t>(i));
    while (!heap.empty()) {
        const Candidate best = heap.top();
        heap.pop();
        const int64_t at = best.at, right = next[at];
        if (ids[at] != best.left || right < 0 || ids[right] != best.right) continue;
        ids[at] = v.pairs.find(best.left, best.right)->id;
        ids[right] = kNone;  // gone; nothing is equal to it
        next[at] = next[right];
        if (next[at] >= 0) before[next[at]] = at;
        offer(before[at]);
        offer(at);
    }
    for (int64_t i = 0; i >= 0; i = next[i]) out.push_back(ids[i]);
}

uint64_t mix(uint64_t a, uint64_t b) {
    uint64_t h = (a ^ (b * 0xC2B2AE3D27D4EB4FULL)) * 0x9E3779B97F4A7C15ULL;
    h ^= h >> 32;
    return h * 0xD6E8FEB86659FD93ULL;
}

}  // namespace

void merge_word(const Vocabulary& v, const uint8_t* word, size_t n, std::vector<uint32_t>& out) {
    if (n == 0) return;
    n <= kScanned ? merge_short(v, word, n, out) : merge_long(v, word, n, out);
}

WordCache::WordCache() : short_(size_t{2} << kShortBits), long_(size_t{2} << kLongBits) {}

void WordCache::encode(const Vocabulary& v, const uint8_t* word, size_t n, std::vector<uint32_t>& out) {
    if (n > kLongBytes) return merge_word(v, word, n, out);
    Short* short_set = nullptr;
    uint64_t low = 0, high = 0;
    if (n <= kShortBytes) {
        std::memcpy(&low, word, 8);
        std::memcpy(&high, word + 8, 8);
        const uint64_t part = n % 8 ? ~uint64_t{0} >> (64 - 8 * (n % 8)) : 0;
        low = n >= 8 ? low : low & part;
        high = (n >= 8 ? high & part : 0) | uint64_t{n} << 56;
        short_set = &short_[2 * (mix(low, high) >> (64 - kShortBits))];
        for (int way = 0; way < 2; ++way) {
            const Short& held = short_set[way];
            if (held.low == low && held.high == high) {
                out.insert(out.end(), held.ids, held.ids + held.n);
                return;
            }
        }
    }
    uint64_t key[4];
    uint8_t bytes[32] = {};
    std::memcpy(bytes, word, n);
    bytes[31] = static_cast<uint8_t>(n);
    std::memcpy(key, bytes, 32);
    Long* long_set = &long_[2 * (mix(mix(key[0], key[1]), mix(key[2], key[3])) >> (64 - kLongBits))];
    for (int way = 0; way < 2; ++way) {
        const Long& held = long_set[way];
        if (std::memcmp(held.key, key, 32) == 0) {
            out.insert(out.end(), held.ids, held.ids + held.n);
            return;
        }
    }
    const size_t before = out.size();
    merge_word(v, word, n, out);
    const uint32_t* ids = out.data() + before;
    const uint32_t n_ids = static_cast<uint32_t>(out.size() - before);
    if (short_set && n_ids <= kShortIds) {
        short_set[1] = short_set[0];
        short_set[0] = Short{low, high, {}, n_ids};
        std::copy(ids, ids + n_ids, short_set[0].ids);
    } else if (n_ids <= kLongIds) {
        long_set[1] = long_set[0];
        std::memcpy(long_set[0].key, key, 32);
        std::copy(ids, ids + n_ids, long_set[0].ids);
        long_set[0].n = n_ids;
    }
}

}  // namespace bpe
