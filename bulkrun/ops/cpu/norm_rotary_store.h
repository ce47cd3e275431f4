// Queries, keys and values of one token from their projection to attention, in one pass.
// The turn is computed in float32 and rounded once, as the Triton twin does it.

#pragma once

#include <algorithm>
#include <cmath>

#include "vector.h"

struct Projection {
    const void *qkv, *weight, *cos, *sin;  // weight, cos, sin: null where heads are not normalized, not turned
    void *queries, *k_cache, *v_cache;
    const int64_t* slots;
    int64_t qkv_stride, num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim;
    float eps;
    int32_t num_threads;
};

constexpr int MAX_DIM = 512;  // of a head: its scratch is on the stack

template <class T, class W>
inline void normalize(const T* head, const W* weight, float* out, long size, float eps) {
    f32x16 squares = {};
    for (long i = 0; i < size; i += LANES) {
        f32x16 number = load(head + i, size - i);
        squares += number * number;
    }
    const float scale = 1.0f / std::sqrt(sum(squares) / size + eps);
    for (long i = 0; i < size; i += LANES) {
        f32x16 normed = rounded<W>(load(head + i, size - i) * scale);
        store(out + i, rounded<T>(normed * load(weight + i, size - i)), size - i);
    }
}

// A head turned and rounded. Dimension i turns with dimension i + half; the second half of the sines has their own
// sign; what comes after both halves stays. cos: null where nothing turns.
template <class S, class T>
inline void turn(const S* head, const T* cos, const T* sin, long half, T* to, long dim) {
    if (!cos) half = 0;
    for (long i = 0; i < half; i += LANES) {
        const long left = half - i;
        f32x16 first = load(head + i, left), second = load(head + half + i, left);
        f32x16 c = load(cos + half + i, left), s = load(sin + half + i, left);
        store(to + i, first * c - second * s, left);
        store(to + half + i, second * c + first * s, left);
    }
    for (long i = 2 * half; i < dim; i += LANES) store(to + i, load(head + i, dim - i), dim - i);
}

template <class T, class W>
inline void store_token(const Projection& p, long token) {
    const long dim = p.head_dim, turning = p.num_heads + p.num_kv_heads, half = p.rotary_dim / 2;
    const T* heads = (const T*)p.qkv + token * p.qkv_stride;
    T* queries = (T*)p.queries + token * p.num_heads * dim;
    const long row = std::max<int64_t>(p.slots[token], 0) * p.num_kv_heads * dim;
    const T* cos = p.cos ? (const T*)p.cos + token * p.rotary_dim : nullptr;
    const T* sin = (const T*)p.sin + token * p.rotary_dim;
    for (long n = 0; n < turning; n++) {
        const T* head = heads + n * dim;
        T* to = n < p.num_heads ? queries + n * dim : (T*)p.k_cache + row + (n - p.num_heads) * dim;
        if (p.weight) {
            float normed[MAX_DIM];
            normalize<T>(head, (const W*)p.weight + n * dim, normed, dim, p.eps);
            turn(normed, cos, sin, half, to, dim);
        } else {
            turn(head, cos, sin, half, to, dim);
        }
    }
    memcpy((T*)p.v_cache + row, heads + turning * dim, p.num_kv_heads * dim * sizeof(T));
}
