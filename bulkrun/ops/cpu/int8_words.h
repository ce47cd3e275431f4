// Numbers as bytes, four to a word. Their products are summed in int32, exactly, so the order of a sum does not matter.
// Contract: ops/matmul/int8_linear.py. Knows no threads.
#pragma once

#include "matrix.h"

constexpr int BYTE_PAD = 64;      // numbers of a row are a multiple of it: whole loads of a tile unit
constexpr int ZERO = 128;         // the byte that stands for 0 in a row: processors multiply one side without a sign
constexpr float LEAST = 0x1p-100;  // what a row's largest number is taken for, if it is less: 127 / it is finite

struct ByteWords {
    static constexpr int per_word = 4, items = 1;

    // Sixteen words, each of four numbers, rounded.
    static u32x16 joined(const f32x16* numbers) {
        u32x16 words = {};
        for (int i = 0; i < per_word; i++) words |= (rounded_to_int(numbers[i]) & 255) << 8 * i;
        return words;
    }

    // c: sums in int32, carried as the bits of floats. a: bytes of a row. b: signed ones of columns.
#if defined(__AVX512VNNI__)
    static constexpr int steps = 1, rows = BLOCK_ROWS;

    static wide_words number(const uint32_t* a, int) { return wide_words{} + *a; }
    static wide_words column(wide_words b, int) { return b; }
    static wide multiply_add(wide_words a, wide_words b, wide c) {
        return (wide)_mm512_dpbusd_epi32((__m512i)c, (__m512i)a, (__m512i)b);
    }
#else
    // Every other byte, then the rest, as 16 bits: what multiplies bytes without VNNI cuts off sums of two.
    static constexpr int steps = 2, rows = std::min(BLOCK_ROWS, 4);  // beside their sums: a mask, products

    static wide_words number(const uint32_t* a, int step) {
        wide_words all;
#ifdef __AVX2__
        asm volatile("vpbroadcastd %1, %0" : "=x"(all) : "m"(*a));  // else all rows' are kept for the second step
#else
        all = wide_words{} + *a;
#endif
        return step ? (wide_words)((unsigned_halves)all >> 8) : all & 0x00ff00ff;
    }
    static wide_words column(wide_words b, int step) { return (wide_words)((step ? (halves)b : (halves)b << 8) >> 8); }
    static wide multiply_add(wide_words a, wide_words b, wide c) {
        wide_words sums = (wide_words)c + sums_of_two(a, b);
#ifdef __AVX2__
        asm("" : "+x"(sums));  // else both steps are summed before they are added, and there are too few registers
#endif
        return (wide)sums;
    }

  private:
    typedef int16_t halves __attribute__((vector_size(4 * WIDTH)));
    typedef uint16_t unsigned_halves __attribute__((vector_size(4 * WIDTH)));

    // Of products of 16 bits with a sign.
    static wide_words sums_of_two(wide_words a, wide_words b) {
#if defined(__AVX512BW__)
        return (wide_words)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && !defined(__AVX512F__)
        return (wide_words)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
        __builtin_trap();  // nobody gets here: see `pack_int8_`
#endif
    }
#endif
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
        store_bytes(bytes + i, rounded_to_int(load(x + i, size - i) * inverse) + ZERO);
    }
    const long end = round_up(size, LANES);
    memset(bytes + end, ZERO, round_up(size, BYTE_PAD) - end);
    return most / 127;
}
