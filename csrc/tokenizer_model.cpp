#include "tokenizer_model.h"

#include <algorithm>
#include <charconv>
#include <functional>
#include <stdexcept>

#include "bpe.h"

namespace bpe {

namespace {

[[noreturn]] void refuse(const char* what) { throw std::invalid_argument(std::string("tokenizer.json: got ") + what); }

// Cursor in JSON text.
class Json {
  public:
    explicit Json(std::string_view text) : text_(text) {}

    char peek() {
        while (at_ < text_.size() && is_white(text_[at_])) ++at_;
        return at_ < text_.size() ? text_[at_] : '\0';
    }
    bool accept(char sign) {
        if (peek() != sign) return false;
        ++at_;
        return true;
    }
    void expect(char sign) {
        if (!accept(sign)) refuse("other signs than JSON has there");
    }
    size_t at() const { return at_; }

    // Call entry(key) for the entries of an object; it reads the value.
    template <typename Entry>
    void object(Entry entry) {
        expect('{');
        if (accept('}')) return;
        std::string key;
        do {
            string(key);
            expect(':');
            entry(key);
        } while (accept(','));
        expect('}');
    }

    // Call element() for the elements of an array; it reads the element.
    template <typename Element>
    void array(Element element) {
        expect('[');
        if (accept(']')) return;
        do element();
        while (accept(','));
        expect(']');
    }

    void string(std::string& out) {
        expect('"');
        out.clear();
        for (;;) {
            const size_t begin = at_;
            while (at_ < text_.size() && text_[at_] != '"' && text_[at_] != '\\' &&
                   static_cast<uint8_t>(text_[at_]) >= 0x20)
                ++at_;
            out.append(text_.substr(begin, at_ - begin));
            const char sign = take();
            if (sign == '"') return;
            if (sign != '\\') refuse("a control character in a string");
            escape(out);
        }
    }

    uint32_t number() {
        peek();
        uint32_t value = 0;
        const char *begin = text_.data() + at_, *end = text_.data() + text_.size();
        const auto [after, error] = std::from_chars(begin, end, value);
        if (error != std::errc() || (*begin == '0' && after > begin + 1)) refuse("an id that is not a whole number");
        at_ = static_cast<size_t>(after - text_.data());
        return value;
    }

    // Move past a value, of which only brackets are checked.
    void skip() {
        int depth = 0;
        do {
            const char sign = peek();
            if (sign == '"') {
                skip_string();
            } else {
                if (sign == '\0') refuse("incomplete JSON");
                depth += (sign == '{' || sign == '[') - (sign == '}' || sign == ']');
                if (depth < 0) refuse("other signs than JSON has there");
                ++at_;
                const bool is_word = !std::strchr("{}[],:", sign);
                while (is_word && at_ < text_.size() && !std::strchr("{}[],:\" \t\r\n", text_[at_])) ++at_;
            }
        } while (depth > 0);
    }

