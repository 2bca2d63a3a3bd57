// Byte-level BPE: declarations shared by the parts of the encoder.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "added_tokens.h"
#include "automaton.h"
#include "characters.h"
#include "whole_words.h"

namespace bpe {

// Readers load whole SIMD vectors: every text buffer has this many zero bytes after its end.
constexpr size_t kPadding = 64;
// Ids are copied in groups of fixed size: every id buffer has room for this many ids beyond those written.
constexpr size_t kSlack = 8;

// Allocator for tables with random access. Uses huge pages where available: with small ones most reads miss the TLB.
template <typename T>
struct HugePages {
    using value_type = T;
    HugePages() = default;
    template <typename U>
    HugePages(const HugePages<U>&) {}
    T* allocate(size_t n) {
        constexpr size_t kPage = size_t{2} << 20;
        const size_t bytes = (n * sizeof(T) + kPage - 1) / kPage * kPage;
        void* memory = std::aligned_alloc(kPage, bytes);
        if (!memory) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
        ::madvise(memory, bytes, MADV_HUGEPAGE);  // only a hint: failure is harmless
#endif
        return static_cast<T*>(memory);
    }
    void deallocate(T* memory, size_t) { std::free(memory); }
    template <typename U>
    bool operator==(const HugePages<U>&) const {
        return true;
    }
};

// Array of n zero-initialised T. Pages that are never written take no memory.
template <typename T>
class ZeroPages {
  public:
    explicit ZeroPages(size_t n) : bytes_(n * sizeof(T)) {
        memory_ = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory_ == MAP_FAILED) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
        ::madvise(memory_, bytes_, MADV_HUGEPAGE);  // only a hint, as above
#endif
    }
    ~ZeroPages() { ::munmap(memory_, bytes_); }
    ZeroPages(const ZeroPages&) = delete;
    ZeroPages& operator=(const ZeroPages&) = delete;
    T* at(size_t i) const { return static_cast<T*>(memory_) + i; }

  private:
    size_t bytes_;
    void* memory_;
};

enum Class : uint8_t { kOther = 0, kLetter = 1, kNumber = 2, kSpace = 3 };

struct Merge {
    uint32_t rank;
    uint32_t id;
};

constexpr uint32_t kNoRank = ~uint32_t{0};

// Hash table (left id, right id) -> merge with open addressing. If ranks and ids fit in 16 bits, a slot has half the
// size, so that the table fits into a core's private cache.
class Pairs {
  public:
    void build(const int64_t* left_right_id, size_t n);

