// Eight-bit floats (E4M3: four bits of exponent, three of fraction, no infinity) as a cache holds them, read and written.
// Every one of them is a bf16 too, and a normal one: no conversion here meets a denormal, which a thread may flush.
#pragma once

#include "vector.h"

struct fp8 {
    uint8_t bits;
};

// The numbers of sixteen bytes, one to a lane.
inline f32x16 numbers_of(u32x16 bytes) {
    const i32x16 magnitude = (i32x16)((bytes & 0x7f) << 20);
    const f32x16 normal = (f32x16)(magnitude + (120 << 23));
    const f32x16 small = (f32x16)(magnitude + (121 << 23)) - 0x1p-6f;  // of exponent 0: no one before the fraction
    const i32x16 number = select(magnitude < (8 << 20), (i32x16)small, (i32x16)normal);
    const i32x16 whole = select(magnitude == (0x7f << 20), i32x16{} + 0x7fc00000, number);
    return (f32x16)((u32x16)whole | (bytes & 0x80) << 24);
}

inline f32x16 load(const fp8* p) { return numbers_of(load_bytes(p)); }

// Round to nearest, ties to even; what lies beyond +-448 saturates there, and what is not a number stays so.
inline void store(fp8* p, f32x16 x) {
    const u32x16 bits = (u32x16)x, magnitude = bits & 0x7fffffff;
    const u32x16 normal = ((magnitude + 0x7ffff + ((magnitude >> 20) & 1)) >> 20) - (120 << 3);
    const u32x16 small = (u32x16)((f32x16)magnitude + 0x1p14f) - (u32x16)broadcast(0x1p14f);  // in units of 2^-9
    u32x16 rounded = select(magnitude < (121u << 23), small, normal);
    rounded = select(rounded > 0x7e, u32x16{} + 0x7e, rounded);
    rounded = select(magnitude > 0x7f800000, u32x16{} + 0x7f, rounded) | (bits >> 24 & 0x80);
    store_bytes(p, rounded);
}

#ifdef __AVX512BF16__

// The bf16 of what is no sign.
constexpr uint16_t bf16_of_magnitude(int magnitude) {
    if (magnitude == 0 || magnitude == 0x7f) return magnitude ? 0x7fc0 : 0;
    int exponent = 120;
    for (; magnitude < 8; magnitude *= 2) exponent--;
    return (exponent << 7) + (magnitude << 4);
}

#ifdef __AVX512VBMI__

struct Bf16Bytes {
    alignas(64) uint8_t low[128] = {}, high[128] = {};

    constexpr Bf16Bytes() {
        for (int i = 0; i < 128; i++) low[i] = bf16_of_magnitude(i) & 0xff, high[i] = bf16_of_magnitude(i) >> 8;
    }
};

inline constexpr Bf16Bytes BF16_BYTES;

inline __m512i look_up(const uint8_t* table, __m512i index) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(table), index, _mm512_load_si512(table + 64));
}

// 64 bytes as pairs of bf16: each sixteen of them are eight for `front`, then eight for `back`. Tables of what the lower
// and the upper byte become: with arithmetic on 16 bits few rows took 1.4 times as long for keys, twice for values.
inline void to_bf16(__m512i bytes, u32x16& front, u32x16& back) {
    const __m512i low = look_up(BF16_BYTES.low, bytes), unsigned_high = look_up(BF16_BYTES.high, bytes);
    const __m512i high = (__m512i)((u32x16)unsigned_high | ((u32x16)bytes & 0x80808080));
    front = (u32x16)_mm512_unpacklo_epi8(low, high);
    back = (u32x16)_mm512_unpackhi_epi8(low, high);
}

struct MixedOrder {
    alignas(64) uint8_t at[64] = {};

    constexpr MixedOrder() {
        for (int i = 0; i < 64; i++) at[i] = i / 16 * 4 + i % 8 / 2 + i % 16 / 8 * 16 + i % 2 * 64;
    }
};

inline constexpr MixedOrder MIXED_ORDER;

// 32 bytes of each of two vectors as pairs of both, in the order of `to_bf16`: bytes 0 to 15 go to the front.
inline __m512i mixed(u32x16 a, u32x16 b) {
    return _mm512_permutex2var_epi8((__m512i)a, _mm512_load_si512(MIXED_ORDER.at), (__m512i)b);
}

#else

// 32 bytes of each of two vectors as pairs of both, in the order of `to_bf16`: bytes 0 to 15 go to the front.
inline __m512i mixed(u32x16 a, u32x16 b) {
    // four numbers of the front and four of the back, of either vector; then those of both side by side
    const i32x16 fours = {0, 4, 16, 20, 1, 5, 17, 21, 2, 6, 18, 22, 3, 7, 19, 23};
    const __m128i order = _mm_setr_epi8(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
    const __m512i both = _mm512_permutex2var_epi32((__m512i)a, (__m512i)fours, (__m512i)b);
    return _mm512_shuffle_epi8(both, _mm512_broadcast_i32x4(order));
}

typedef uint16_t u16x32 __attribute__((vector_size(64)));

inline u32x16 bf16_of(u16x32 bytes) {
    constexpr auto f = bf16_of_magnitude;
    const u16x32 table = {f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7)}, magnitude = bytes & 0x7f;
    u16x32 number = magnitude < 8 ? __builtin_shuffle(table, magnitude) : (magnitude << 4) + (120 << 7);
    number = magnitude == 0x7f ? f(0x7f) : number;
    return (u32x16)(number | (bytes & 0x80) << 8);
}

// 64 bytes as pairs of bf16: each sixteen of them are eight for `front`, then eight for `back`.
inline void to_bf16(__m512i bytes, u32x16& front, u32x16& back) {
    front = bf16_of((u16x32)_mm512_unpacklo_epi8(bytes, __m512i{}));
    back = bf16_of((u16x32)_mm512_unpackhi_epi8(bytes, __m512i{}));
}

#endif
#endif
