// Sixteen floats at a time: one register with AVX-512, in GCC's vector extensions, and several elsewhere (`sixteen.h`).
// Knows number formats; knows no op.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __AVX2__
#include <immintrin.h>
#endif
#ifndef __AVX512F__
#include "sixteen.h"
#endif

constexpr int LANES = 16;

struct bf16 {
    uint16_t bits;
};

#ifdef __AVX512F__

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

constexpr i32x16 IOTA = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Of each pair the first where the mask holds.
template <class V>
inline V select(i32x16 mask, V a, V b) { return mask ? a : b; }

inline f32x16 load(const float* p) {
    f32x16 x;
    memcpy(&x, p, sizeof x);
    return x;
}

inline u32x16 load_words(const uint32_t* p) {
    u32x16 x;
    memcpy(&x, p, sizeof x);
    return x;
}

// GCC widens in four pieces, and takes bytes one by one.
inline f32x16 load(const bf16* p) {
    u16x16 half;
    memcpy(&half, p, sizeof half);
    return (f32x16)((u32x16)_mm512_cvtepu16_epi32((__m256i)half) << 16);
}

inline u32x16 load_bytes(const void* p) { return (u32x16)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }

inline void store(float* p, f32x16 x) { memcpy(p, &x, sizeof x); }
inline void store_words(uint32_t* p, u32x16 x) { memcpy(p, &x, sizeof x); }

inline void store_halves(void* p, u32x16 x) {
    const u16x16 half = __builtin_convertvector(x, u16x16);
    memcpy(p, &half, sizeof half);
}

inline void store_bytes(void* p, u32x16 x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)x)); }

inline f32x16 as_floats(i32x16 x) { return __builtin_convertvector(x, f32x16); }

#else

typedef Sixteen<float> f32x16;
typedef Sixteen<int32_t> i32x16;
typedef Sixteen<uint32_t> u32x16;

inline i32x16 iota() {
    int32_t lanes[LANES];
    for (int i = 0; i < LANES; i++) lanes[i] = i;
    return load_parts<int32_t>(lanes);
}

static const i32x16 IOTA = iota();

inline f32x16 load(const float* p) { return load_parts<float>(p); }
inline f32x16 load(const bf16* p) { return (f32x16)(load_converted<uint32_t>((const uint16_t*)p) << 16); }
inline u32x16 load_words(const uint32_t* p) { return load_parts<uint32_t>(p); }
inline u32x16 load_bytes(const void* p) { return load_converted<uint32_t>((const uint8_t*)p); }
inline void store(float* p, f32x16 x) { store_parts(p, x); }
inline void store_words(uint32_t* p, u32x16 x) { store_parts(p, x); }
inline void store_halves(void* p, u32x16 x) { store_converted((uint16_t*)p, x); }
inline void store_bytes(void* p, u32x16 x) { store_converted((uint8_t*)p, x); }
inline f32x16 as_floats(i32x16 x) { return converted<float>(x); }

#endif

inline f32x16 broadcast(float x) { return f32x16{} + x; }

inline f32x16 load(const uint8_t* p) { return as_floats((i32x16)load_bytes(p)); }

// Round to nearest, ties to even; what is not a number stays so.
inline void store(bf16* p, f32x16 x) {
#ifdef __AVX512BF16__
    __m256bh half = _mm512_cvtneps_pbh((__m512)x);
    memcpy(p, &half, sizeof half);
#else
    const u32x16 bits = (u32x16)x, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    store_halves(p, select(x == x, rounded, (bits >> 16) | 0x40));
#endif
}

// The first n <= 16 of them; zeros behind.
template <class T>
inline f32x16 load(const T* p, long n) {
    if (n >= LANES) return load(p);
    T whole[LANES] = {};
    memcpy(whole, p, n * sizeof(T));
    return load(whole);
}

template <class T>
inline void store(T* p, f32x16 x, long n) {
    if (n >= LANES) return store(p, x);
    T whole[LANES];
    store(whole, x);
    memcpy(p, whole, n * sizeof(T));
}

// Sixteen numbers that lie `stride` apart.
inline f32x16 load_apart(const float* p, int stride) {
#ifdef __AVX512F__
    return (f32x16)_mm512_i32gather_ps((__m512i)(IOTA * stride), p, 4);
#else
    float numbers[LANES];
    for (int i = 0; i < LANES; i++) numbers[i] = p[i * stride];
    return load(numbers);
#endif
}

// To the nearest, ties to even; what is not a number has zeros in its low bits.
inline u32x16 rounded_to_int(f32x16 x) {
#ifdef __AVX512F__
    return (u32x16)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
    return u32x16::each([&](int i) { return (u32x16::Part)_mm256_cvtps_epi32((__m256)x.part[i]); });
#else
    int32_t whole[LANES];
    for (int i = 0; i < LANES; i++) whole[i] = x[i] == x[i] ? (int32_t)__builtin_rintf(x[i]) : 0;
    return (u32x16)load_parts<int32_t>(whole);
#endif
}

