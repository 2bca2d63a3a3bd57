// Words to ids: merges by rank, and a cache of bounded size.
#include <algorithm>
#include <bit>
#include <queue>

#include "bpe.h"

namespace bpe {

void Pairs::build(const int64_t* left_right_id, size_t n) {
    bool is_small = n < kEmptySmall;
    for (size_t i = 0; i < 3 * n && is_small; ++i) is_small = left_right_id[i] <= 0xFFFF;
    const size_t size = std::bit_ceil(std::max<size_t>(16, n + n / 4));
    mask_ = size - 1;
    const int present_bits = std::max<int>(19, std::bit_width(8 * n));
    present_shift_ = 64 - present_bits;
    present_.assign(size_t{1} << (present_bits - 6), 0);
    if (is_small) small_.assign(size, SmallSlot{0, kEmptySmall, 0});
    else slots_.assign(size, Slot{kEmpty, {kNoRank, 0}});
    for (size_t rank = 0; rank < n; ++rank) {
        const int64_t* row = left_right_id + 3 * rank;
        const uint64_t left = static_cast<uint64_t>(row[0]), right = static_cast<uint64_t>(row[1]);
        const uint64_t key = is_small ? left << 16 | right : left << 32 | right;
        const uint64_t hash = spread(key);
        present_[hash >> present_shift_ >> 6] |= uint64_t{1} << (hash >> present_shift_ & 63);
        uint64_t i = hash & mask_;
        const Merge merge{static_cast<uint32_t>(rank), static_cast<uint32_t>(row[2])};
        if (is_small) {
            while (small_[i].rank != kEmptySmall && small_[i].key != key) i = (i + 1) & mask_;
            small_[i] = {static_cast<uint32_t>(key), static_cast<uint16_t>(rank), static_cast<uint16_t>(merge.id)};
        } else {
            while (slots_[i].key != kEmpty && slots_[i].key != key) i = (i + 1) & mask_;
            slots_[i] = {key, merge};
        }
    }
}

namespace {

constexpr size_t kScanned = 64;  // bytes of the longest word merged by linear scans, O(n^2); longer ones use a heap
constexpr uint32_t kRemoved = ~uint32_t{0};
constexpr size_t kStretch = 1 << 14;  // bytes of a very long word that are merged at a time
constexpr int kMaxSeamTries = 16;

uint32_t* merge_short(const Vocabulary& v, const uint8_t* word, size_t n, uint32_t* ids) {
    Merge merges[kScanned];  // merges[i]: of ids[i] and ids[i + 1]
    uint32_t least = kNoRank;
    if (v.characters.empty()) {
        for (size_t i = 0; i < n; ++i) ids[i] = v.byte_id[word[i]];
        for (size_t i = 0; i + 1 < n; ++i) merges[i] = v.byte_pairs[size_t{256} * word[i] + word[i + 1]];
    } else {
        uint32_t* end = ids;
        v.characters.for_symbols(word, n, [&](uint32_t id, size_t) { *end++ = id; });
        n = static_cast<size_t>(end - ids);
        for (size_t i = 0; i + 1 < n; ++i) merges[i] = v.pairs.find(ids[i], ids[i + 1]);
    }
    for (size_t i = 0; i + 1 < n; ++i) least = std::min(least, merges[i].rank);
    if (least == kNoRank) return ids + n;  // mostly white space
    while (n > 1) {
        size_t at = 0;
        for (size_t i = 1; i + 1 < n; ++i)
            if (merges[i].rank < merges[at].rank) at = i;  // leftmost of the lowest rank
        if (merges[at].rank == kNoRank) break;
        ids[at] = merges[at].id;
        --n;
        for (size_t i = at + 1; i < n; ++i) ids[i] = ids[i + 1];
        for (size_t i = at + 1; i + 1 < n; ++i) merges[i] = merges[i + 1];
        if (at > 0) merges[at - 1] = v.pairs.find(ids[at - 1], ids[at]);
        if (at + 1 < n) merges[at] = v.pairs.find(ids[at], ids[at + 1]);
    }
    return ids + n;
}

struct Part {
    uint32_t id;
    size_t begin;  // offset in the word, bytes
};

// Return the bytes [begin, end) of a word, or its characters, as parts.
std::vector<Part> first_parts(const Vocabulary& v, const uint8_t* word, size_t begin, size_t end) {
    std::vector<Part> parts;
    parts.reserve(end - begin);
    if (v.characters.empty()) {
        for (size_t at = begin; at < end; ++at) parts.push_back({v.byte_id[word[at]], at});
    } else {
        v.characters.for_symbols(word + begin, end - begin,
                                 [&](uint32_t id, size_t at) { parts.push_back({id, begin + at}); });
    }
    return parts;
}

// Merge bytes [begin, end) of a word with a linked list of parts and a heap of (rank, position): O(n log n).
std::vector<Part> merge_whole(const Vocabulary& v, const uint8_t* word, size_t begin, size_t end) {
    struct Candidate {
        uint32_t rank, merged;
        int64_t at;
        uint32_t left, right;  // ids when pushed: if either has changed since, the candidate is stale
        bool operator>(const Candidate& other) const {
            return rank != other.rank ? rank > other.rank : at > other.at;
        }
    };
    std::vector<Part> parts = first_parts(v, word, begin, end);
    const size_t n = parts.size();
    std::vector<int64_t> next(n), before(n);
    for (size_t i = 0; i < n; ++i) {
        next[i] = i + 1 < n ? static_cast<int64_t>(i) + 1 : -1;
        before[i] = static_cast<int64_t>(i) - 1;
    }
    std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> heap;
    auto offer = [&](int64_t at) {
        if (at < 0 || next[at] < 0) return;
        const uint32_t left = parts[at].id, right = parts[next[at]].id;
        const Merge merge = v.pairs.find(left, right);
        if (merge.rank != kNoRank) heap.push({merge.rank, merge.id, at, left, right});
    };
    for (size_t i = 0; i + 1 < n; ++i) offer(static_cast<int64_t>(i));
    while (!heap.empty()) {
        const Candidate best = heap.top();
        heap.pop();
        const int64_t at = best.at, right = next[at];
        if (parts[at].id != best.left || right < 0 || parts[right].id != best.right) continue;
        parts[at].id = best.merged;
        parts[right].id = kRemoved;
        next[at] = next[right];
        if (next[at] >= 0) before[next[at]] = at;
        offer(before[at]);
        offer(at);
    }
    std::erase_if(parts, [](const Part& part) { return part.id == kRemoved; });
    return parts;
}

uint32_t* copy_ids(const std::vector<Part>& parts, size_t n, uint32_t* out) {
    for (size_t i = 0; i < n; ++i) *out++ = parts[i].id;
    return out;
}

// Merges a very long word in overlapping stretches, so that memory does not grow with its length.
//
// A sequence of ids is the result for the whole word if each pair of neighbours, merged alone, stays the same pair of
// ids: the first merge across a boundary would start from the same state, so it would also happen in the pair alone.
// Inside one stretch this holds by construction; at the seam between two stretches `advance` verifies it.
class Stretches {
  public:
    Stretches(const Vocabulary& v, const uint8_t* word, size_t n, uint32_t* out)
        : v_(v), word_(word), n_(n), out_(out), end_(end_from(0)), parts_(merge_whole(v, word, 0, end_)) {}

