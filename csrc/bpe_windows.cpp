// Long texts in windows: where a text can be divided without a change of its ids.
#include <algorithm>

#include "encode_lines.h"

namespace bpe {

namespace {

constexpr size_t kMargin = 16;  // bytes beyond a word that its end may depend on

// Return the number of leading bytes whose words are certain in a text that continues after its n bytes. The last
// bytes may be the start of an added token.
size_t certain_bytes(const Vocabulary& v, size_t n) {
    const size_t margin = std::max(v.added.longest(), v.added_after.longest()) + kMargin;
    return n > margin ? n - margin : 0;
}

bool has_added(const Vocabulary& v, const uint8_t* p, const uint8_t* end) {
    if (v.added.occurs(p, end)) return true;
    if (v.added_after.empty() || !v.characters.settings().normalizes) return v.added_after.occurs(p, end);
    const std::vector<uint8_t> text = v.characters.normalize(p, end, true);
    return v.added_after.occurs(text.data(), text.data() + text.size() - kPadding);
}

// Return whether every word ends between an ASCII letter and a blank that a letter follows.
bool splits_before_blank(const Vocabulary& v) {
    if (!v.characters.empty()) {
        for (uint32_t c = 0; c < 128; ++c)
            if (class_of_ascii(static_cast<uint8_t>(c)) == kLetter && !v.characters.is_cut(c, ' ')) return false;
        return true;
    }
    for (const Stage& stage : v.stages)
        if (!stage.automaton.ends_before_blank()) return false;
    return v.is_gpt2 || (!v.stages.empty() && v.stages.back().automaton.splits_before_blank());
}

}  // namespace

size_t certain_start(const Vocabulary& v, const uint8_t* text, size_t n) {
    // Return whether a split at `at` would divide an added token, or a token would change the words around it.
    const size_t longest = std::max(v.added.longest(), v.added_after.longest());
    auto near_added = [&](size_t at) {
        const size_t from = at > longest + 8 ? at - longest - 8 : 0, to = std::min(n, at + longest + 8);
        return longest && has_added(v, text + from, text + to);
    };
    const size_t last = certain_bytes(v, n);
    auto letter = [&](size_t i) { return class_of_ascii(text[i]) == kLetter; };
    if (splits_before_blank(v)) {
        for (size_t at = last; at > 1; --at)
            if (text[at] == ' ' && letter(at - 1) && letter(at + 1) && !near_added(at)) return at;
    }
    if (!v.characters.empty()) {
        for (size_t at = last; at > 1; --at) {
            if ((text[at] & 0xC0) == 0x80) continue;
            size_t before = at - 1;
            while (before && (text[before] & 0xC0) == 0x80) --before;
            uint32_t left, right;
            Characters::point_at(text + before, left);
            Characters::point_at(text + at, right);
            const bool is_white = (v.point_kinds[left] | v.point_kinds[right]) & kStripped;  // perhaps part of a token
            if (!is_white && v.characters.is_cut(left, right) && !near_added(at)) return at;
        }
        return 0;
    }
    size_t start = 0;
    if (!v.is_gpt2 || !v.stages.empty() || !v.combining.empty()) return start;
    for (const uint8_t *p = text, *end = text + n; p < end;) {
        p = gpt2_word_end(v, p, end);
        const size_t at = static_cast<size_t>(p - text);
        if (at > last) break;
        if (!near_added(at)) start = at;
    }
    return start;
}

template <typename Id>
Beginning encode_beginning(const Vocabulary& v, const uint8_t* text, size_t n, Ids<Id>& ids) {
    const size_t certain = certain_bytes(v, n);
    if (!v.is_gpt2 || !v.stages.empty() || !v.whole.empty()) return {nullptr, 0, 0};
    if (gpt2_word_end(v, text, text + n) < text + certain) return {nullptr, 0, 0};
    if (has_added(v, text, text + n)) return {nullptr, 0, 0};
    std::vector<uint32_t> merged(certain);
    const Beginning beginning = merge_beginning(v, text, certain, merged.data());
    for (const uint32_t* id = merged.data(); id < beginning.out; ++id) ids.push(static_cast<Id>(*id));
    return beginning;
}

template Beginning encode_beginning(const Vocabulary&, const uint8_t*, size_t, Ids<uint16_t>&);
template Beginning encode_beginning(const Vocabulary&, const uint8_t*, size_t, Ids<uint32_t>&);

}  // namespace bpe
