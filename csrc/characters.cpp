#include "characters.h"

#include <stdexcept>

namespace bpe {

namespace {

constexpr size_t kPaddingBytes = 64;
constexpr uint8_t kBlankBytes[] = {0xE2, 0x96, 0x81};

uint64_t spread(uint64_t pair) {
    pair *= 0x9E3779B97F4A7C15ULL;
    return pair ^ (pair >> 29);
}

}  // namespace

void Characters::build(const std::vector<std::pair<uint32_t, uint32_t>>& point_ids, std::vector<uint32_t> byte_ids,
                       Settings settings) {
    settings_ = settings;
    byte_ids_ = std::move(byte_ids);
    pages_.assign(0x110000 / kPage, 0);
    ids_.assign(kPage, kNoId);
    for (const auto& [point, id] : point_ids) {
        if (point == ' ') continue;  // occurs in no text: blanks are replaced
        const uint32_t from = point == kBlank ? ' ' : point;
        uint16_t& page = pages_.at(from / kPage);
        if (!page) {
            page = static_cast<uint16_t>(ids_.size() / kPage);
            ids_.resize(ids_.size() + kPage, kNoId);
        }
        ids_[page * kPage + from % kPage] = id;
    }
    if (id_of(' ') == kNoId) throw std::invalid_argument("characters: got a vocabulary without U+2581");
    pairs_.assign(1 << 12, 0);
}

void Characters::add_merge(std::string_view left, std::string_view right) {
    if (left.empty() || right.empty()) throw std::invalid_argument("merges: got an empty piece");
    const uint8_t* begin = reinterpret_cast<const uint8_t*>(left.data());
    const uint8_t* last = begin + left.size() - 1;
    while (last > begin && (*last & 0xC0) == 0x80) --last;
    uint32_t before, after;
    point_at(last, before);
    point_at(reinterpret_cast<const uint8_t*>(right.data()), after);
    if ((before | after) < 128) ascii_joins_[before << 7 | after] = true;
    else if (!has_pair(before, after)) add_pair(uint64_t{before} << 32 | after);
}

bool Characters::has_pair(uint32_t left, uint32_t right) const {
    const uint64_t pair = uint64_t{left} << 32 | right;
    for (size_t i = spread(pair) & (pairs_.size() - 1); pairs_[i]; i = (i + 1) & (pairs_.size() - 1))
        if (pairs_[i] == pair) return true;
    return false;
}

void Characters::add_pair(uint64_t pair) {
    if (2 * ++n_pairs_ > pairs_.size()) {
        std::vector<uint64_t> before(2 * pairs_.size(), 0);
        before.swap(pairs_);
        n_pairs_ = 1;
        for (const uint64_t other : before)
            if (other) add_pair(other);
    }
    size_t i = spread(pair) & (pairs_.size() - 1);
    while (pairs_[i]) i = (i + 1) & (pairs_.size() - 1);
    pairs_[i] = pair;
}

std::vector<uint8_t> Characters::normalize(const uint8_t* p, const uint8_t* end, bool has_prefix) const {
    std::vector<uint8_t> text;
    const size_t n_blanks = static_cast<size_t>(std::count(p, end, ' ')) + has_prefix;
    text.reserve(static_cast<size_t>(end - p) + 2 * n_blanks + 1 + kPaddingBytes);
    auto push_blank = [&] {
        for (const uint8_t byte : kBlankBytes) text.push_back(byte);
    };
    if (has_prefix) push_blank();
    for (; p < end; ++p) {
        if (*p == ' ') push_blank();
        else text.push_back(*p);
    }
    text.resize(text.size() + kPaddingBytes);
    return text;
}

}  // namespace bpe
