// Products of bf16 pairs on Intel's tile unit (AMX): 16 rows x 16 columns x 16 words at a time. Arrays as in matrix.h.
#pragma once

#include "vector.h"

#ifdef __AMX_BF16__

#include <sys/syscall.h>
#include <unistd.h>

// Linux hands the unit out on request, once per process.
inline bool has_tiles() {
    static const bool allowed = syscall(SYS_arch_prctl, /* ARCH_REQ_XCOMP_PERM */ 0x1023, /* XTILEDATA */ 18) == 0;
    return allowed;
}

// GCC's tile intrinsics do not say that they read memory: what was stored before must be there.
inline void finish_stores() { asm volatile("" ::: "memory"); }

// Sizes of the tiles, for this thread. 0, 1 and 2, 3 are sums, 4 and 5 what is multiplied, 6 and 7 what they are
// multiplied with: with `rows` < 16, 0, 1 and 4 have so many rows, and 2 and 3 so many columns (see `multiply_keys`).
inline void set_tiles(int rows) {
    if (!has_tiles()) return;
    struct {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    config.rows[0] = config.rows[1] = config.rows[4] = rows;
    config.row_bytes[2] = config.row_bytes[3] = 4 * rows;
    finish_stores();
    _tile_loadconfig(&config);
}

// Tiles of full size, for this thread, while it lives.
struct TileSetup {
    TileSetup() { set_tiles(LANES); }
    ~TileSetup() {
        if (has_tiles()) _tile_release();
    }
};

// c [16, columns] = a [16, words] b [words, columns], where tiles were set to so many columns. a: 16 vectors `a_stride`
// apart, wherever they lie; `next`: those that come after them. Sums are taken in the same order as with a and b
// exchanged.
inline void multiply_keys(const uint32_t* a, long a_stride, const uint32_t* b, float* c, long words, long columns,
                          const uint32_t* next) {
    finish_stores();
    _tile_zero(2);
    for (long word = 0; word < words; word += LANES) {
        for (int i = 0; i < LANES; i++) __builtin_prefetch(next + i * a_stride + word, 0, 2);
        _tile_loadd(6, a + word, 4 * a_stride);
        _tile_loadd(3, b + word * columns, 4 * columns);
        _tile_dpbf16ps(2, 6, 3);
    }
    _tile_stored(2, c, 4 * columns);
}

// c [16, 32] (+)= a [16, words] b [words, 32]; `next`: 16, or 0 where there are only 16 columns.
inline void multiply_16_rows(const uint32_t* a, long a_stride, const uint32_t* b, long b_stride, float* c,
                             long c_stride, long words, long next, bool accumulate) {
    if (accumulate) {
        _tile_loadd(0, c, 4 * c_stride);
        _tile_loadd(1, c + next, 4 * c_stride);
    } else {
        _tile_zero(0);
        _tile_zero(1);
    }
    for (long word = 0; word < words; word += LANES) {
        _tile_loadd(4, a + word, 4 * a_stride);
        _tile_loadd(6, b + word * b_stride, 4 * b_stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + word * b_stride + next, 4 * b_stride);
        _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, c, 4 * c_stride);
    _tile_stored(1, c + next, 4 * c_stride);
}

// The same for 32 rows.
inline void multiply_32_rows(const uint32_t* a, long a_stride, const uint32_t* b, long b_stride, float* c,
                             long c_stride, long words, long next, bool accumulate) {
    float* below = c + LANES * c_stride;
    if (accumulate) {
        _tile_loadd(0, c, 4 * c_stride);
        _tile_loadd(1, c + next, 4 * c_stride);
        _tile_loadd(2, below, 4 * c_stride);
        _tile_loadd(3, below + next, 4 * c_stride);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (long word = 0; word < words; word += LANES) {
        _tile_loadd(4, a + word, 4 * a_stride);
        _tile_loadd(6, b + word * b_stride, 4 * b_stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + word * b_stride + next, 4 * b_stride);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a + LANES * a_stride + word, 4 * a_stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, 4 * c_stride);
    _tile_stored(1, c + next, 4 * c_stride);
    _tile_stored(2, below, 4 * c_stride);
    _tile_stored(3, below + next, 4 * c_stride);
}

// c (+)= a b, as `multiply`, but rows come in sixteens: those behind the last one are computed too. words: sixteens.
inline void multiply_tiles(const uint32_t* a, long a_stride, const uint32_t* b, long b_stride, float* c, long c_stride,
                           long rows, long words, long columns, bool accumulate) {
    finish_stores();
    for (long column = 0; column < columns; column += 2 * LANES) {
        const long next = column + LANES < columns ? LANES : 0;
        long row = 0;
        for (; row + LANES < rows; row += 2 * LANES)
            multiply_32_rows(a + row * a_stride, a_stride, b + column, b_stride, c + row * c_stride + column, c_stride,
                             words, next, accumulate);
        if (row < rows)
            multiply_16_rows(a + row * a_stride, a_stride, b + column, b_stride, c + row * c_stride + column, c_stride,
                             words, next, accumulate);
    }
}

#else

inline bool has_tiles() { return false; }
inline void set_tiles(int) {}
inline void multiply_keys(const uint32_t*, long, const uint32_t*, float*, long, long, const uint32_t*) {}

struct TileSetup {};

#endif
