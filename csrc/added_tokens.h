// Added tokens: texts that become one id before any other split, as in AddedVocabulary of `tokenizers`.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "automaton.h"

namespace bpe {

struct AddedToken {
    std::string text;
    uint32_t id;
    bool single_word, lstrip, rstrip, special;
};

// Properties of a code point that added tokens depend on.
enum PointKind : uint8_t { kWordCharacter = 1, kStripped = 2 };

// Finds the longest token at the leftmost position, then continues after it.
class AddedTokens {
  public:
    void build(std::vector<AddedToken> tokens, const std::vector<uint8_t>* kinds);

    bool empty() const { return tokens_.empty(); }
    size_t longest() const { return longest_; }

    // Return whether any token's text occurs.
    bool occurs(const uint8_t* p, const uint8_t* end) const {
        const AddedToken* token;
        return find(p, end, token) != end;
    }

    // Call text(begin, end) for the text between tokens, and id(number) for each token. If not `special`, special
    // tokens are ordinary text, which still hides shorter tokens inside it, as in the library.
    template <typename Text, typename Id>
    void split(const uint8_t* begin, const uint8_t* end, bool special, Text&& text, Id&& id) const {
        const uint8_t *done = begin, *at = begin;
        for (;;) {
            const AddedToken* token;
            const uint8_t* start = find(at, end, token);
            if (start == end) break;
            const uint8_t* stop = at = start + token->text.size();
            if (!special && token->special) continue;
            if (token->single_word && (is_word_before(begin, start) || is_word_at(stop, end))) continue;
            if (token->lstrip) start = std::max(strip_left(begin, start), done);
            if (token->rstrip) stop = strip_right(stop, end);
            if (done < start) text(done, start);
            if (start < stop) id(token->id);  // else an earlier token has removed all of its white space
            done = stop;
        }
        if (done != end) text(done, end);
    }

  private:
    // Return the start of the first token in [p, end), and the longest token there; or `end`.
    const uint8_t* find(const uint8_t* p, const uint8_t* end, const AddedToken*& token) const;
    const uint8_t* next_candidate(const uint8_t* p, const uint8_t* end) const;
    const AddedToken* longest_at(const uint8_t* p, const uint8_t* end) const;
    bool is_word_before(const uint8_t* begin, const uint8_t* p) const;
    bool is_word_at(const uint8_t* p, const uint8_t* end) const;
    const uint8_t* strip_left(const uint8_t* begin, const uint8_t* p) const;
    const uint8_t* strip_right(const uint8_t* p, const uint8_t* end) const;

    struct Node {
        int32_t child = -1, sibling = -1, token = -1;
        uint8_t byte = 0;
    };
    std::vector<AddedToken> tokens_;
    std::vector<Node> nodes_;        // trie; node 0 is the root
    std::vector<uint64_t> pairs_;    // bit set of the first two bytes of tokens
    std::vector<uint8_t> firsts_;    // distinct first bytes
    const std::vector<uint8_t>* kinds_ = nullptr;  // PointKind of every code point
    size_t longest_ = 0;
};

}  // namespace bpe
