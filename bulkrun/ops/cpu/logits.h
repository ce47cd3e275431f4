// A row of logits: its numbers, sixteen at a time, and the largest of them. Knows no op.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "vector.h"

constexpr long FEW_LOGITS = 32768;  // numbers that one thread is through with before others would wake up
constexpr float LOWEST = -std::numeric_limits<float>::infinity();

// Sixteen numbers of a row; behind its end there is nothing larger than any.
template <class T>
static f32x16 numbers(const T* row, long i, long size) {
    if (size - i >= LANES) return load(row + i);
    return select(IOTA < (int32_t)(size - i), load(row + i, size - i), broadcast(LOWEST));
}

struct Highest {
    float number;
    bool is_valid;  // it is finite, and every number is one
};

template <class T>
static Highest highest_of(const T* row, long size) {
    constexpr int CHAINS = 4;  // maxima that do not wait for each other
    f32x16 most[CHAINS];
    i32x16 is_nan = {};
    for (f32x16& one : most) one = broadcast(LOWEST);
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
    return {highest, std::isfinite(highest) && !any(is_nan)};
}

// Where the number stands first, which is in the row.
template <class T>
static int64_t first_place(const T* row, long size, float number) {
    for (long i = 0; i < size; i += LANES) {
        const f32x16 x = numbers(row, i, size);
        if (!any(x == number)) continue;
        for (int lane = 0; lane < LANES; lane++)
            if (x[lane] == number) return i + lane;
    }
    return 0;
}

// No more than the k-th largest number: of more than k groups of numbers the k-th largest maximum.
template <class T>
static float bound_of_kth(const T* row, long size, long k) {
    const long vectors = (size + LANES - 1) / LANES, chunks = std::min(vectors, 4 * k / LANES + 1);
    std::vector<float> maxima(chunks * LANES);
    for (long chunk = 0; chunk < chunks; chunk++) {
        f32x16 most = broadcast(LOWEST);
        for (long v = vectors * chunk / chunks; v < vectors * (chunk + 1) / chunks; v++)
            most = larger(most, numbers(row, v * LANES, size));
        store(&maxima[chunk * LANES], most);
    }
    if (k > (long)maxima.size()) return LOWEST;
    std::nth_element(maxima.begin(), maxima.begin() + k - 1, maxima.end(), std::greater<float>());
    return maxima[k - 1];
}