// Of a table of sixteen, those that the lowest four bits of each index name.
inline f32x16 looked_up(f32x16 table, u32x16 index) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_permutexvar_ps((__m512i)index, (__m512)table);
#elif defined(__AVX2__)
    return f32x16::each([&](int i) {  // from both halves of the table: the index's fourth bit says which counts
        const __m256i at = (__m256i)index.part[i];
        const __m256 low = _mm256_permutevar8x32_ps((__m256)table.part[0], at);
        const __m256 high = _mm256_permutevar8x32_ps((__m256)table.part[1], at);
        return (f32x16::Part)_mm256_blendv_ps(low, high, (__m256)_mm256_slli_epi32(at, 28));
    });
#else
    float all[LANES], found[LANES];
    store(all, table);
    for (int i = 0; i < LANES; i++) found[i] = all[index[i] & 15];
    return load(found);
#endif
}

// What is left of x after a trip through T.
template <class T>
inline f32x16 rounded(f32x16 x) {
    T there[LANES];
    store(there, x);
    return load(there);
}
template <>
inline f32x16 rounded<float>(f32x16 x) { return x; }

// Whether a comparison holds for any of the sixteen.
inline bool any(i32x16 holds) {
#ifdef __AVX512F__
    return _mm512_test_epi32_mask((__m512i)holds, (__m512i)holds) != 0;
#else
    const auto all = folded(holds, [](auto a, auto b) { return a | b; });
    int32_t some = 0;
    for (int i = 0; i < WIDTH; i++) some |= all[i];
    return some != 0;
#endif
}

inline f32x16 larger(f32x16 a, f32x16 b) { return select(a > b, a, b); }
inline f32x16 smaller(f32x16 a, f32x16 b) { return select(a < b, a, b); }

inline float sum(f32x16 x) {
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)x);
#else
    const auto all = folded(x, [](auto a, auto b) { return a + b; });
    float total = 0;
    for (int i = 0; i < WIDTH; i++) total += all[i];
    return total;
#endif
}

inline float largest(f32x16 x) {
#ifdef __AVX512F__
    return _mm512_reduce_max_ps((__m512)x);
#else
    const auto all = folded(x, [](auto a, auto b) { return a > b ? a : b; });
    float most = all[0];
    for (int i = 1; i < WIDTH; i++) most = all[i] > most ? all[i] : most;
    return most;
#endif
}

// 2^x for x < 127, by `power_of(r)`, 2^r for |r| <= 1/2; exactly 0 below -126, so that what is masked weighs nothing.
template <class Polynomial>
inline f32x16 exp2_by(f32x16 x, const Polynomial& power_of) {
    const float magic = 12582912.0f + 127;  // its last bits hold the rounded number, as the exponent wants it
    const f32x16 shifted = x + magic, r = x - (shifted - magic);
    return select(x < -126.0f, f32x16{}, power_of(r) * (f32x16)((i32x16)shifted << 23));
}

// Relative error: 1e-7, or 3e-6 where the result is to be rounded to bf16. Polynomials with the smallest largest error.
template <class T>
inline f32x16 exp2_of(f32x16 x) {
    return exp2_by(x, [](f32x16 r) {
        f32x16 p;
        if (sizeof(T) == sizeof(float)) {
            p = r * 1.327647187e-3f + 9.675541333e-3f;
            p = p * r + 5.550713274e-2f;
            p = p * r + 2.402211972e-1f;
            p = p * r + 6.931469671e-1f;
            return p * r + 1.000000072f;
        }
        p = r * 9.570101792e-3f + 5.591786031e-2f;
        p = p * r + 2.402474483e-1f;
        p = p * r + 6.931218147e-1f;
        return p * r + 9.999992614e-1f;
    });
}

// The same, by Taylor's series: what is near 1 is off by its rounding alone, however often it is multiplied by itself.
inline f32x16 exp2_near_0(f32x16 x) {
    return exp2_by(x, [](f32x16 r) {
        f32x16 p = r * 1.540353040e-4f + 1.333355815e-3f;
        p = p * r + 9.618129108e-3f;
        p = p * r + 5.550410866e-2f;
        p = p * r + 2.402265070e-1f;
        p = p * r + 6.931471806e-1f;
        return p * r + 1.0f;
    });
}

constexpr float LOG2_E = 1.44269504088896341f;

inline f32x16 magnitude(f32x16 x) { return (f32x16)((u32x16)x & 0x7fffffffu); }

// 1 / (1 + e^-x)
template <class T>
inline f32x16 sigmoid(f32x16 x) {
    f32x16 e = exp2_of<T>(magnitude(x) * -LOG2_E);
    return select(x < 0.0f, e, broadcast(1.0f)) / (1.0f + e);
}

inline f32x16 tanh_of(f32x16 x) { return 2.0f * sigmoid<float>(2.0f * x) - 1.0f; }
