// Eight floats at a time, for processors with AVX2 and FMA, and the same code for others.
//
// A kernel is a file NAME.inc of functions over arrays. Its .cpp includes it twice, in namespace avx2 between
// AVX2_BEGIN and AVX2_END and in namespace plain, and the processor picks (GCC's target_clones takes vectors to pieces
// before it makes the copies). All that a kernel calls is inlined, so that it is compiled for the same target.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <limits>
#include <thread>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define AVX2_BEGIN _Pragma("GCC push_options") _Pragma("GCC target(\"avx2,fma\")")
#define AVX2_END _Pragma("GCC pop_options")
#define HAS_AVX2 (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
#else
#define AVX2_BEGIN
#define AVX2_END
#define HAS_AVX2 false
#endif
#define INLINED __attribute__((always_inline)) inline

namespace vectors {

constexpr int64_t WIDTH = 8;
// may_alias: laid over arrays of float that other code reads as such
typedef float Floats __attribute__((vector_size(32), may_alias));
typedef float LooseFloats __attribute__((vector_size(32), may_alias, aligned(4)));
typedef int32_t Ints __attribute__((vector_size(32), may_alias));

// Not functions that return a vector: how one is returned depends on the target.
#define LOAD(at) (*reinterpret_cast<const vectors::LooseFloats*>(at))
#define STORE(at, value) (*reinterpret_cast<vectors::LooseFloats*>(at) = (value))
#define SPLAT(x) (vectors::Floats{} + (x))

inline int64_t padded(int64_t n) { return (n + WIDTH - 1) / WIDTH * WIDTH; }

constexpr int64_t WORK_OF_THREAD = 1 << 19;  // elements that pay for starting a thread

// Call work(begin, end) over 0..n - 1, split over up to n_threads threads; each unit is `size` elements of work.
template <typename Work>
void in_threads(int64_t n, int64_t size, int64_t n_threads, const Work& work) {
    const int64_t worth = std::max<int64_t>(1, n * size / WORK_OF_THREAD);
    const int64_t parts = std::max<int64_t>(1, std::min({n_threads, n, worth}));
    std::vector<std::exception_ptr> errors(parts);
    const auto part = [&](int64_t i) {
        try {
            work(n * i / parts, n * (i + 1) / parts);
        } catch (...) {
            errors[i] = std::current_exception();
        }
    };
    std::vector<std::thread> threads;
    for (int64_t i = 1; i < parts; ++i) threads.emplace_back(part, i);
    part(0);
    for (auto& thread : threads) thread.join();
    for (const auto& error : errors)
        if (error) std::rethrow_exception(error);
}

}  // namespace vectors
