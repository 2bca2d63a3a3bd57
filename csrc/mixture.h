// Assigns the turns of a mixture to domains, and maps each turn to a unit of its domain.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace mixture {

using Longs = py::array_t<int64_t, py::array::c_style>;
using Ints = py::array_t<int32_t, py::array::c_style>;
using Words = py::array_t<uint64_t, py::array::c_style>;

namespace {

constexpr int kBits = 40;  // weights are integers that sum to 2^40
constexpr int64_t kWhole = int64_t{1} << kBits, kMask = kWhole - 1;
constexpr int kRounds = 6;
constexpr uint64_t kMix = 0xFF51AFD7ED558CCD;  // MurmurHash3's 64-bit finaliser, as in megatron/data/permutation.py

// twin: mixed() in tests/mixture/test_distributor.py
uint64_t mixed(uint64_t x) {
    x ^= x >> 33;
    x *= kMix;
    x ^= x >> 33;
    x *= 0xC4CEB9FE1A85EC53;
    return x ^ x >> 33;
}

// Deadline of a domain's next unit: `ahead / part` units after the end of the chunk. Compared exactly, by
// cross-multiplication: rounding could create ties that are broken differently on another machine.
struct Deadline {
    int64_t ahead, part, domain;
    bool operator<(const Deadline& other) const {
        const auto left = static_cast<unsigned __int128>(ahead) * static_cast<uint64_t>(other.part);
        const auto right = static_cast<unsigned __int128>(other.ahead) * static_cast<uint64_t>(part);
        return left != right ? left < right : domain < other.domain;
    }
};

// Compute the units of each domain in one chunk: first overdue units, then those with the earliest deadlines.
// lag: units that a domain should have had by the end of the chunk, minus units it has had; in parts of 2^40.
void apportion(const int64_t* parts, int64_t* lag, int64_t n, int64_t size, std::vector<Deadline>& deadlines,
               int64_t* counts) {
    int64_t left = size;
    deadlines.clear();
    for (int64_t k = 0; k < n; ++k) {
        lag[k] += parts[k] * size;
        counts[k] = std::max<int64_t>(0, lag[k] >> kBits);
        left -= counts[k];
        // A fraction of a unit is due: the domain competes for one more.
        if (lag[k] > 0 && (lag[k] & kMask) && parts[k])
            deadlines.push_back({kWhole - (lag[k] & kMask), parts[k], k});
    }
    for (; left < 0; ++left) {  // only after a change of weights: more units are overdue than the chunk has
        int64_t least = -1;
        for (int64_t k = 0; k < n; ++k)
            if (counts[k] &&
                (least < 0 || lag[k] - (counts[k] << kBits) < lag[least] - (counts[least] << kBits)))
                least = k;
        --counts[least];
    }
    if (left > 0) {
        const size_t n_served = std::min<size_t>(left, deadlines.size());
        const size_t nth = n_served - (n_served == deadlines.size());
        std::nth_element(deadlines.begin(), deadlines.begin() + nth, deadlines.end());
        for (size_t i = 0; i < n_served; ++i) ++counts[deadlines[i].domain];
        left -= n_served;
    }
    for (int64_t k = 0; left > 0; k = (k + 1) % n)  // only after a domain was removed from the mixture
        if (parts[k]) ++counts[k], --left;
    for (int64_t k = 0; k < n; ++k) lag[k] -= counts[k] << kBits;
}

// Return whether a domain with a positive weight has no unit left.
bool any_empty(const int64_t* parts, const int64_t* done, const int64_t* limit, int64_t n) {
    for (int64_t k = 0; k < n; ++k)
        if (parts[k] && done[k] >= limit[k]) return true;
    return false;
}

struct Turn {
    double at;  // position in the chunk
    int32_t domain;
    int64_t number;
};

}  // namespace

