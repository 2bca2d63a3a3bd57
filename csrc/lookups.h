// Lookups in flight. The word cache is larger than a core's L2 cache: the prefetched lines arrive while the next words
// are cut.
#pragma once

#include "bpe.h"

namespace bpe {

constexpr size_t kBatch = 64;
struct Batch {
    WordCache::Probe probes[kBatch];
    size_t n = 0;
};

// Writes the ids of words in the order of `push`.
template <typename Id>
class Lookups {
  public:
    // `out` has room for the ids of all words, and kSlack.
    Lookups(const Vocabulary& v, WordCache& cache, Id* out) : v_(v), cache_(cache), out_(out) {}

    // Begin the lookup of [word, end), which is not empty and stays in place until `finish`.
    void push(const uint8_t* word, const uint8_t* end) {
        Batch& batch = batches_[now_];
        cache_.begin(word, static_cast<size_t>(end - word), batch.probes[batch.n]);
        if (++batch.n < kBatch) return;
        now_ ^= 1;
        write(batches_[now_]);
    }

    // Write the ids of all words; return the position of the next id.
    Id* finish() {
        write(batches_[now_ ^ 1]);
        write(batches_[now_]);
        return out_;
    }

  private:
    void write(Batch& batch) {
        for (size_t i = 0; i < batch.n; ++i) out_ = cache_.finish(v_, batch.probes[i], out_);
        batch.n = 0;
    }

    const Vocabulary& v_;
    WordCache& cache_;
    Id* out_;
    Batch batches_[2];
    int now_ = 0;
};

}  // namespace bpe
