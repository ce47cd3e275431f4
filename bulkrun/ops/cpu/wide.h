// As many floats at a time as a register holds, where many sums are to stay in registers. Knows no op.
#pragma once

#include "vector.h"
#include "width.h"

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
