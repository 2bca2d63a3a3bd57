// Vectors of eight floats, for processors with AVX2 and FMA; the same code is compiled for other processors too.
//
// A kernel is a file NAME.inc of functions over arrays. two_targets.inc includes it twice: in namespace avx2 between
// AVX2_BEGIN and AVX2_END, and in namespace plain. HAS_AVX2 selects the version at run time. (GCC's target_clones is
// not an alternative: it splits vectors before it makes the copies.) Every function that a kernel calls is inlined, so
// that it is compiled for the same target.
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
// may_alias: the vectors overlay arrays that other code accesses as float
typedef float Floats __attribute__((vector_size(32), may_alias));
typedef float LooseFloats __attribute__((vector_size(32), may_alias, aligned(4)));
typedef int32_t Ints __attribute__((vector_size(32), may_alias));

// Macros, not functions: the calling convention for a returned vector depends on the target.
#define LOAD(at) (*reinterpret_cast<const vectors::LooseFloats*>(at))
#define STORE(at, value) (*reinterpret_cast<vectors::LooseFloats*>(at) = (value))
#define SPLAT(x) (vectors::Floats{} + (x))

inline int64_t round_up(int64_t n) { return (n + WIDTH - 1) / WIDTH * WIDTH; }

constexpr int64_t MIN_THREAD_WORK = 1 << 19;  // elements that amortise the start of a thread

// Call work(begin, end) for parts of 0..n - 1 on up to n_threads threads. Each unit is `size` elements of work. An
// exception of any part is rethrown after all threads have ended.
template <typename Work>
void in_threads(int64_t n, int64_t size, int64_t n_threads, const Work& work) {
    const int64_t worth = std::max<int64_t>(1, n * size / MIN_THREAD_WORK);
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
