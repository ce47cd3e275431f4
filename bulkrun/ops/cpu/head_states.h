// States of heads, a matrix [D, V] each in the row of its sequence, carried through a step's tokens. Knows no rule.
//
// Columns of a state never meet, so they are worked on some at a time, which stay in the first cache for several tokens.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "wide.h"

constexpr long MAX_SIZE = 256;  // rows of a state
constexpr long TOKENS = 16;     // that are prepared together

// Numbers of some columns, which fill sixteens.
template <int WIDES, class T>
inline void load_columns(const T* p, wide (&x)[WIDES]) {
    float numbers[WIDES * WIDTH];
    for (int i = 0; i < WIDES * WIDTH; i += LANES) store(numbers + i, load(p + i));
    memcpy(x, numbers, sizeof x);
}

template <int WIDES, class T>
inline void store_columns(T* p, const wide (&x)[WIDES]) {
    float numbers[WIDES * WIDTH];
    memcpy(numbers, x, sizeof x);
    for (int i = 0; i < WIDES * WIDTH; i += LANES) store(p + i, load(numbers + i));
}

// of_columns(how many `wide`, as a type; the first column): all of a state's, which are sixteens.
template <class OfColumns>
inline void for_columns(long num_columns, OfColumns of_columns) {
    constexpr int MANY = 4, FEW = LANES / WIDTH;
    long column = 0;
    for (; column + MANY * WIDTH <= num_columns; column += MANY * WIDTH)
        of_columns(std::integral_constant<int, MANY>(), column);
    for (; column < num_columns; column += LANES) of_columns(std::integral_constant<int, FEW>(), column);
}

// carry(state, head, first token, their end) for each head of each sequence, by the threads of a parallel region.
template <class Rule, class Carry>
inline void carry_heads(const Rule& r, const Carry& carry) {
    const long matrix = r.size * r.value_size;
#pragma omp for collapse(2) schedule(dynamic)
    for (long seq = 0; seq < r.num_seqs; seq++)
        for (long head = 0; head < r.num_heads; head++) {
            const long first = r.cu_seqlens[seq], end = r.cu_seqlens[seq + 1];
            if (first == end) continue;
            float* state = r.state + (r.rows[seq] * r.num_heads + head) * matrix;
            if (r.context_lens[seq] == end - first) std::fill_n(state, matrix, 0.0f);
            carry(state, head, first, end);
        }
}

// The same by threads of its own; outputs [T, H, V] of T, zeros where a step is padded.
template <class T, class Rule, class Carry>
inline void carry_states(const Rule& r, const Carry& carry) {
    const long out_size = r.num_heads * r.value_size, real = r.cu_seqlens[r.num_seqs];
#pragma omp parallel num_threads(r.num_threads)
    carry_heads(r, carry);
    std::fill((T*)r.out + real * out_size, (T*)r.out + r.num_tokens * out_size, T{});
}

template <class T>
inline float as_float(const T* number) { return load(number, 1)[0]; }

inline float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

// log(1 + y) for y from 0 to 1, as 2 artanh(y / (2 + y)): what is small keeps its digits. Relative error: 1e-7.
inline f32x16 log1p_of(f32x16 y) {
    const f32x16 z = y / (2.0f + y), square = z * z;
    f32x16 p = square * (1.0f / 15) + 1.0f / 13;
    p = p * square + 1.0f / 11;
    p = p * square + 1.0f / 9;
    p = p * square + 1.0f / 7;
    p = p * square + 1.0f / 5;
    p = p * square + 1.0f / 3;
    return 2.0f * z * (p * square + 1.0f);
}

inline f32x16 softplus_of(f32x16 x) {
    return select(x > 0.0f, x, f32x16{}) + log1p_of(exp2_of<float>(magnitude(x) * -LOG2_E));
}
