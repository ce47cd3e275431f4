// As many floats at a time as a register holds, where sums are to stay in registers. Knows no op.
#pragma once

#include "vector.h"

// Sixteen floats that are in several registers GCC keeps in memory, each time they change.
#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif

constexpr int PER_VECTOR = LANES / WIDTH;  // of them in sixteen floats

typedef float wide __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t wide_words __attribute__((vector_size(4 * WIDTH)));

inline wide load_wide(const float* p) {
    wide x;
    memcpy(&x, p, sizeof x);
    return x;
}

inline wide_words load_wide_words(const uint32_t* p) {
    wide_words x;
    memcpy(&x, p, sizeof x);
    return x;
}

inline void store_wide(float* p, wide x) { memcpy(p, &x, sizeof x); }
