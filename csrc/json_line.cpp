// Strict parser for one line of JSON that extracts the text under one key. It refuses a line in any doubtful case, and
// Python parses that line.
#include <algorithm>
#include <bit>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "encode_lines.h"

namespace bpe {

namespace {

constexpr int kMaxDepth = 64;
constexpr size_t kStride = 1 << 20;  // bytes of a long line after which its pages are released
constexpr size_t kWindow = 1 << 20;  // bytes of a long text that are passed on at a time

class Parser {
  public:
    Parser(const uint8_t* p, const uint8_t* end) : p_(p), end_(end) {}

    // For a line that is too long to buffer.
    explicit Parser(Mapped& line, const uint8_t* p) : p_(p), end_(line.end()), line_(&line) {}

    void skip_space() {
        while (p_ < end_ && (*p_ == ' ' || *p_ == '\t' || *p_ == '\r' || *p_ == '\n')) ++p_;
    }
    bool at_end() const { return p_ >= end_; }
    bool accept(uint8_t c) { return p_ < end_ && *p_ == c ? (++p_, true) : false; }

    // Parse a string after its opening quote; unescape it to `out` unless null. Return false if it is refused.
    bool string(std::vector<uint8_t>* out, size_t& n_out) {
        n_out = 0;
        size_t due = kWindow;
        for (;;) {
            if (line_) stream(out, n_out, due);
            copy_plain(out, n_out);
            if (p_ >= end_) return false;
            const uint8_t c = *p_;
            if (c == '"') return ++p_, true;
            if (c < 0x20) return false;
            if (c == '\\') {
                if (!escape(out, n_out)) return false;
                continue;
            }
            if (c < 0x80) continue;
            do {  // non-ASCII text occurs in runs
                const int length = utf8_length(p_, end_);
                if (length == 0) return false;
                if (out) std::memcpy(out->data() + n_out, p_, 4), n_out += length;
                p_ += length;
            } while (p_ < end_ && *p_ >= 0x80 && p_ < stop_);
        }
    }

    bool value(int depth) {
        if (p_ >= end_ || depth > kMaxDepth) return false;
        if (line_) release_pages();
        size_t n;
        switch (*p_) {
            case '"':
                return ++p_, string(nullptr, n);
            case '{':
                return ++p_, members(depth);
            case '[':
                return ++p_, elements(depth);
            case 't':
                return word("true");
            case 'f':
                return word("false");
            case 'n':
                return word("null");
            default:
                return number();
        }
    }

    const uint8_t* place() const { return p_; }
    void set_consumer(const Consume& consume) { consume_ = &consume; }

  private:
    void release_pages() {
        if (static_cast<size_t>(p_ - released_) < kStride && p_ >= released_) return;
        line_->release_before(p_);
        released_ = p_;
    }

    // For a long line: release pages, and pass text to the consumer once it has `due` bytes.
    void stream(std::vector<uint8_t>* out, size_t& n_out, size_t& due) {
        release_pages();
        stop_ = p_ + kStride;
        if (!out || !consume_) return;
        if (n_out >= due) {
            const size_t done = (*consume_)(out->data(), n_out, false);
            std::memmove(out->data(), out->data() + done, n_out - done);
            n_out -= done;
            due = n_out + std::max(n_out, kWindow);
        }
        // Upper bound of what is written before the next call: kStride plain bytes, and an escape or a character.
        const size_t most = n_out + kStride + 2 * kPadding;
        if (out->size() < most) out->resize(most + kWindow);
    }

