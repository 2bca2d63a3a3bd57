#include "encode_lines.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <stdexcept>
#include <system_error>

namespace bpe {

namespace {

constexpr size_t kBlock = 1 << 20;       // bytes read at a time
constexpr int64_t kLong = 4 << 20;       // bytes; a longer line is memory-mapped, not read as a whole
constexpr size_t kFlushedIds = 1 << 17;  // ids buffered before a write

[[noreturn]] void fail() { throw std::system_error(errno, std::generic_category()); }

void write_all(int descriptor, const void* data, size_t n) {
    const char* p = static_cast<const char*>(data);
    while (n > 0) {
        const ssize_t written = ::write(descriptor, p, n);
        if (written < 0) {
            if (errno == EINTR) continue;
            fail();
        }
        p += written;
        n -= static_cast<size_t>(written);
    }
}

// Read bytes [at, at + n) into the block, and append zero padding.
void read_block(Worker& w, int input, int64_t at, size_t n) {
    if (w.block.size() < n + kPadding) w.block.resize(n + kPadding);
    size_t n_read = 0;
    while (n_read < n) {
        const ssize_t got = ::pread(input, w.block.data() + n_read, n - n_read, at + static_cast<int64_t>(n_read));
        if (got < 0) {
            if (errno == EINTR) continue;
            fail();
        }
        if (got == 0) throw std::invalid_argument("the input became shorter while it was read");
        n_read += static_cast<size_t>(got);
    }
    std::memset(w.block.data() + n, 0, kPadding);
}

size_t whole_lines(const uint8_t* block, size_t n) {
    const void* last = ::memrchr(block, '\n', n);
    return last ? static_cast<size_t>(static_cast<const uint8_t*>(last) - block) + 1 : 0;
}

// Return the end of the line that begins at `at`, after its line feed. Overwrites the block.
int64_t end_of_line(Worker& w, int input, int64_t at, int64_t end) {
    while (at < end) {
        const size_t n = static_cast<size_t>(std::min<int64_t>(kBlock, end - at));
        read_block(w, input, at, n);
        const void* feed = std::memchr(w.block.data(), '\n', n);
        if (feed) return at + (static_cast<const uint8_t*>(feed) - w.block.data()) + 1;
        at += static_cast<int64_t>(n);
    }
    return end;
}

template <typename Id>
class Encoding {
  public:
    Encoding(Worker& w, Ids<Id>& ids, const LinesJob& job) : w_(w), ids_(ids), job_(job) {
        ids_.clear();
        w_.lengths.clear();
    }

    LinesResult result;

    // Encode the lines in [p, stop), which zero padding follows. Return the start of a refused line, or `stop`.
    const uint8_t* lines(const uint8_t* p, const uint8_t* stop) {
        while (p < stop) {
            const void* feed = std::memchr(p, '\n', static_cast<size_t>(stop - p));
            const uint8_t* line_end = feed ? static_cast<const uint8_t*>(feed) : stop;
            size_t n_text = 0;
            const Line kind = text_of_line(p, line_end, job_.key, w_.text, n_text);
            uint8_t rank = 0;
            if (kind == Line::kRefused ||
                (kind == Line::kText && !is_nfc(*w_.vocabulary, w_.text.data(), n_text, rank))) {
                result.refused = true;
                return p;
            }
            if (kind == Line::kText) {
                const size_t before = ids_.size();
                encode_text(*w_.vocabulary, w_.cache, w_.text.data(), n_text, job_.special, ids_);
                if (job_.eod >= 0) ids_.push(static_cast<Id>(job_.eod));
                document(static_cast<int64_t>(ids_.size() - before));
                if (ids_.size() >= kFlushedIds) flush();
            }
            ++result.n_lines;
            p = feed ? line_end + 1 : stop;
        }
        return stop;
    }

    // Encode one line of any length. Return false if it is refused.
    bool long_line(int input, int64_t begin, int64_t end) {
        Mapped line(input, begin, end);
        const uint8_t* text = string_of_line(line, job_.key);
        if (!text || !is_normalized(line, text)) {
            result.refused = true;
            return false;
        }
        bool continues = false;
        int64_t n_tokens = 0, first_id = -1;  // expected first id of a window that starts inside a word; else -1
        for_windows(line, text, w_.text, [&](const uint8_t* window, size_t n, bool last) {
            size_t n_now = last ? n : certain_start(*w_.vocabulary, window, n);
            int64_t next_id = -1;
            if (n_now || last) {
                encode_text(*w_.vocabulary, w_.cache, window, n_now, job_.special, ids_, continues);
            } else {
                const Beginning beginning = encode_beginning(*w_.vocabulary, window, n, ids_);
                n_now = beginning.n;
                next_id = beginning.next_id;
            }
            if (!n_now && !last) return n_now;
            continues = true;
            if (first_id >= 0 && ids_.data()[0] != first_id)
                throw std::length_error("a word of several megabytes has ids that depend on the whole word");
            first_id = next_id;
            if (last && job_.eod >= 0) ids_.push(static_cast<Id>(job_.eod));
            n_tokens += static_cast<int64_t>(ids_.size());
            write_ids();
            return n_now;
        });
        document(n_tokens);
        ++result.n_lines;
        return true;
    }

