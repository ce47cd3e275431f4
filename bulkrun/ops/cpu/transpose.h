// Squares of words turned over in registers. Knows no numbers.
#pragma once

#include "vector.h"

// Both vectors of each pair that are SIZE apart swap squares of that size.
#define SWAP(COUNT, SIZE, LOW, HIGH)                                                   \
    _Pragma("GCC unroll 16") for (int i = 0; i < COUNT; i++) {                         \
        if (i & SIZE) continue;                                                        \
        const auto a = square[i], b = square[i + SIZE];                                \
        square[i] = __builtin_shuffle(a, b, Order LOW);                                \
        square[i + SIZE] = __builtin_shuffle(a, b, Order HIGH);                        \
    }
#define LANE_LIST(...) {__VA_ARGS__}

#ifdef __AVX512F__

// 16 x 16 words, in place: four rounds that swap ever larger squares.
inline void transpose(u32x16* square) {
    typedef u32x16 Order;
    SWAP(LANES, 1, LANE_LIST(0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
         LANE_LIST(1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))
    SWAP(LANES, 2, LANE_LIST(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
         LANE_LIST(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
    SWAP(LANES, 4, LANE_LIST(0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
         LANE_LIST(4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))
    SWAP(LANES, 8, LANE_LIST(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
         LANE_LIST(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
}

#elif defined(__AVX__)

// 8 x 8 words, in place.
inline void transpose(u32x16::Part (&square)[8]) {
    typedef u32x16::Part Order;
    SWAP(8, 1, LANE_LIST(0, 8, 2, 10, 4, 12, 6, 14), LANE_LIST(1, 9, 3, 11, 5, 13, 7, 15))
    SWAP(8, 2, LANE_LIST(0, 1, 8, 9, 4, 5, 12, 13), LANE_LIST(2, 3, 10, 11, 6, 7, 14, 15))
    SWAP(8, 4, LANE_LIST(0, 1, 2, 3, 8, 9, 10, 11), LANE_LIST(4, 5, 6, 7, 12, 13, 14, 15))
}

// 16 x 16 words, in place: four squares of 8 x 8, two of which change places.
inline void transpose(u32x16* square) {
    u32x16::Part turned[2][2][8];
    for (int rows = 0; rows < 2; rows++)
        for (int columns = 0; columns < 2; columns++) {
            auto& here = turned[columns][rows];
            for (int i = 0; i < 8; i++) here[i] = square[8 * rows + i].part[columns];
            transpose(here);
        }
    for (int i = 0; i < LANES; i++)
        for (int columns = 0; columns < 2; columns++) square[i].part[columns] = turned[i / 8][columns][i % 8];
}

#else

inline void transpose(u32x16* square) {
    uint32_t words[LANES][LANES], turned[LANES][LANES];
    for (int i = 0; i < LANES; i++) store_words(words[i], square[i]);
    for (int i = 0; i < LANES; i++)
        for (int lane = 0; lane < LANES; lane++) turned[lane][i] = words[i][lane];
    for (int i = 0; i < LANES; i++) square[i] = load_words(turned[i]);
}

#endif

#undef LANE_LIST
#undef SWAP