  private:
    static bool is_white(char sign) { return sign == ' ' || sign == '\n' || sign == '\t' || sign == '\r'; }
    void skip_string() {
        for (char sign = take(); (sign = take()) != '"';)
            if (sign == '\\') take();
    }
    char take() {
        if (at_ >= text_.size()) refuse("incomplete JSON");
        return text_[at_++];
    }
    uint32_t hexadecimal() {
        uint32_t value = 0;
        if (text_.size() - at_ < 4) refuse("incomplete JSON");
        const char* begin = text_.data() + at_;
        if (std::from_chars(begin, begin + 4, value, 16).ptr != begin + 4) refuse("an invalid escape");
        at_ += 4;
        return value;
    }
    void escape(std::string& out) {
        static constexpr std::string_view kSigns = "\"\\/bfnrt", kMeanings = "\"\\/\b\f\n\r\t";
        const char sign = take();
        if (const size_t known = kSigns.find(sign); known != kSigns.npos) return out.push_back(kMeanings[known]);
        if (sign != 'u') refuse("an invalid escape");
        uint32_t point = hexadecimal();
        if (point >= 0xDC00 && point < 0xE000) refuse("an unpaired surrogate");
        if (point >= 0xD800 && point < 0xDC00) {
            if (take() != '\\' || take() != 'u') refuse("an unpaired surrogate");
            const uint32_t low = hexadecimal();
            if (low < 0xDC00 || low > 0xDFFF) refuse("an unpaired surrogate");
            point = 0x10000 + ((point - 0xD800) << 10 | (low - 0xDC00));
        }
        auto push = [&](uint32_t byte) { out.push_back(static_cast<char>(byte)); };
        if (point < 0x80) return push(point);
        if (point < 0x800) return push(0xC0 | point >> 6), push(0x80 | (point & 0x3F));
        if (point < 0x10000) push(0xE0 | point >> 12);
        else push(0xF0 | point >> 18), push(0x80 | (point >> 12 & 0x3F));
        push(0x80 | (point >> 6 & 0x3F)), push(0x80 | (point & 0x3F));
    }