    // Move to the next stretch. Return false if no valid seam exists. A seam is at the start of a character.
    bool advance() {
        int tries = 0;
        // Start at 3/4 of the stretch: parts near its end may differ from the whole word's parts.
        for (size_t at = parts_.size() * 3 / 4; tries < kMaxSeamTries && at > 0; --at) {
            const size_t seam = parts_[at].begin, next_end = end_from(seam);
            if ((word_[seam] & 0xC0) == 0x80) continue;
            ++tries;
            std::vector<Part> next = merge_whole(v_, word_, seam, next_end);
            const size_t pair_end = next.size() > 1 ? next[1].begin : next_end;
            const std::vector<Part> pair = merge_whole(v_, word_, parts_[at - 1].begin, pair_end);
            if (pair.size() != 2 || pair[1].begin != seam || next_end <= end_) continue;
            out_ = copy_ids(parts_, at, out_);
            parts_ = std::move(next);
            end_ = next_end;
            return true;
        }
        return false;
    }

    size_t end() const { return end_; }
    const Part& first_pending() const { return parts_[0]; }  // ids before it are written
    uint32_t* write_pending() const { return copy_ids(parts_, parts_.size(), out_); }
    uint32_t* out() const { return out_; }

  private:
    // Return the end of a stretch that begins at `seam`: the end of a character if the vocabulary has characters.
    size_t end_from(size_t seam) const {
        if (n_ - seam <= kStretch) return n_;
        size_t end = seam + kStretch;
        if (!v_.characters.empty())
            while ((word_[end] & 0xC0) == 0x80) --end;
        return end;
    }