    // Copy bytes up to the next quote, backslash, control byte or byte >= 0x80, sixteen at a time.
    void copy_plain(std::vector<uint8_t>* out, size_t& n_out) {
#if defined(__SSE2__)
        for (;;) {
            const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p_));
            const __m128i control = _mm_cmpeq_epi8(_mm_min_epu8(bytes, _mm_set1_epi8(0x1F)), bytes);
            const __m128i marks = _mm_or_si128(_mm_cmpeq_epi8(bytes, _mm_set1_epi8('"')),
                                               _mm_cmpeq_epi8(bytes, _mm_set1_epi8('\\')));
            // movemask collects high bits: bytes >= 0x80 set their own
            const unsigned stop = static_cast<unsigned>(
                _mm_movemask_epi8(_mm_or_si128(_mm_or_si128(control, marks), bytes)));
            const size_t n = stop ? std::countr_zero(stop) : 16;
            if (out) {
                _mm_storeu_si128(reinterpret_cast<__m128i*>(out->data() + n_out), bytes);
                n_out += n;
            }
            p_ += n;
            if (stop || p_ >= stop_) return;
        }
#else
        while (p_ < end_ && p_ < stop_ && *p_ >= 0x20 && *p_ < 0x80 && *p_ != '"' && *p_ != '\\') {
            if (out) (*out)[n_out++] = *p_;
            ++p_;
        }
#endif
    }

    bool hex4(const uint8_t* p, uint32_t& value) const {
        if (p + 4 > end_) return false;
        value = 0;
        for (int i = 0; i < 4; ++i) {
            const uint8_t c = p[i], low = c | 0x20;
            if (c >= '0' && c <= '9') value = value << 4 | (c - '0');
            else if (low >= 'a' && low <= 'f') value = value << 4 | (low - 'a' + 10u);
            else return false;
        }
        return true;
    }

    bool escape(std::vector<uint8_t>* out, size_t& n_out) {
        if (p_ + 1 >= end_) return false;
        const uint8_t c = p_[1];
        if (c == 'u') return unicode_escape(out, n_out);
        uint8_t plain;
        switch (c) {
            case '"': case '\\': case '/': plain = c; break;
            case 'b': plain = '\b'; break;
            case 'f': plain = '\f'; break;
            case 'n': plain = '\n'; break;
            case 'r': plain = '\r'; break;
            case 't': plain = '\t'; break;
            default: return false;
        }
        if (out) (*out)[n_out++] = plain;
        p_ += 2;
        return true;
    }

    bool unicode_escape(std::vector<uint8_t>* out, size_t& n_out) {
        uint32_t point, low;
        if (!hex4(p_ + 2, point)) return false;
        p_ += 6;
        if (point >= 0xD800 && point < 0xDC00 && p_ + 6 <= end_ && p_[0] == '\\' && p_[1] == 'u' &&
            hex4(p_ + 2, low) && low >= 0xDC00 && low < 0xE000) {
            point = 0x10000 + ((point - 0xD800) << 10) + (low - 0xDC00);
            p_ += 6;
        } else if (point >= 0xD800 && point < 0xE000) {
            point = 0xFFFD;  // an unpaired surrogate encodes no character
        }
        if (!out) return true;
        uint8_t* to = out->data() + n_out;
        if (point < 0x80) {
            to[0] = static_cast<uint8_t>(point);
            n_out += 1;
        } else if (point < 0x800) {
            to[0] = static_cast<uint8_t>(0xC0 | point >> 6);
            to[1] = static_cast<uint8_t>(0x80 | (point & 0x3F));
            n_out += 2;
        } else if (point < 0x10000) {
            to[0] = static_cast<uint8_t>(0xE0 | point >> 12);
            to[1] = static_cast<uint8_t>(0x80 | (point >> 6 & 0x3F));
            to[2] = static_cast<uint8_t>(0x80 | (point & 0x3F));
            n_out += 3;
        } else {
            to[0] = static_cast<uint8_t>(0xF0 | point >> 18);
            to[1] = static_cast<uint8_t>(0x80 | (point >> 12 & 0x3F));
            to[2] = static_cast<uint8_t>(0x80 | (point >> 6 & 0x3F));
            to[3] = static_cast<uint8_t>(0x80 | (point & 0x3F));
            n_out += 4;
        }
        return true;
    }

    bool word(const char* letters) {
        const size_t n = std::strlen(letters);
        if (p_ + n > end_ || std::memcmp(p_, letters, n) != 0) return false;
        p_ += n;
        return true;
    }

    bool digits() {
        const uint8_t* begin = p_;
        while (p_ < end_ && *p_ >= '0' && *p_ <= '9') ++p_;
        return p_ > begin;
    }

