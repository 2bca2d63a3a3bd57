// Byte-level BPE with GPT-2's pre-tokeniser: what the encoder's parts share.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

namespace bpe {

// Readers look at whole vectors: every buffer of text has this many zero bytes behind its end.
constexpr size_t kPadding = 64;
// Ids are copied a fixed number at a time: every buffer of ids has room for so many more than are written.
constexpr size_t kSlack = 8;

// Tables that are read at random lie on huge pages where the system has them: on small ones most reads miss the TLB.
template <typename T>
struct HugePages {
    using value_type = T;
    HugePages() = default;
    template <typename U>
    HugePages(const HugePages<U>&) {}
    T* allocate(size_t n) {
        constexpr size_t kPage = size_t{2} << 20;
        const size_t bytes = (n * sizeof(T) + kPage - 1) / kPage * kPage;
        void* made = std::aligned_alloc(kPage, bytes);
        if (!made) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
        ::madvise(made, bytes, MADV_HUGEPAGE);  // advice: where it is not taken everything works as well
#endif
        return static_cast<T*>(made);
    }
    void deallocate(T* made, size_t) { std::free(made); }
    template <typename U>
    bool operator==(const HugePages<U>&) const {
        return true;
    }
};

// n of T that are zero bytes; what is never touched takes no memory.
template <typename T>
class ZeroPages {
  public:
    explicit ZeroPages(size_t n) : bytes_(n * sizeof(T)) {
        made_ = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (made_ == MAP_FAILED) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
        ::madvise(made_, bytes_, MADV_HUGEPAGE);  // as above
#endif
    }
    ~ZeroPages() { ::munmap(made_, bytes_); }
    ZeroPages(const ZeroPages&) = delete;
    ZeroPages& operator=(const ZeroPages&) = delete;
    T* at(size_t i) const { return static_cast<T*>(made_) + i; }

  private:
    size_t bytes_;
    void* made_;
};

enum Class : uint8_t { kOther = 0, kLetter = 1, kNumber = 2, kSpace = 3 };

struct Merge {
    uint32_t rank;
    uint32_t id;
};

constexpr uint32_t kNoRank = ~uint32_t{0};

// (left id, right id) -> merge, open addressing. Where ranks and ids fit 16 bits a slot is half as large: the table
// then lies in a core's own cache.
class Pairs {
  public:
    void build(const int64_t* left_right_id, size_t n);

    // The merge of two ids; one with rank kNoRank where they do not merge.
    Merge find(uint32_t left, uint32_t right) const {
        if (!small_.empty()) {
            const uint32_t key = left << 16 | right;
            const uint64_t hash = spread(key);
            if (!(present_[hash >> 51] >> (hash >> 45 & 63) & 1)) return Merge{kNoRank, 0};
            for (uint64_t i = hash & mask_;; i = (i + 1) & mask_) {
                const SmallSlot slot = small_[i];
                if (slot.rank == kEmptySmall) return Merge{kNoRank, 0};
                if (slot.key == key) return Merge{slot.rank, slot.id};
            }
        }
        const uint64_t key = uint64_t{left} << 32 | right;
        for (uint64_t i = spread(key) & mask_;; i = (i + 1) & mask_) {
            if (slots_[i].key == key) return slots_[i].merge;
            if (slots_[i].key == kEmpty) return Merge{kNoRank, 0};
        }
    }

  private:
    static constexpr uint64_t kEmpty = ~uint64_t{0};
    static constexpr uint16_t kEmptySmall = 0xFFFF;
    struct Slot {
        uint64_t key;
        Merge merge;
    };
    struct SmallSlot {
        uint32_t key;
        uint16_t rank, id;
    };
    static uint64_t spread(uint64_t key) {
        key *= 0x9E3779B97F4A7C15ULL;
        return key ^ (key >> 29);
    }
    std::vector<Slot, HugePages<Slot>> slots_;
    std::vector<SmallSlot, HugePages<SmallSlot>> small_;
    std::vector<uint64_t> present_;  // a bit of 2^19 for each: most that are looked for are not there
    uint64_t mask_ = 0;
};

// A short word and its ids: half a cache line.
struct ShortWord {
    uint64_t low, high;  // the bytes, and in the last one how many they are: 0 of an empty place
    uint16_t ids[7];
    uint16_t n;  // copied with the ids, as an eighth, where those are narrow
    static constexpr size_t kIds = 7;

    bool holds(uint64_t wanted_low, uint64_t wanted_high) const {
        const bool is_high = __atomic_load_n(&high, __ATOMIC_ACQUIRE) == wanted_high;  // before `low` is looked at
        return is_high & (__atomic_load_n(&low, __ATOMIC_RELAXED) == wanted_low);
    }
};

// Short words that any thread has met, two to a set. The first to come stay as they are: `high`, written last, shows a
// word that is whole to the others, without locks.
class SharedWords {
  public:
    SharedWords() : words_(size_t{2} << kBits) {}
    ShortWord* set(uint64_t hash) const { return words_.at(2 * (hash >> (64 - kBits))); }