// Turns of chunks first_chunk, first_chunk + 1, ... of `size` units each, for domains of weight parts[k] / 2^40.
// The state of domain k is done[k] units and lag[k] parts. It advances by as many chunks as end before a domain exceeds
// its limit. Returns (chunks, domain int32, unit of the domain int64, done after, lag after), units chunk by chunk.
// Inside a chunk the units of a domain are evenly spaced; the hash of (seed, chunk, domain) gives their offset.
static py::tuple mixture_turns(const Longs& parts, const Longs& done, const Longs& lag, const Longs& limit,
                               int64_t size, int64_t first_chunk, int64_t n_chunks, uint64_t seed, bool until_empty) {
    const int64_t n = parts.size();
    if (parts.ndim() != 1 || done.size() != n || lag.size() != n || limit.size() != n || n < 1)
        throw std::invalid_argument("parts, done, lag, limit: expected one number per domain");
    if (size < 1 || size > 1 << 22 || n_chunks < 0 || n_chunks > (int64_t{1} << 31) / size)
        throw std::invalid_argument("size: expected 1 to 2^22 units per chunk, and fewer than 2^31 in total");
    int64_t whole = 0;
    for (int64_t k = 0; k < n; ++k) {
        if (parts.data()[k] < 0) throw std::invalid_argument("parts: got a negative number");
        whole += parts.data()[k];
    }
    if (whole != kWhole) throw std::invalid_argument("parts: expected a sum of 2^40");
    Ints domains(n_chunks * size);
    Longs numbers(n_chunks * size), done_after(n), lag_after(n);
    int32_t* domain = domains.mutable_data();
    int64_t* number = numbers.mutable_data();
    int64_t *d = done_after.mutable_data(), *l = lag_after.mutable_data();
    std::copy_n(done.data(), n, d);
    std::copy_n(lag.data(), n, l);
    int64_t chunk = 0;
    {
        py::gil_scoped_release release;
        std::vector<Deadline> deadlines;
        std::vector<int64_t> counts(n), before(n);
        std::vector<Turn> turns(size);
        for (; chunk < n_chunks; ++chunk) {
            std::copy_n(l, n, before.data());
            apportion(parts.data(), l, n, size, deadlines, counts.data());
            bool fits = true;
            for (int64_t k = 0; k < n; ++k) fits = fits && counts[k] <= limit.data()[k] - d[k];
            if (!fits) {
                std::copy_n(before.data(), n, l);
                break;
            }
            size_t at = 0;
            const uint64_t key = mixed(seed ^ mixed(static_cast<uint64_t>(first_chunk + chunk)));
            for (int64_t k = 0; k < n; ++k) {
                if (!counts[k]) continue;
                const double step = static_cast<double>(size) / static_cast<double>(counts[k]);
                const double begin = static_cast<double>(mixed(key + static_cast<uint64_t>(k)) >> 11) * 0x1p-53;
                for (int64_t j = 0; j < counts[k]; ++j)
                    turns[at++] = {(static_cast<double>(j) + begin) * step, static_cast<int32_t>(k), d[k]++};
            }
            std::sort(turns.begin(), turns.end(), [](const Turn& a, const Turn& b) {
                return a.at != b.at ? a.at < b.at : a.domain < b.domain;
            });
            for (const Turn& turn : turns) *domain++ = turn.domain, *number++ = turn.number;
            if (until_empty && any_empty(parts.data(), d, limit.data(), n)) {
                ++chunk;
                break;
            }
        }
    }
    return py::make_tuple(chunk, domains, numbers, done_after, lag_after);
}

// Read bytes [begin, begin + size) of an open file for every span, concatenated: uint8 [sum of sizes]. Also return the
// first span that the file does not contain completely (-1: none), and errno or 0. Uses pread, not mmap: if the file
// was truncated after it was opened, pread reports an error, but access to a mapped page ends the process by SIGBUS.
static py::tuple read_spans(int descriptor, const Longs& begins, const Longs& sizes) {
    const int64_t n = begins.size();
    if (sizes.size() != n) throw std::invalid_argument("sizes: expected one per begin");
    int64_t total = 0;
    for (int64_t i = 0; i < n; ++i) {
        if (begins.data()[i] < 0 || sizes.data()[i] < 0)
            throw std::invalid_argument("begins, sizes: got a negative number");
        total += sizes.data()[i];
    }
    py::array_t<uint8_t> content(total);
    uint8_t* out = content.mutable_data();
    int64_t incomplete = -1;
    int failure = 0;
    {
        py::gil_scoped_release release;
        for (int64_t i = 0; i < n && incomplete < 0; ++i) {
            int64_t at = begins.data()[i], left = sizes.data()[i];
            while (left > 0) {
                const ssize_t got = pread(descriptor, out, static_cast<size_t>(left), static_cast<off_t>(at));
                if (got < 0 && errno == EINTR) continue;
                if (got <= 0) {
                    failure = got < 0 ? errno : 0;
                    incomplete = i;
                    break;
                }
                out += got, at += got, left -= got;
            }
        }
    }
    return py::make_tuple(content, incomplete, failure);
}

