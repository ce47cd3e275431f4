// Queries, keys and values of one token from their projection to attention, in one pass.
// The turn is computed in float32 and rounded once, as the Triton twin does it.

#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "cache_format.h"

struct Projection {
    const void *qkv, *weight, *cos, *sin;  // weight, cos, sin: null where heads are not normalized, not turned
    void *queries, *k_cache, *v_cache;     // caches: null where there are no keys, or no values beside them
    const int64_t* slots;
    int64_t qkv_stride, num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim;
    float eps;
    int32_t norms_values;     // the weight has rows for them too
    int32_t keys_are_values;  // there are no others
    int32_t cache_format;     // a CacheFormat
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

// Numbers of T to where numbers of C are kept.
template <class T, class C>
inline void keep(C* to, f32x16 numbers, long count) {
    if constexpr (std::is_same_v<T, C>) store(to, numbers, count);
    else store(to, rounded<T>(numbers), count);
}

// A head turned and rounded. Dimension i turns with dimension i + half; the second half of the sines has their own
// sign; what comes after both halves stays. cos: null where nothing turns.
template <class T, class S, class C>
inline void turn(const S* head, const T* cos, const T* sin, long half, C* to, long dim) {
    if (!cos) half = 0;
    for (long i = 0; i < half; i += LANES) {
        const long left = half - i;
        f32x16 first = load(head + i, left), second = load(head + half + i, left);
        f32x16 c = load(cos + half + i, left), s = load(sin + half + i, left);
        keep<T>(to + i, first * c - second * s, left);
        keep<T>(to + half + i, second * c + first * s, left);
    }
    for (long i = 2 * half; i < dim; i += LANES) keep<T>(to + i, load(head + i, dim - i), dim - i);
}

template <class T, class C>
inline void copy(const T* from, C* to, long count) {
    if constexpr (std::is_same_v<T, C>) memcpy(to, from, count * sizeof(T));
    else
        for (long i = 0; i < count; i += LANES) store(to + i, load(from + i, count - i), count - i);
}

// place: the token's among positions, slots and queries, where the projection has fewer rows.
template <class T, class W, class C>
inline void store_token(const Projection& p, long token, long place) {
    const long dim = p.head_dim, num_turning = p.num_heads + p.num_kv_heads, half = p.rotary_dim / 2;
    const T* heads = (const T*)p.qkv + token * p.qkv_stride;
    const long row = std::max<int64_t>(p.slots[place], 0) * p.num_kv_heads * dim;
    const T* cos = p.cos ? (const T*)p.cos + place * p.rotary_dim : nullptr;
    const T* sin = (const T*)p.sin + place * p.rotary_dim;
    const T* values = heads + (p.keys_are_values ? p.num_heads : num_turning) * dim;
    auto turn_head = [&](long n, auto* to) {
        const T* head = heads + n * dim;
        if (!p.weight) return turn(head, cos, sin, half, to, dim);
        float normed[MAX_DIM];
        normalize<T>(head, (const W*)p.weight + n * dim, normed, dim, p.eps);
        turn(normed, cos, sin, half, to, dim);
    };
    for (long n = 0; n < p.num_heads; n++) turn_head(n, (T*)p.queries + (place * p.num_heads + n) * dim);
    for (long n = p.num_heads; n < num_turning; n++) turn_head(n, (C*)p.k_cache + row + (n - p.num_heads) * dim);
    if (!p.v_cache) return;
    if (!p.norms_values) return copy(values, (C*)p.v_cache + row, p.num_kv_heads * dim);
    for (long n = 0; n < p.num_kv_heads; n++) {
        float normed[MAX_DIM];
        normalize<T>(values + n * dim, (const W*)p.weight + (num_turning + n) * dim, normed, dim, p.eps);
        turn<T>(normed, (const T*)nullptr, (const T*)nullptr, 0, (C*)p.v_cache + row + n * dim, dim);
    }
}

template <class T, class W>
inline void store_token(const Projection& p, long token, long place) {
    with_cache<T>(p.cache_format, [&](auto number) { store_token<T, W, decltype(number)>(p, token, place); });
}

template <class T, class W>
inline void store_token(const Projection& p, long token) {
    store_token<T, W>(p, token, token);
}
