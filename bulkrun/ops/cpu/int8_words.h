// Numbers as bytes, four to a word. Their products are summed in int32, exactly, so the order of a sum does not matter.
// Contract: ops/matmul/int8_linear.py. Knows no threads.
#pragma once

#include "matrix.h"

constexpr int BYTE_PAD = 64;      // numbers of a row are a multiple of it: whole loads of a tile unit
constexpr int ZERO = 128;         // the byte that stands for 0 in a row: processors multiply one side without a sign
constexpr float LEAST = 0x1p-100;  // what a row's largest number is taken for, if it is less: 127 / it is finite

struct ByteWords {
    static constexpr int per_word = 4;

    // Sixteen words, each of four numbers, rounded.
    static u32x16 joined(const f32x16* numbers) {
        u32x16 words = {};
        for (int i = 0; i < per_word; i++) words |= (rounded_to_int(numbers[i]) & 255) << 8 * i;
        return words;
    }

    // c: sums in int32, carried as the bits of floats. a: bytes of a row. b: signed ones of columns.
    static wide multiply_add(uint32_t a, wide_words b, wide c) {
#ifdef __AVX512VNNI__
        return (f32x16)_mm512_dpbusd_epi32((__m512i)c, _mm512_set1_epi32(a), (__m512i)b);
#else
        __builtin_trap();  // nobody gets here: see `pack_int8_`
#endif
    }
};

// Sums in int32, less what their row's zeros have added, as numbers.
inline f32x16 numbers_of(const float* sums, const int32_t* zeros) {
    return as_floats((i32x16)load(sums) - (i32x16)load_words((const uint32_t*)zeros));
}

// The largest magnitude of a row; not a number, where there is one that is none.
template <class T>
inline float largest_magnitude(const T* x, long size) {
    u32x16 most = {};
    for (long i = 0; i < size; i += LANES) {
        const u32x16 bits = (u32x16)load(x + i, size - i) & 0x7fffffff;  // in the order of the magnitudes
        most = select(bits > most, bits, most);
    }
    uint32_t all = 0;
    for (int i = 0; i < LANES; i++) all = std::max(all, most[i]);
    float number;
    memcpy(&number, &all, sizeof all);
    return number;
}

// A row as bytes, with zeros up to a multiple of BYTE_PAD; returns its scale: a number is about scale * (byte - ZERO).
template <class T>
inline float quantize_row(const T* x, long size, uint8_t* bytes) {
    const float found = largest_magnitude(x, size), most = found < LEAST ? LEAST : found, inverse = 127 / most;
    for (long i = 0; i < size; i += LANES) {
        const f32x16 numbers = load(x + i, size - i) * inverse;
#ifdef __AVX512F__
        const __m128i here = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32((__m512)numbers));
        _mm_storeu_si128((__m128i*)(bytes + i), _mm_xor_si128(here, _mm_set1_epi8((char)ZERO)));
#else
        for (int lane = 0; lane < LANES; lane++) bytes[i + lane] = (uint8_t)(ZERO + (int)__builtin_rintf(numbers[lane]));
#endif
    }
    const long end = round_up(size, LANES);
    memset(bytes + end, ZERO, round_up(size, BYTE_PAD) - end);
    return most / 127;
}
