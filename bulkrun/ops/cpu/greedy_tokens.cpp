// The largest number of each row and where it stands first. Contract: bulkrun/ops/greedy_tokens.py.

#include <algorithm>
#include <cmath>
#include <limits>

#include "vector.h"

static const long FEW = 32768;  // numbers that one thread is through with before others would wake up
static const float LEAST = -std::numeric_limits<float>::infinity();
constexpr int CHAINS = 4;  // maxima that do not wait for each other

// Sixteen numbers of a row; behind its end there is nothing larger than any.
template <class T>
static f32x16 numbers(const T* row, long i, long size) {
    if (size - i >= LANES) return load(row + i);
    return IOTA < (int32_t)(size - i) ? load(row + i, size - i) : broadcast(LEAST);
}

// The first lane with this number; LANES: none.
static int first_lane(f32x16 x, float number) {
#ifdef __AVX512F__
    const unsigned lanes = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(number), _CMP_EQ_OQ);
    return lanes ? __builtin_ctz(lanes) : LANES;
#else
    for (int lane = 0; lane < LANES; lane++)
        if (x[lane] == number) return lane;
    return LANES;
#endif
}

template <class T>
static void greedy_token(const T* row, long size, int64_t* token, bool* is_valid) {
    f32x16 most[CHAINS];
    i32x16 is_nan = {};
    for (f32x16& one : most) one = broadcast(LEAST);
    for (long first = 0; first < size; first += CHAINS * LANES) {
#pragma GCC unroll 4
        for (int chain = 0; chain < CHAINS; chain++) {
            // behind the end the last numbers once more: they change nothing
            f32x16 x = numbers(row, std::min(first + chain * LANES, (size - 1) / LANES * LANES), size);
            most[chain] = larger(most[chain], x);
            is_nan |= x != x;
        }
    }
    const float highest = largest(larger(larger(most[0], most[1]), larger(most[2], most[3])));
    *is_valid = std::isfinite(highest) && sum(is_nan ? broadcast(1.0f) : f32x16{}) == 0.0f;
    *token = 0;
    for (long i = 0; *is_valid && i < size; i += LANES) {
        const int lane = first_lane(numbers(row, i, size), highest);
        if (lane == LANES) continue;
        *token = i + lane;
        return;
    }
}

#define GREEDY_TOKENS(T, T_NAME)                                                                                  \
    extern "C" void greedy_tokens_##T_NAME(const T* logits, int64_t* tokens, bool* is_valid, int64_t rows,        \
                                           int64_t size, int num_threads) {                                       \
        _Pragma("omp parallel for num_threads(num_threads) if (rows * size > FEW)")                               \
        for (long row = 0; row < rows; row++)                                                                     \
            greedy_token(logits + row * size, size, tokens + row, is_valid + row);                                \
    }

GREEDY_TOKENS(float, float32)
GREEDY_TOKENS(bf16, bfloat16)