    void flush() {
        write_ids();
        write_all(job_.lengths_out, w_.lengths.data(), 4 * w_.lengths.size());
        w_.lengths.clear();
    }

  private:
    bool is_normalized(Mapped& line, const uint8_t* text) {
        if (w_.vocabulary->combining.empty()) return true;
        bool is_certain = true;
        uint8_t rank = 0;
        for_windows(line, text, w_.text, [&](const uint8_t* window, size_t n, bool last) {
            size_t n_now = n;
            while (!last && n_now && (window[n_now - 1] & 0xC0) == 0x80) --n_now;  // whole characters only
            if (!last && n_now && window[n_now - 1] >= 0xC0) --n_now;
            is_certain = is_certain && is_nfc(*w_.vocabulary, window, n_now, rank);
            return n_now;
        });
        return is_certain;
    }

    void write_ids() {
        write_all(job_.ids_out, ids_.data(), sizeof(Id) * ids_.size());
        ids_.clear();
    }

    void document(int64_t n_tokens) {
        if (n_tokens > std::numeric_limits<int32_t>::max())
            throw std::invalid_argument("a document has more tokens than an int32 length can store");
        w_.lengths.push_back(static_cast<int32_t>(n_tokens));
        result.n_tokens += n_tokens;
        ++result.n_documents;
    }

    Worker& w_;
    Ids<Id>& ids_;
    const LinesJob& job_;
};

template <typename Id>
LinesResult range_of(Worker& w, Ids<Id>& ids, int input, int64_t begin, int64_t end, const LinesJob& job) {
    Encoding<Id> encoding(w, ids, job);
    int64_t at = begin;
    while (at < end && !encoding.result.refused) {
        size_t n = static_cast<size_t>(std::min<int64_t>(kBlock, end - at));
        read_block(w, input, at, n);
        if (at + static_cast<int64_t>(n) < end) n = whole_lines(w.block.data(), n);
        if (!n) {
            const int64_t line_end = end_of_line(w, input, at + kBlock, end);
            if (line_end - at > kLong) {
                encoding.flush();  // earlier documents first: long_line writes its ids directly
                if (encoding.long_line(input, at, line_end)) at = line_end;
                continue;
            }
            n = static_cast<size_t>(line_end - at);
            read_block(w, input, at, n);
        }
        at += encoding.lines(w.block.data(), w.block.data() + n) - w.block.data();
    }
    encoding.flush();
    encoding.result.next = at;
    return encoding.result;
}

template <typename Id>
LinesResult block_of(Worker& w, Ids<Id>& ids, const uint8_t* lines, size_t n, const LinesJob& job) {
    Encoding<Id> encoding(w, ids, job);
    w.block.resize(std::max(w.block.size(), n + kPadding));
    std::memcpy(w.block.data(), lines, n);
    std::memset(w.block.data() + n, 0, kPadding);
    encoding.result.next = encoding.lines(w.block.data(), w.block.data() + n) - w.block.data();
    encoding.flush();
    return encoding.result;
}

}  // namespace

LinesResult encode_range(Worker& w, int input, int64_t begin, int64_t end, const LinesJob& job) {
    return job.wide ? range_of(w, w.wide_ids, input, begin, end, job)
                    : range_of(w, w.narrow_ids, input, begin, end, job);
}

LinesResult encode_block(Worker& w, const uint8_t* lines, size_t n, const LinesJob& job) {
    return job.wide ? block_of(w, w.wide_ids, lines, n, job) : block_of(w, w.narrow_ids, lines, n, job);
}

Mapped::Mapped(int input, int64_t begin, int64_t end) {
    const int64_t page = ::sysconf(_SC_PAGESIZE), first = begin / page * page;
    const size_t n_file = static_cast<size_t>(end - first);
    n_bytes_ = n_file + static_cast<size_t>(page) + kPadding;  // padding even if the file ends at a page boundary
    void* reserved = ::mmap(nullptr, n_bytes_, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (reserved == MAP_FAILED) fail();
    pages_ = released_ = static_cast<uint8_t*>(reserved);
    if (::mmap(pages_, n_file, PROT_READ, MAP_PRIVATE | MAP_FIXED, input, first) == MAP_FAILED) {
        const int why = errno;
        ::munmap(pages_, n_bytes_);
        throw std::system_error(why, std::generic_category());
    }
    begin_ = pages_ + (begin - first);
    end_ = pages_ + n_file;
}

Mapped::~Mapped() { ::munmap(pages_, n_bytes_); }

void Mapped::release_before(const uint8_t* p) {
    const size_t page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
    if (p < released_) released_ = pages_;  // second pass, from the start
    const size_t n = static_cast<size_t>(p - released_) / page * page;
    if (n) ::madvise(released_, n, MADV_DONTNEED);
    released_ += n;
}

}  // namespace bpe
