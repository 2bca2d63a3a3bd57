// Encodes JSON lines to files of ids and lengths.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bpe.h"

namespace bpe {

// Cache and buffers of one thread. `vocabulary` is the first member: it must outlive the cache that refers to it.
struct Worker {
    explicit Worker(std::shared_ptr<Vocabulary> shared) : vocabulary(std::move(shared)), cache(vocabulary->words) {}
    std::shared_ptr<Vocabulary> vocabulary;
    WordCache cache;
    Ids<uint16_t> narrow_ids;
    Ids<uint32_t> wide_ids;
    std::vector<int32_t> lengths;
    std::vector<uint8_t> block, text;
};

// Settings and outputs. eod < 0: append no end-of-document id. ids_out and lengths_out are file descriptors: ids are
// int32 if `wide`, else uint16; lengths are int32.
struct LinesJob {
    const std::string& key;
    bool special;
    int64_t eod;
    bool wide;
    int ids_out, lengths_out;
};

// Counts of encoded lines. If `refused`, Python must parse the line at byte `next`; all lines before it are written.
struct LinesResult {
    int64_t next = 0, n_documents = 0, n_tokens = 0, n_lines = 0;
    bool refused = false;
};

// Encode the lines in bytes [begin, end) of a file. Memory does not grow with the length of a line. Throws
// std::system_error.
LinesResult encode_range(Worker&, int input, int64_t begin, int64_t end, const LinesJob&);

// Encode the lines in lines[0, n).
LinesResult encode_block(Worker&, const uint8_t* lines, size_t n, const LinesJob&);

// Memory map of bytes [begin, end) of a file, followed by kPadding zero bytes. It shares its pages with the page cache.
class Mapped {
  public:
    Mapped(int input, int64_t begin, int64_t end);
    ~Mapped();
    Mapped(const Mapped&) = delete;
    Mapped& operator=(const Mapped&) = delete;
    const uint8_t* begin() const { return begin_; }
    const uint8_t* end() const { return end_; }
    void release_before(const uint8_t* p);  // drop the pages before p

  private:
    uint8_t *pages_, *released_;  // start of the mapping; end of the pages already dropped
    size_t n_bytes_;
    const uint8_t *begin_, *end_;
};

// Find the string under `key` of a line, as text_of_line does. Return its first byte, after the quote; null: refused.
const uint8_t* string_of_line(Mapped& line, const std::string& key);

// Pass the text of a string found by string_of_line through `buffer` in windows. `consume` gets (text, n, last) and
// returns the number of bytes it has used; the rest is passed again, followed by new text.
using Consume = std::function<size_t(const uint8_t*, size_t, bool)>;
void for_windows(Mapped& line, const uint8_t* string, std::vector<uint8_t>& buffer, const Consume& consume);

// Return a position near the end of text[0, n) where a word begins, whatever text follows; 0: none exists.
size_t certain_start(const Vocabulary&, const uint8_t* text, size_t n);

// For a text that continues and is a single word so far: append the ids of its first bytes, as far as they are certain.
// The words of the remaining text are the same with and without these bytes before it.
template <typename Id>
Beginning encode_beginning(const Vocabulary&, const uint8_t* text, size_t n, Ids<Id>& ids);

}  // namespace bpe
