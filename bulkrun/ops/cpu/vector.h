// Sixteen floats at a time, in GCC's vector extensions: one register with AVX-512, several elsewhere.
// Knows number formats; knows no op.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

constexpr int LANES = 16;

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

struct bf16 {
    uint16_t bits;
};

constexpr i32x16 IOTA = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

inline f32x16 broadcast(float x) { return f32x16{} + x; }

inline f32x16 load(const float* p) {
    f32x16 x;
    memcpy(&x, p, sizeof x);
    return x;
}

inline f32x16 load(const bf16* p) {
    u16x16 half;
    memcpy(&half, p, sizeof half);
#ifdef __AVX512F__  // GCC widens in four pieces
    return (f32x16)((u32x16)_mm512_cvtepu16_epi32((__m256i)half) << 16);
#else
    return (f32x16)(__builtin_convertvector(half, u32x16) << 16);
#endif
}

inline f32x16 load(const uint8_t* p) {
    typedef uint8_t u8x16 __attribute__((vector_size(16)));
    u8x16 bytes;
    memcpy(&bytes, p, sizeof bytes);
#ifdef __AVX512F__  // GCC takes them one by one
    return (f32x16)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32((__m128i)bytes));
#else
    return __builtin_convertvector(bytes, f32x16);
#endif
}

inline void store(float* p, f32x16 x) { memcpy(p, &x, sizeof x); }

// Round to nearest, ties to even; what is not a number stays so.
inline void store(bf16* p, f32x16 x) {
#ifdef __AVX512BF16__
    __m256bh half = _mm512_cvtneps_pbh((__m512)x);
    memcpy(p, &half, sizeof half);
#else
    u32x16 bits = (u32x16)x;
    u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    u16x16 half = __builtin_convertvector(x == x ? rounded : (bits >> 16) | 0x40, u16x16);
    memcpy(p, &half, sizeof half);
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
    f32x16 x;
    for (int i = 0; i < LANES; i++) x[i] = p[i * stride];
    return x;
#endif
}

// To the nearest, ties to even; what is not a number has zeros in its low bits.
inline u32x16 rounded_to_int(f32x16 x) {
#ifdef __AVX512F__
    return (u32x16)_mm512_cvtps_epi32((__m512)x);
#else
    i32x16 whole;
    for (int i = 0; i < LANES; i++) whole[i] = x[i] == x[i] ? (int32_t)__builtin_rintf(x[i]) : 0;
    return (u32x16)whole;
#endif
}

// Of a table of sixteen, those that the lowest four bits of each index name.
inline f32x16 looked_up(f32x16 table, u32x16 index) {
#ifdef __AVX512F__
    return (f32x16)_mm512_permutexvar_ps((__m512i)index, (__m512)table);
#else
    return __builtin_shuffle(table, (i32x16)(index & 15));
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
    int32_t some = 0;
    for (int i = 0; i < LANES; i++) some |= holds[i];
    return some != 0;
#endif
}

inline f32x16 larger(f32x16 a, f32x16 b) { return a > b ? a : b; }
inline f32x16 smaller(f32x16 a, f32x16 b) { return a < b ? a : b; }

inline float sum(f32x16 x) {
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)x);
#else
    float total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
#endif
}

inline float largest(f32x16 x) {
#ifdef __AVX512F__
    return _mm512_reduce_max_ps((__m512)x);
#else
    float most = x[0];
    for (int i = 1; i < LANES; i++) most = x[i] > most ? x[i] : most;
    return most;
#endif
}

// 2^x for x < 127; exactly 0 below -126, so that what is masked weighs nothing. Relative error: 1e-7, or 3e-6 where the
// result is to be rounded to bf16. Polynomials of 2^r for |r| <= 1/2 with the smallest largest error.
template <class T>
inline f32x16 exp2_of(f32x16 x) {
    const float magic = 12582912.0f + 127;  // its last bits hold the rounded number, as the exponent wants it
    const f32x16 shifted = x + magic, r = x - (shifted - magic);
    f32x16 p;
    if (sizeof(T) == sizeof(float)) {
        p = r * 1.327647187e-3f + 9.675541333e-3f;
        p = p * r + 5.550713274e-2f;
        p = p * r + 2.402211972e-1f;
        p = p * r + 6.931469671e-1f;
        p = p * r + 1.000000072f;
    } else {
        p = r * 9.570101792e-3f + 5.591786031e-2f;
        p = p * r + 2.402474483e-1f;
        p = p * r + 6.931218147e-1f;
        p = p * r + 9.999992614e-1f;
    }
    return x < -126.0f ? f32x16{} : p * (f32x16)((i32x16)shifted << 23);
}

constexpr float LOG2_E = 1.44269504088896341f;

inline f32x16 magnitude(f32x16 x) { return (f32x16)((u32x16)x & 0x7fffffffu); }

// 1 / (1 + e^-x)
template <class T>
inline f32x16 sigmoid(f32x16 x) {
    f32x16 e = exp2_of<T>(magnitude(x) * -LOG2_E);
    return (x < 0.0f ? e : broadcast(1.0f)) / (1.0f + e);
}

inline f32x16 tanh_of(f32x16 x) { return 2.0f * sigmoid<float>(2.0f * x) - 1.0f; }