    // Return the merge of two ids; its rank is kNoRank if they do not merge.
    Merge find(uint32_t left, uint32_t right) const {
        if (!small_.empty()) {
            const uint32_t key = left << 16 | right;
            const uint64_t hash = spread(key);
            if (!may_hold(hash)) return Merge{kNoRank, 0};
            for (uint64_t i = hash & mask_;; i = (i + 1) & mask_) {
                const SmallSlot slot = small_[i];
                if (slot.rank == kEmptySmall) return Merge{kNoRank, 0};
                if (slot.key == key) return Merge{slot.rank, slot.id};
            }
        }
        const uint64_t key = uint64_t{left} << 32 | right, hash = spread(key);
        if (!may_hold(hash)) return Merge{kNoRank, 0};
        for (uint64_t i = hash & mask_;; i = (i + 1) & mask_) {
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
    bool may_hold(uint64_t hash) const {
        return present_[hash >> present_shift_ >> 6] >> (hash >> present_shift_ & 63) & 1;
    }
    // Bloom filter with one hash, 8 bits or more for each pair: most pairs that are looked up are absent, and need no
    // probe of the table.
    std::vector<uint64_t> present_;
    int present_shift_ = 45;  // of a hash, to the number of its bit
    uint64_t mask_ = 0;
};

// A short word and its ids: 32 bytes, half a cache line. For narrow vocabularies there are up to 7 ids of 16 bits, for
// others up to 3 of 32 bits.
struct ShortWord {
    uint64_t low, high;  // 15 bytes of text, zero-padded; the last byte is the length, 0 in an empty slot
    uint16_t ids[7];
    uint16_t n;  // copied together with the ids, as the end of the last element
    static constexpr size_t kIds = 7, kWideIds = 3;

    // Copy the ids, and some bytes beyond them, to `out`; return the position of the next id.
    template <typename Id>
    Id* copy_ids(bool is_narrow, Id* out) const {
        if (sizeof(Id) == 2 || !is_narrow) {
            std::memcpy(out, ids, 16);
        } else {
            for (size_t i = 0; i < kIds; ++i) out[i] = ids[i];
        }
        return out + n;
    }

    // Store up to kIds or kWideIds ids.
    void set_ids(bool is_narrow, const uint32_t* begin, const uint32_t* end) {
        n = static_cast<uint16_t>(end - begin);
        if (is_narrow) std::copy(begin, end, ids);
        else std::memcpy(ids, begin, 4 * n);
    }

    bool holds(uint64_t key_low, uint64_t key_high) const {
        const bool is_high = __atomic_load_n(&high, __ATOMIC_ACQUIRE) == key_high;  // read before `low`
        return is_high & (__atomic_load_n(&low, __ATOMIC_RELAXED) == key_low);
    }
};

// Cache of short words shared by all threads, two-way set associative, without locks. Entries are never replaced.
// `high` is stored last with release order, and read first with acquire order: a reader that sees it sees the whole
// entry.
class SharedWords {
  public:
    SharedWords() : words_(size_t{2} << kBits) {}
    ShortWord* set(uint64_t hash) const { return words_.at(2 * (hash >> (64 - kBits))); }

    // Return whether both slots are occupied. Only then may a word of this set be in a thread's private cache.
    static bool is_full(const ShortWord* set) { return __atomic_load_n(&set[1].high, __ATOMIC_RELAXED) != 0; }

    // Store a word. Return false if both slots of the set are occupied.
    static bool insert(ShortWord* set, const ShortWord& word) {
        for (ShortWord* place = set; place < set + 2; ++place) {
            uint64_t empty = 0;
            if (!__atomic_compare_exchange_n(&place->high, &empty, kBusy, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
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
    static constexpr uint64_t kBusy = ~uint64_t{0};  // `high` while a slot is written; equals no word's `high`
    ZeroPages<ShortWord> words_;
};

// A pattern that splits text into pieces: its matches, and the text between them, which is dropped if `drops_gaps`.
struct Stage {
    Automaton automaton;
    bool drops_gaps;
};

// Shared by all threads. Read-only after construction, except `words`.
struct Vocabulary {
    Characters characters;  // not empty: merges apply to these, not to bytes; there are no stages then
    uint32_t byte_id[256];
    Pairs pairs;
    std::vector<Merge> byte_pairs;  // [256 * 256]: direct table of `pairs` for two bytes
    WholeWords whole;              // words that become one id whatever the merges; empty: none
    bool is_narrow = true;         // every id of a word is below 65,536
    SharedWords words;

    AddedTokens added, added_after;   // found first in the text, then in what remains of it
    std::vector<uint8_t> point_kinds;  // PointKind of every code point
    std::vector<uint8_t> combining;    // for normalization to NFC (see nfc.cpp); empty: none
    std::vector<Stage> stages;         // each splits the pieces of the one before
    bool is_gpt2 = false;              // GPT-2's pattern splits the pieces of the last stage
    std::vector<uint8_t> classes;      // class of every code point in GPT-2's pattern
};

// Return whether text[0, n) is certainly in NFC, so that a tokenizer with this normalization leaves it unchanged.
// `rank` is the combining class of the character before the text, 0 at a start; on return, of the last character.
bool is_nfc(const Vocabulary&, const uint8_t* text, size_t n, uint8_t& rank);

// Write the ids of one word: apply the merge of lowest rank first, the leftmost among equals. A word of n bytes has at
// most n ids. Return the position of the next id.
uint32_t* merge_word(const Vocabulary& vocabulary, const uint8_t* word, size_t n, uint32_t* out);

// Ids of the first bytes of a word that continues after its n bytes. Covers as many bytes as are certain, perhaps none.
struct Beginning {
    uint32_t* out;     // position of the next id
    size_t n;          // bytes whose ids are written; the next byte starts a character
    uint32_t next_id;  // first id of the rest of the word
};
Beginning merge_beginning(const Vocabulary& vocabulary, const uint8_t* word, size_t n, uint32_t* out);

// Masks of the first n of sixteen bytes, in little-endian memory order.
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

// Cache of words, two-way set associative. Most words are short with few ids: they are stored in the shared cache while
// it has room. Later short words and long words (up to 63 bytes) are stored per thread; the latest two of a
// set stay. A word that fits no kind of entry is merged at every occurrence.
class WordCache {
  public:
    explicit WordCache(const SharedWords& shared);

    // A lookup in flight: its cache line is prefetched while other words are cut.
    struct Probe {
        const uint8_t* word;
        size_t n;
        uint64_t low, high;  // key of a short word; for a long word `low` is its hash
        ShortWord* set;      // set in the shared cache; null: too long for a short entry
    };

    // Begin to look up word[0, n), n > 0. kPadding bytes after the word are readable. The probe is filled in place: a
    // copy would load its fields before the stores of them have reached the cache.
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

    // Write the ids of a word passed to `begin`; return the position of the next id. `out` has room for
    // probe.n + kSlack ids. Id is uint16_t for narrow vocabularies, else uint32_t.
    template <typename Id>
    Id* finish(const Vocabulary& vocabulary, const Probe& probe, Id* out) {
        if (probe.set) {
            const ShortWord *first = probe.set, *second = probe.set + 1;
            // One branch for both slots: which of them matches is unpredictable, a match in either is predictable.
            const ShortWord* entry = first->holds(probe.low, probe.high) ? first : second;
            if (entry->holds(probe.low, probe.high)) {
                return entry->copy_ids(vocabulary.is_narrow, out);
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
    static constexpr int kPrivateBits = 15, kLongBits = 15;  // log2 of the number of sets
    struct Long {
        uint64_t key[8];  // the word, zero-padded; the last byte is its length
        uint32_t ids[kLongIds];
        uint32_t n;
    };
    Long* long_set(uint64_t hash) const { return long_.at(2 * (hash >> (64 - kLongBits))); }
    // Hash of the first 16 and the last 8 bytes. These separate most words; the lookup compares the whole key.
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
    uint32_t* merge_and_store(const Vocabulary&, const Probe&, Long* set, const uint64_t* key, uint32_t* out);
    ShortWord* private_set(const Probe& p) const {
        return private_.at(2 * (mix(p.low, p.high) >> (64 - kPrivateBits)));
    }
    const SharedWords& shared_;
    ZeroPages<ShortWord> private_;
    ZeroPages<Long> long_;
};

// Growing array of ids without zero initialisation.
template <typename Id>
class Ids {
  public:
    // Return the end, with room for n more ids and kSlack.
    Id* room(size_t n) {
        if (size_ + n + kSlack > capacity_) {
            capacity_ = 2 * (size_ + n + kSlack);
            std::unique_ptr<Id[]> wider(new Id[capacity_]);
            if (size_) std::memcpy(wider.get(), ids_.get(), size_ * sizeof(Id));
            ids_ = std::move(wider);
        }
        return ids_.get() + size_;
    }
    void end_at(const Id* end) { size_ = static_cast<size_t>(end - ids_.get()); }
    void push(Id id) { *room(1) = id, ++size_; }
    void clear() { size_ = 0; }
    size_t size() const { return size_; }
    const Id* data() const { return ids_.get(); }

  private:
    std::unique_ptr<Id[]> ids_;
    size_t size_ = 0, capacity_ = 0;
};

// Split text[0, n) into added tokens and words, and append their ids. If not `special`, special tokens are ordinary
// text. If `continues`, the text is the rest of one that certain_start has divided. kPadding bytes after the text are
// readable.
template <typename Id>
void encode_text(const Vocabulary&, WordCache&, const uint8_t* text, size_t n, bool special, Ids<Id>& out,
                 bool continues = false);

// Return the end of the word that begins at p in GPT-2's pattern.
const uint8_t* gpt2_word_end(const Vocabulary&, const uint8_t* p, const uint8_t* end);

// Return the class of an ASCII character, as hard-coded in encode_text.
constexpr Class class_of_ascii(uint8_t c) {
    if (static_cast<uint8_t>((c | 0x20) - 'a') < 26) return kLetter;
    if (static_cast<uint8_t>(c - '0') < 10) return kNumber;
    return c == ' ' || static_cast<uint8_t>(c - '\t') < 5 ? kSpace : kOther;
}

// Return the length of the UTF-8 sequence at p, or 0 if it is invalid (overlong, surrogate, too large, truncated).
int utf8_length(const uint8_t* p, const uint8_t* end);

enum class Line { kText, kBlank, kRefused };

// Find the string under `key` in the JSON object on one line, and write its UTF-8 to `text`, followed by padding.
// kRefused: Python's json may reject the line, or treat it in another way (rare cases are left to it). The caller then
// parses the line in Python. kPadding bytes after `end` are readable.
Line text_of_line(const uint8_t* line, const uint8_t* end, const std::string& key, std::vector<uint8_t>& text,
                  size_t& n_text);

}  // namespace bpe
