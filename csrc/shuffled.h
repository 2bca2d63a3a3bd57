// numpy's RandomState.shuffle over ranges of numbers, bit for bit, with overlapping cache misses.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace shuffled {

using Ints = py::array_t<int64_t, py::array::c_style>;
using Words = py::array_t<uint32_t, py::array::c_style>;

// Also compile for AVX2, and select the version when the library is loaded, where the compiler supports that.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define WIDE_TOO __attribute__((target_clones("avx2", "default")))
#else
#define WIDE_TOO
#endif

namespace {

constexpr int N_WORDS = 624;        // state of MT19937: Matsumoto and Nishimura, ACM TOMACS 8 (1998)
constexpr int N_TARGETS = 256;      // drawn and prefetched before their swaps
constexpr int64_t LARGEST = int64_t{1} << 32;  // above this numpy draws 64 bits per number

void temper(const uint32_t* key, uint32_t* word) {
    for (int i = 0; i < N_WORDS; ++i) {
        uint32_t y = key[i];
        y ^= y >> 11;
        y ^= y << 7 & 0x9d2c5680u;
        y ^= y << 15 & 0xefc60000u;
        word[i] = y ^ y >> 18;
    }
}

// Advance the generator by 624 words; `word` receives its tempered output.
WIDE_TOO void next_words(uint32_t* key, uint32_t* word) {
    const auto mix = [](uint32_t upper, uint32_t lower) {
        const uint32_t y = (upper & 0x80000000u) | (lower & 0x7fffffffu);
        return y >> 1 ^ (-(y & 1u) & 0x9908b0dfu);
    };
    for (int i = 0; i < 227; ++i) key[i] = key[i + 397] ^ mix(key[i], key[i + 1]);
    for (int i = 227; i < 623; ++i) key[i] = key[i - 227] ^ mix(key[i], key[i + 1]);
    key[623] = key[396] ^ mix(key[623], key[0]);
    temper(key, word);
}

struct Mt19937 {
    uint32_t key[N_WORDS];
    uint32_t word[N_WORDS];  // tempered key
    int pos;
};

// Draw swap partners of positions top, top - 1, ..., top - n + 1, each uniform on 0..position, by rejection sampling
// with a mask. All n positions need the same number of bits, so they share the mask. Nearly every number is valid
// either for all n positions or for none. While that holds, no draw depends on the previous one. Otherwise (`unsure`)
// the words are assigned again, one by one.
void draw_targets(Mt19937& random, uint32_t mask, int64_t top, int n, uint32_t* targets) {
    const uint32_t last = static_cast<uint32_t>(top - n + 1);
    for (int k = 0; k < n;) {
        if (random.pos == N_WORDS) {
            next_words(random.key, random.word);
            random.pos = 0;
        }
        const int n_words = std::min(N_WORDS - random.pos, n - k), before = k;
        const uint32_t* word = random.word + random.pos;
        random.pos += n_words;
        bool unsure = false;
        for (int i = 0; i < n_words; ++i) {
            const uint32_t candidate = word[i] & mask;
            targets[k] = candidate;
            k += candidate <= last;
            unsure |= candidate - last - 1 < static_cast<uint32_t>(n - 1);
        }
        if (!unsure) continue;
        k = before;
        for (int i = 0; i < n_words; ++i) {
            const uint32_t candidate = word[i] & mask;
            targets[k] = candidate;
            k += static_cast<int64_t>(candidate) <= top - k;
        }
    }
}

template <typename T>
void shuffle(Mt19937& random, T* values, int64_t n) {
    uint32_t targets[2][N_TARGETS];  // double buffer: one block is drawn while the other is swapped
    int n_waiting = 0, turn = 0;
    int64_t waiting_top = 0, top = n - 1;
    while (top >= 1 || n_waiting) {
        int n_drawn = 0;
        if (top >= 1) {
            const uint32_t mask = ~uint32_t{0} >> __builtin_clz(static_cast<uint32_t>(top));
            n_drawn = static_cast<int>(std::min<int64_t>(N_TARGETS, top - (mask >> 1)));
            draw_targets(random, mask, top, n_drawn, targets[turn]);
            for (int k = 0; k < n_drawn; ++k) __builtin_prefetch(values + targets[turn][k], 1);
        }
        // Swaps of the previous block: its cache lines have arrived. The order of swaps is numpy's.
        for (int k = 0; k < n_waiting; ++k) std::swap(values[waiting_top - k], values[targets[1 - turn][k]]);
        waiting_top = top;
        n_waiting = n_drawn;
        top -= n_drawn;
        turn = 1 - turn;
    }
}

template <typename T>
py::array fill(Mt19937& random, const int64_t* parts, int64_t n_parts, int64_t total) {
    py::array_t<T> out(total);
    T* values = out.mutable_data();
    py::gil_scoped_release release;
    for (int64_t p = 0; p < n_parts; ++p) {
        const int64_t begin = parts[3 * p], end = parts[3 * p + 1], times = parts[3 * p + 2];
        T* at = values;
        for (int64_t repeat = 0; repeat < times; ++repeat)
            for (int64_t value = begin; value < end; ++value) *at++ = static_cast<T>(value);
        shuffle(random, values, at - values);
        values = at;
    }
    return out;
}

}  // namespace