    const Vocabulary& v_;
    const uint8_t* word_;
    size_t n_;
    uint32_t* out_;
    size_t end_;                // of the current stretch, bytes
    std::vector<Part> parts_;  // of the current stretch
};

// Return null if no valid seam exists.
uint32_t* merge_stretches(const Vocabulary& v, const uint8_t* word, size_t n, uint32_t* out) {
    Stretches stretches(v, word, n, out);
    while (stretches.end() < n)
        if (!stretches.advance()) return nullptr;
    return stretches.write_pending();
}

uint32_t* merge_long(const Vocabulary& v, const uint8_t* word, size_t n, uint32_t* out) {
    if (n > kStretch)
        if (uint32_t* end = merge_stretches(v, word, n, out)) return end;
    const std::vector<Part> parts = merge_whole(v, word, 0, n);
    return copy_ids(parts, parts.size(), out);
}

}  // namespace

Beginning merge_beginning(const Vocabulary& v, const uint8_t* word, size_t n, uint32_t* out) {
    if (n < 2 * kStretch) return {out, 0, 0};
    Stretches stretches(v, word, n, out);
    // Whole stretches only: each must be as long as when the rest of the word continues at the last seam.
    while (stretches.end() + kStretch <= n && stretches.advance()) continue;
    return {stretches.out(), stretches.first_pending().begin, stretches.first_pending().id};
}

uint32_t* merge_word(const Vocabulary& v, const uint8_t* word, size_t n, uint32_t* out) {
    if (!v.whole.empty()) {
        if (const uint32_t* id = v.whole.find(word, n)) return *out = *id, out + 1;
    }
    return n <= kScanned ? merge_short(v, word, n, out) : merge_long(v, word, n, out);
}

static_assert(std::endian::native == std::endian::little, "words are compared as little-endian integers");

WordCache::WordCache(const SharedWords& shared)
    : shared_(shared), private_(size_t{2} << kPrivateBits), long_(size_t{2} << kLongBits) {}

uint32_t* WordCache::finish_rare(const Vocabulary& v, const Probe& probe, uint32_t* out) {
    if (probe.set && SharedWords::is_full(probe.set)) {
        for (const ShortWord *entry = private_set(probe), *end = entry + 2; entry < end; ++entry)
            if (entry->holds(probe.low, probe.high)) return entry->copy_ids(v.is_narrow, out);
    }
    return probe.n <= kLongBytes ? finish_long(v, probe, out) : merge_word(v, probe.word, probe.n, out);
}

uint16_t* WordCache::finish_rare(const Vocabulary& v, const Probe& probe, uint16_t* out) {
    uint32_t few[kLongBytes + kSlack];
    std::vector<uint32_t> many;
    uint32_t* ids = few;
    if (probe.n > kLongBytes) {
        many.resize(probe.n + kSlack);
        ids = many.data();
    }
    const uint32_t* end = finish_rare(v, probe, ids);
    return std::copy(static_cast<const uint32_t*>(ids), end, out);
}

uint32_t* WordCache::finish_long(const Vocabulary& v, const Probe& probe, uint32_t* out) {
    if (probe.set && v.is_narrow) return merge_and_store(v, probe, nullptr, nullptr, out);  // no long entry
    uint64_t key[8] = {};
    std::memcpy(key, probe.word, probe.n);
    key[7] |= uint64_t{probe.n} << 56;
    Long* set = long_set(probe.set ? mix(probe.low, probe.high) : probe.low);
    for (int way = 0; way < 2; ++way) {
        const Long& entry = set[way];
        if (std::memcmp(entry.key, key, sizeof key) == 0) {
            std::copy(entry.ids, entry.ids + entry.n, out);
            return out + entry.n;
        }
    }
    return merge_and_store(v, probe, set, key, out);
}

uint32_t* WordCache::merge_and_store(const Vocabulary& v, const Probe& probe, Long* set, const uint64_t* key,
                                     uint32_t* out) {
    uint32_t* end = merge_word(v, probe.word, probe.n, out);
    const size_t n_ids = static_cast<size_t>(end - out);
    if (probe.set && n_ids <= (v.is_narrow ? ShortWord::kIds : ShortWord::kWideIds)) {
        ShortWord word{probe.low, probe.high, {}, 0};
        word.set_ids(v.is_narrow, out, end);
        if (!SharedWords::insert(probe.set, word)) {
            ShortWord* entries = private_set(probe);
            entries[1] = entries[0];
            entries[0] = word;
        }
    } else if (set && n_ids <= kLongIds) {
        set[1] = set[0];
        std::memcpy(set[0].key, key, sizeof set[0].key);
        std::copy(out, end, set[0].ids);
        set[0].n = static_cast<uint32_t>(n_ids);
    }
    return end;
}

}  // namespace bpe