    // Whether a word of the set may have been kept elsewhere.
    static bool is_full(const ShortWord* set) { return __atomic_load_n(&set[1].high, __ATOMIC_RELAXED) != 0; }

    // False: both places of the set are taken.
    static bool keep(ShortWord* set, const ShortWord& word) {
        for (ShortWord* place = set; place < set + 2; ++place) {
            uint64_t empty = 0;
            if (!__atomic_compare_exchange_n(&place->high, &empty, kTaken, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
                continue;
            __atomic_store_n(&place->low, word.low, __ATOMIC_RELAXED);
            std::memcpy(place->ids, word.ids, sizeof word.ids);
            place->n = word.n;
            __atomic_store_n(&place->high, word.high, __ATOMIC_RELEASE);
            return true;
        }
        return false;
    }

  private:
    static constexpr int kBits = 19;                   // log2 of the number of sets
    static constexpr uint64_t kTaken = ~uint64_t{0};  // `high` of no word: it is still being written
    ZeroPages<ShortWord> words_;
};

// Shared by all threads, and read-only after building but for `words`.
struct Vocabulary {
    uint32_t byte_id[256];
    Pairs pairs;
    std::vector<Merge> byte_pairs;  // [256 * 256]: what `pairs` says of two bytes, without looking for it
    std::vector<uint8_t> classes;  // of every code point
    std::string special;           // the one special token's text, empty: none is looked for
    uint32_t special_id = 0;
    bool is_narrow = true;  // every id is under 65,536
    SharedWords words;
};

// Ids of one word by its merges: lowest rank first, the leftmost of equals. A word of n bytes has at most n ids;
// returns where the next one goes.
uint32_t* merge_word(const Vocabulary& vocabulary, const uint8_t* word, size_t n, uint32_t* out);

// Ids of the first bytes of a word that goes on behind its n bytes: of as many as can be told, which may be none.
struct Beginning {
    uint32_t* out;    // where the next id goes
    size_t n;         // bytes whose ids are put; a character begins behind them
    uint32_t next_id;  // what the rest of the word begins with
};
Beginning merge_beginning(const Vocabulary& vocabulary, const uint8_t* word, size_t n, uint32_t* out);

// Which of sixteen bytes, as they lie in memory on little-endian machines, are the first n.
struct FirstBytes {
    uint64_t low[16], high[16];
    constexpr FirstBytes() : low{}, high{} {
        for (int n = 1; n < 16; ++n) {
            low[n] = low[n - 1];
            high[n] = high[n - 1];
            (n <= 8 ? low : high)[n] |= uint64_t{0xFF} << 8 * ((n - 1) % 8);
        }
    }
};
inline constexpr FirstBytes kFirstBytes;

// Words seen before, two to a set: most are short and of ids under 65,536, and shared by all threads while there is
// room; later ones and long ones are each thread's own, the latest two of a set. A word that fits no kind is merged
// each time.
class WordCache {
  public:
    explicit WordCache(const SharedWords& shared);

    // A word on its way: its place in the cache is being fetched while other words are cut.
    struct Probe {
        const uint8_t* word;
        size_t n;
        uint64_t low, high;  // of a long word `low` is its hash
        ShortWord* set;  // of the shared ones; null: too long for the short kind
    };

    // Begin to look up word[0, n), n > 0. kPadding bytes behind the word are readable. The probe is written where it
    // stays: a copy would be read before its parts have reached the cache.
    void begin(const uint8_t* word, size_t n, Probe& probe) {
        probe.word = word;
        probe.n = n;
        if (n > kShortBytes) {
            probe.set = nullptr;
            if (n > kLongBytes) return;
            probe.low = hash_of_long(word, n);
            const Long* set = long_set(probe.low);
            for (int way = 0; way < 2; ++way) __builtin_prefetch(set + way);
            return;
        }
        uint64_t low, high;
        std::memcpy(&low, word, 8);
        std::memcpy(&high, word + 8, 8);
        low &= kFirstBytes.low[n];
        high = (high & kFirstBytes.high[n]) | uint64_t{n} << 56;
        probe.low = low;
        probe.high = high;
        probe.set = shared_.set(mix(low, high));
        __builtin_prefetch(probe.set);
    }

    // The ids of a word that was begun; returns where the next one goes. probe.n + kSlack ids can be written.
    // Id is uint16_t, for narrow vocabularies, or uint32_t.
    template <typename Id>
    Id* finish(const Vocabulary& vocabulary, const Probe& probe, Id* out) {
        if (probe.set) {
            const ShortWord *first = probe.set, *second = probe.set + 1;
            // one branch for both: which of them holds a word cannot be foreseen, that one does can
            const ShortWord* held = first->holds(probe.low, probe.high) ? first : second;
            if (held->holds(probe.low, probe.high)) {
                if constexpr (sizeof(Id) == 2) {
                    std::memcpy(out, held->ids, 8 * sizeof(Id));
                } else {
                    for (size_t i = 0; i < ShortWord::kIds; ++i) out[i] = held->ids[i];
                }
                return out + held->n;
            }
        }
        return finish_rare(vocabulary, probe, out);
    }

  private:
    static uint64_t mix(uint64_t a, uint64_t b) {
        uint64_t h = (a ^ (b * 0xC2B2AE3D27D4EB4FULL)) * 0x9E3779B97F4A7C15ULL;
        h ^= h >> 32;
        return h * 0xD6E8FEB86659FD93ULL;
    }
    static constexpr size_t kShortBytes = 15, kLongBytes = 63, kLongIds = 15;
    static constexpr int kOwnBits = 15, kLongBits = 13;  // log2 of the number of sets
    struct Long {
        uint64_t key[8];  // the word, zeros, and in the last byte its length
        uint32_t ids[kLongIds];
        uint32_t n;
    };
    Long* long_set(uint64_t hash) const { return long_.at(2 * (hash >> (64 - kLongBits))); }
    // Its ends tell a long word from most others; which it is the whole of it says.
    static uint64_t hash_of_long(const uint8_t* word, size_t n) {
        uint64_t first, second, last;
        std::memcpy(&first, word, 8);
        std::memcpy(&second, word + 8, 8);
        std::memcpy(&last, word + n - 8, 8);
        return mix(mix(first, second), last + n);
    }
    uint16_t* finish_rare(const Vocabulary& vocabulary, const Probe& probe, uint16_t* out);
    uint32_t* finish_rare(const Vocabulary& vocabulary, const Probe& probe, uint32_t* out);
    uint32_t* finish_long(const Vocabulary& vocabulary, const Probe& probe, uint32_t* out);
    uint32_t* merge_and_keep(const Vocabulary&, const Probe&, Long* set, const uint64_t* key, uint32_t* out);
    ShortWord* own_set(const Probe& p) const { return own_.at(2 * (mix(p.low, p.high) >> (64 - kOwnBits))); }
    const SharedWords& shared_;
    ZeroPages<ShortWord> own_;
    ZeroPages<Long> long_;
};

// Ids that grow without being cleared first.
template <typename Id>
class Ids {
  public:
    // For n more and kSlack.
    Id* room(size_t n) {
        if (size_ + n + kSlack > capacity_) {
            capacity_ = 2 * (size_ + n + kSlack);
            std::unique_ptr<Id[]> wider(new Id[capacity_]);
            if (size_) std::memcpy(wider.get(), held_.get(), size_ * sizeof(Id));
            held_ = std::move(wider);
        }
        return held_.get() + size_;
    }
    void end_at(const Id* end) { size_ = static_cast<size_t>(end - held_.get()); }
    void push(Id id) { *room(1) = id, ++size_; }
    void clear() { size_ = 0; }
    size_t size() const { return size_; }
    const Id* data() const { return held_.get(); }

  private:
    std::unique_ptr<Id[]> held_;
    size_t size_ = 0, capacity_ = 0;
};

// Cuts text[0, n) into words as GPT-2's expression does and appends their ids. `special` true: each occurrence of the
// special token's text becomes its id and parts the text. kPadding bytes behind the text are readable.
template <typename Id>
void encode_text(const Vocabulary&, WordCache&, const uint8_t* text, size_t n, bool special, Ids<Id>& out);

// The class of an ASCII character, as encode_text has it built in.
constexpr Class class_of_ascii(uint8_t c) {
    if (static_cast<uint8_t>((c | 0x20) - 'a') < 26) return kLetter;
    if (static_cast<uint8_t>(c - '0') < 10) return kNumber;
    return c == ' ' || static_cast<uint8_t>(c - '\t') < 5 ? kSpace : kOther;
}

// One code point of valid UTF-8; returns its length in bytes.
inline int decode(const uint8_t* p, uint32_t& point) {
    if (p[0] < 0x80) return point = p[0], 1;
    if (p[0] < 0xE0) return point = (p[0] & 0x1Fu) << 6 | (p[1] & 0x3Fu), 2;
    if (p[0] < 0xF0) return point = (p[0] & 0x0Fu) << 12 | (p[1] & 0x3Fu) << 6 | (p[2] & 0x3Fu), 3;
    return point = (p[0] & 0x07u) << 18 | (p[1] & 0x3Fu) << 12 | (p[2] & 0x3Fu) << 6 | (p[3] & 0x3Fu), 4;
}

// Length of the UTF-8 sequence at p, 0 where it is not valid (overlong, surrogate, too large, cut off).
int utf8_length(const uint8_t* p, const uint8_t* end);

enum class Line { kText, kBlank, kRefused };

// Finds the string under `key` of the JSON object on one line and writes its UTF-8 to `text`, padding behind it.
// kRefused: not certainly what Python's json would accept (or an odd case left to it); nothing is decided then.
// Behind `end` kPadding bytes are readable.
Line text_of_line(const uint8_t* line, const uint8_t* end, const std::string& key, std::vector<uint8_t>& text,
                  size_t& n_text);

}  // namespace bpe