// Each row (begin, end, times) of parts [p, 3] stands for the numbers begin..end-1, repeated `times` times and
// shuffled; the results are concatenated. key and pos are RandomState's state before; the state after is returned.
static py::tuple shuffled(const Words& key, int pos, const Ints& parts, const py::dtype& dtype) {
    if (key.ndim() != 1 || key.size() != N_WORDS || pos < 0 || pos > N_WORDS)
        throw std::invalid_argument("key, pos: expected 624 words and a position in 0..624");
    if (parts.ndim() != 2 || parts.shape(1) != 3)
        throw std::invalid_argument("parts: expected rows (begin, end, times)");
    const bool is_signed = dtype.kind() == 'i', wide = dtype.itemsize() == 8;
    if ((!is_signed && dtype.kind() != 'u') || (dtype.itemsize() != 4 && !(wide && is_signed)))
        throw std::invalid_argument("dtype: expected int32, uint32 or int64");
    const int64_t most = wide ? INT64_MAX : is_signed ? int64_t{INT32_MAX} + 1 : LARGEST;
    int64_t total = 0;
    for (int64_t p = 0; p < parts.shape(0); ++p) {
        const int64_t begin = parts.at(p, 0), end = parts.at(p, 1), times = parts.at(p, 2);
        if (begin < 0 || end < begin || end > most || times < 0)
            throw std::invalid_argument("parts[" + std::to_string(p) + "]: got a range that the dtype cannot hold");
        int64_t n = 0;
        if (__builtin_mul_overflow(end - begin, times, &n) || n > LARGEST)
            throw std::invalid_argument("parts[" + std::to_string(p) + "]: got more than 2^32 numbers to shuffle");
        total += n;
    }
    Mt19937 random;
    std::copy_n(key.data(), N_WORDS, random.key);
    random.pos = pos;
    temper(random.key, random.word);
    const int64_t* rows = parts.data();
    const int64_t n_parts = parts.shape(0);
    py::array values = wide ? fill<int64_t>(random, rows, n_parts, total)
                       : is_signed ? fill<int32_t>(random, rows, n_parts, total)
                                   : fill<uint32_t>(random, rows, n_parts, total);
    return py::make_tuple(values, Words(N_WORDS, random.key), random.pos);
}

inline void bind(py::module_& m) {
    m.def("shuffled", &shuffled, py::arg("key").noconvert(), py::arg("pos"), py::arg("parts").noconvert(),
          py::arg("dtype"),
          "Concatenated shuffled ranges, and the generator's (key, pos) after: numpy's RandomState.shuffle.");
}

}  // namespace shuffled