    std::string_view text_;
    size_t at_ = 0;
};

// Append a string as serde_json and Python's json (without ensure_ascii) write it.
void append_string(std::string& out, std::string_view text) {
    static constexpr char kDigits[] = "0123456789abcdef";
    out.push_back('"');
    for (const char letter : text) {
        const uint8_t byte = static_cast<uint8_t>(letter);
        if (byte >= 0x20 && letter != '"' && letter != '\\') {
            out.push_back(letter);
            continue;
        }
        out.push_back('\\');
        static constexpr std::string_view kSigns = "\"\\\b\f\n\r\t", kNames = "\"\\bfnrt";
        if (const size_t known = kSigns.find(letter); known != kSigns.npos) out.push_back(kNames[known]);
        else out.append("u00").append({kDigits[byte >> 4], kDigits[byte & 15]});
    }
    out.push_back('"');
}

template <typename Number>
bool has_equal(std::vector<Number> numbers) {
    const bool ascends = std::adjacent_find(numbers.begin(), numbers.end(), std::greater_equal<>()) == numbers.end();
    if (ascends) return false;
    std::sort(numbers.begin(), numbers.end());
    return std::adjacent_find(numbers.begin(), numbers.end()) != numbers.end();
}

void check_utf8(const std::string& content) {
    const uint8_t *p = reinterpret_cast<const uint8_t*>(content.data()), *end = p + content.size();
    while (p < end) {
        uint64_t eight;
        if (end - p >= 8 && (std::memcpy(&eight, p, 8), !(eight & 0x8080808080808080ULL))) {
            p += 8;
            continue;
        }
        const int length = utf8_length(p, end);
        if (!length) refuse("bytes that are not UTF-8");
        p += length;
    }
}

}  // namespace

TokenizerModel::TokenizerModel(const std::string& content) {
    if (content.size() > 0xFFFFFFFF) refuse("4 GB or more");
    check_utf8(content);
    Json json(content);
    std::string_view vocab, merges;
    bool has_model = false;
    auto span_of = [&](std::string_view& span) {
        json.peek();
        const size_t begin = json.at();
        json.skip();
        if (!span.empty()) refuse("a key twice");
        span = std::string_view(content).substr(begin, json.at() - begin);
    };
    json.object([&](const std::string& key) {
        if (key != "model") return json.skip();
        if (has_model) refuse("a key twice");
        has_model = true;
        json.object([&](const std::string& inner) {
            if (inner == "vocab") span_of(vocab);
            else if (inner == "merges") span_of(merges);
            else json.skip();
        });
    });
    if (json.peek()) refuse("text after its object");
    if (vocab.empty() || merges.empty()) refuse("a model without vocab and merges");
    const bool vocab_first = vocab.data() < merges.data();
    const std::string_view spans[] = {vocab_first ? vocab : merges, vocab_first ? merges : vocab};
    const char* at = content.data();
    for (const std::string_view span : spans) {
        settings_.append(at, span.data()).append(span.data() == vocab.data() ? "{}" : "[]");
        at = span.data() + span.size();
    }
    settings_.append(at, content.data() + content.size());
    parse_vocab(vocab);
    parse_merges(merges);
}

void TokenizerModel::parse_vocab(std::string_view text) {
    Json json(text);
    begins_.assign(1, 0);
    text_.reserve(text.size() / 2);
    json.object([&](const std::string& piece) {
        text_ += piece;
        begins_.push_back(static_cast<uint32_t>(text_.size()));
        ids_.push_back(json.number());
        largest_ = std::max(largest_, ids_.back());
    });
    numbers_ = PieceNumbers(size());  // after the loop: `text_` stays in place from here on
    for (size_t i = 0; i < size(); ++i)
        if (!numbers_.add(piece(i))) refuse("a piece twice");
    if (has_equal(ids_)) refuse("an id twice");
}

void TokenizerModel::parse_merges(std::string_view text) {
    Json json(text);
    std::string left, right;
    json.array([&] {
        if (json.peek() == '[') {
            json.expect('[');
            json.string(left);
            json.expect(',');
            json.string(right);
            json.expect(']');
            return add_merge(left, right);
        }
        json.string(left);  // "left right"
        const size_t blank = left.find(' ');
        if (blank == left.npos || left.find(' ', blank + 1) != left.npos || left.starts_with("#version"))
            refuse("a merge of another form");
        add_merge(std::string_view(left).substr(0, blank), std::string_view(left).substr(blank + 1));
    });
    std::vector<uint64_t> pairs(merges_.size());
    for (size_t i = 0; i < pairs.size(); ++i) pairs[i] = uint64_t{merges_[i].left} << 32 | merges_[i].right;
    if (has_equal(std::move(pairs))) refuse("a merge twice");
}

void TokenizerModel::add_merge(std::string_view left, std::string_view right) {
    const size_t first = find(left), second = find(right);
    if (first == kAbsent || second == kAbsent) refuse("a merge of pieces outside the vocabulary");
    // Most merges have the result of the merge before, or the next piece: these need no lookup.
    const size_t before = merges_.empty() ? 0 : merges_.back().joined;
    auto is_joined = [&](size_t number) {
        const std::string_view text = piece(number);
        return text.size() == left.size() + right.size() && text.starts_with(left) && text.ends_with(right);
    };
    size_t both = before;
    if (!is_joined(both) && (++both >= size() || !is_joined(both))) {
        both = find(std::string(left).append(right));
        if (both == kAbsent) refuse("a merge of pieces outside the vocabulary");
    }
    merges_.push_back(
        {static_cast<uint32_t>(first), static_cast<uint32_t>(second), static_cast<uint32_t>(both)});
}

std::string TokenizerModel::vocab_json() const {
    std::vector<uint32_t> numbers(size());
    for (uint32_t i = 0; i < numbers.size(); ++i) numbers[i] = i;
    std::sort(numbers.begin(), numbers.end(), [&](uint32_t a, uint32_t b) { return ids_[a] < ids_[b]; });
    std::string out = "{";
    for (const uint32_t number : numbers) {
        if (out.size() > 1) out.push_back(',');
        append_string(out, piece(number));
        out.append(":").append(std::to_string(ids_[number]));
    }
    return out.append("}");
}

std::string TokenizerModel::merges_json() const {
    std::string out = "[";
    for (const Merge& merge : merges_) {
        out.append(out.size() > 1 ? ",[" : "[");
        append_string(out, piece(merge.left));
        out.push_back(',');
        append_string(out, piece(merge.right));
        out.push_back(']');
    }
    return out.append("]");
}

}  // namespace bpe