    bool number() {
        accept('-');
        if (!accept('0') && !digits()) return false;
        if (accept('.') && !digits()) return false;
        if (p_ < end_ && (*p_ | 0x20) == 'e') {
            ++p_;
            if (!accept('+')) accept('-');
            if (!digits()) return false;
        }
        return true;
    }

    bool members(int depth) {
        skip_space();
        if (accept('}')) return true;
        do {
            size_t n;
            skip_space();
            if (!accept('"') || !string(nullptr, n)) return false;
            skip_space();
            if (!accept(':')) return false;
            skip_space();
            if (!value(depth + 1)) return false;
            skip_space();
        } while (accept(','));
        return accept('}');
    }

    bool elements(int depth) {
        skip_space();
        if (accept(']')) return true;
        do {
            skip_space();
            if (!value(depth + 1)) return false;
            skip_space();
        } while (accept(','));
        return accept(']');
    }

    const uint8_t* p_;
    const uint8_t* end_;
    Mapped* line_ = nullptr;
    const uint8_t* stop_ = end_ + kPadding;  // end of the current stretch; before end_ in a long line
    const uint8_t* released_ = p_;
    const Consume* consume_ = nullptr;
};

// Parse a line; set `string` to the start of the string under `key`, and write its text unless `text` is null.
Line parse_line(Parser& parser, const std::string& key, std::vector<uint8_t>* text, size_t& n_text,
                const uint8_t*& string) {
    if (!parser.accept('{')) return Line::kRefused;
    string = nullptr;
    do {
        parser.skip_space();
        if (!parser.accept('"')) return Line::kRefused;
        const uint8_t* name = parser.place();
        size_t n;
        if (!parser.string(nullptr, n)) return Line::kRefused;
        const size_t length = static_cast<size_t>(parser.place() - 1 - name);
        if (std::memchr(name, '\\', length)) return Line::kRefused;  // an escaped name may equal the key
        const bool is_key = length == key.size() && std::memcmp(name, key.data(), length) == 0;
        parser.skip_space();
        if (!parser.accept(':')) return Line::kRefused;
        parser.skip_space();
        if (is_key) {
            if (string || !parser.accept('"')) return Line::kRefused;
            string = parser.place();
            if (!parser.string(text, n_text)) return Line::kRefused;
        } else if (!parser.value(0)) {
            return Line::kRefused;
        }
        parser.skip_space();
    } while (parser.accept(','));
    if (!string || !parser.accept('}')) return Line::kRefused;
    parser.skip_space();
    return parser.at_end() ? Line::kText : Line::kRefused;
}

}  // namespace

Line text_of_line(const uint8_t* line, const uint8_t* end, const std::string& key, std::vector<uint8_t>& text,
                  size_t& n_text) {
    Parser parser(line, end);
    parser.skip_space();
    if (parser.at_end()) return Line::kBlank;
    // An unescaped string is never longer than its source, and stores write up to sixteen bytes past its end.
    const size_t most = static_cast<size_t>(end - line) + 2 * kPadding;
    if (text.size() < most) text.resize(most + most / 2);
    const uint8_t* string;
    const Line kind = parse_line(parser, key, &text, n_text, string);
    if (kind == Line::kText) std::memset(text.data() + n_text, 0, kPadding);
    return kind;
}

const uint8_t* string_of_line(Mapped& line, const std::string& key) {
    Parser parser(line, line.begin());
    parser.skip_space();
    size_t n;
    const uint8_t* string;
    return parse_line(parser, key, nullptr, n, string) == Line::kText ? string : nullptr;
}

void for_windows(Mapped& line, const uint8_t* string, std::vector<uint8_t>& buffer, const Consume& consume) {
    Parser parser(line, string);
    parser.set_consumer(consume);
    size_t n;
    [[maybe_unused]] const bool valid = parser.string(&buffer, n);  // always true: string_of_line has parsed it
    std::memset(buffer.data() + n, 0, kPadding);
    consume(buffer.data(), n, true);
}

}  // namespace bpe