// Return the unit of its domain for each number: number / length is the epoch, number % length the position in it. Each
// epoch of a domain is the permutation of megatron/data/permutation.py, with round keys derived from the domain's seed
// and the epoch.
static Longs domain_units(const Ints& domain, const Longs& number, const Longs& length, const Words& seed) {
    const int64_t n = number.size(), n_domains = length.size();
    if (domain.size() != n || seed.size() != n_domains)
        throw std::invalid_argument("domain, seed: expected one domain per number, and one seed per length");
    Longs units(n);
    int64_t* out = units.mutable_data();
    bool sound = true;
    {
        py::gil_scoped_release release;
        struct Order {
            int half = 0;
            int64_t epoch = -1;
            uint64_t keys[kRounds] = {};
        };
        std::vector<Order> orders(n_domains);
        for (int64_t i = 0; i < n && sound; ++i) {
            const int64_t k = domain.data()[i], at = number.data()[i];
            sound = k >= 0 && k < n_domains && at >= 0 && length.data()[k] > 0;
            if (!sound) break;
            const int64_t n_units = length.data()[k], epoch = at / n_units;
            Order& order = orders[k];
            if (epoch != order.epoch) {
                order.half = std::max(1, static_cast<int>(std::bit_width(static_cast<uint64_t>(n_units - 1)) + 1) / 2);
                order.epoch = epoch;
                const uint64_t epoch_key = mixed(seed.data()[k] + mixed(static_cast<uint64_t>(epoch)));
                for (int round = 0; round < kRounds; ++round)
                    order.keys[round] = mixed(epoch_key + static_cast<uint64_t>(round) + 1);
            }
            const uint64_t mask = (uint64_t{1} << order.half) - 1;
            uint64_t x = static_cast<uint64_t>(at - epoch * n_units);
            do {  // cycle walking: repeat until the result is in 0..n_units - 1
                uint64_t left = x >> order.half, right = x & mask;
                for (const uint64_t key : order.keys) {
                    uint64_t m = (right ^ key) * kMix;
                    m ^= m >> 32;
                    m *= kMix;
                    const uint64_t next = left ^ (m >> 29 & mask);
                    left = right;
                    right = next;
                }
                x = left << order.half | right;
            } while (x >= static_cast<uint64_t>(n_units));
            out[i] = static_cast<int64_t>(x);
        }
    }
    if (!sound)
        throw std::invalid_argument("domain, number: got a domain out of range, a negative number or an empty domain");
    return units;
}

inline void bind(py::module_& m) {
    m.def("mixture_turns", &mixture_turns, py::arg("parts").noconvert(), py::arg("done").noconvert(),
          py::arg("lag").noconvert(), py::arg("limit").noconvert(), py::arg("size"), py::arg("first_chunk"),
          py::arg("n_chunks"), py::arg("seed"), py::arg("until_empty") = false,
          "(chunks, domain of each unit, its number in the domain, done after, lag after) of a mixture's chunks.");
    m.def("read_spans", &read_spans, py::arg("descriptor"), py::arg("begins").noconvert(), py::arg("sizes").noconvert(),
          "(bytes of the spans of an open file, first span not read completely or -1, errno or 0).");
    m.def("domain_units", &domain_units, py::arg("domain").noconvert(), py::arg("number").noconvert(),
          py::arg("length").noconvert(), py::arg("seed").noconvert(),
          "Unit of its domain for each number; every epoch is a keyed permutation of its own.");
}

}  // namespace mixture
