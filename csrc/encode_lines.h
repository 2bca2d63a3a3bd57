// JSON lines to ids and lengths in files.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bpe.h"

namespace bpe {

// Cache and buffers of one thread. The vocabulary, first, outlives the cache that looks into it.
struct Worker {
    explicit Worker(std::shared_ptr<Vocabulary> of) : vocabulary(std::move(of)), cache(vocabulary->words) {}
    std::shared_ptr<Vocabulary> vocabulary;
    WordCache cache;
    Ids<uint16_t> narrow_ids;
    Ids<uint32_t> wide_ids;
    std::vector<int32_t> lengths;
    std::vector<uint8_t> block, text;
};

// `eod` < 0: none. Ids go to one file descriptor, int32 where `wide`, else uint16; int32 lengths to another.
struct LinesJob {
    const std::string& key;
    bool special;
    int64_t eod;
    bool wide;
    int ids_out, lengths_out;
};

// `refused`: the line at byte `next` is for Python to judge; all before it is written.
struct LinesTold {
    int64_t next = 0, n_documents = 0, n_tokens = 0, n_lines = 0;
    bool refused = false;
};

// The lines in bytes [begin, end) of a file. Memory does not grow with the length of a line. Throws std::system_error.
LinesTold encode_range(Worker&, int input, int64_t begin, int64_t end, const LinesJob&);

// The lines in lines[0, n).
LinesTold encode_block(Worker&, const uint8_t* lines, size_t n, const LinesJob&);

// A file's bytes [begin, end) in memory, with kPadding zero bytes behind them. The pages are the file's own.
class Mapped {
  public:
    Mapped(int input, int64_t begin, int64_t end);
    ~Mapped();
    Mapped(const Mapped&) = delete;
    Mapped& operator=(const Mapped&) = delete;
    const uint8_t* begin() const { return begin_; }
    const uint8_t* end() const { return end_; }
    void forget_before(const uint8_t* p);  // gives the pages back

  private:
    uint8_t *pages_, *forgotten_;
    size_t n_bytes_;
    const uint8_t *begin_, *end_;
};

// Finds the string under `key` of a line as text_of_line does: where it begins, behind its quote; null: refused.
const uint8_t* string_of_line(Mapped& line, const std::string& key);

// Takes the text of a string that string_of_line found through `buffer`, some at a time: `take` gets (text, n, last)
// and says how much of it is done with; the rest comes again with what follows.
using Take = std::function<size_t(const uint8_t*, size_t, bool)>;
void for_windows(Mapped& line, const uint8_t* string, std::vector<uint8_t>& buffer, const Take& take);

// A place in text[0, n) where a word begins whatever follows the text, near its end; 0: none was found.
size_t certain_start(const Vocabulary&, const uint8_t* text, size_t n);

// Of a text that goes on and is one word so far: appends the ids of its first bytes, as far as they are certain.
// Where it goes on, its words are the same whether those bytes stand before it or not.
template <typename Id>
Beginning encode_beginning(const Vocabulary&, const uint8_t* text, size_t n, Ids<Id>& ids);

}  // namespace bpe
