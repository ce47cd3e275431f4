// A few rows times a weight that was packed once, into panels of columns. Knows matrices and threads; knows no model.
//
// A panel is PANEL columns, word by word (see matrix.h), so that it is read from memory in one go. Threads share the
// panels; whoever computes one applies what comes after the product while the sums are in the cache.
#pragma once

#include "matrix.h"

constexpr int PANEL = 32;      // columns
constexpr int BLOCK = 64;      // rows whose sums are used before the next ones'; a multiple of LANES
constexpr int AHEAD = 4096;    // bytes between what is multiplied and what is asked for: memory answers slowly

struct Matrix {
    const void *panels, *bias;  // bias: one number per column of a panel, or null
};

#ifdef __AMX_BF16__
// c [16 R, PANEL] = a [16 R, words] b [words, PANEL]. `fetch`: ask for the panel's next words, and the next panel's.
template <int R>
inline void multiply_panel_rows(const uint32_t* a, long a_stride, const uint32_t* b, float* c, long words, bool fetch) {
    _tile_zero(0);
    _tile_zero(1);
    if (R == 2) _tile_zero(2);
    if (R == 2) _tile_zero(3);
    for (long word = 0; word < words; word += LANES) {
        const uint32_t* here = b + word * PANEL;
        if (fetch)
            for (int line = 0; line < 2 * LANES; line++)
                __builtin_prefetch((const char*)here + AHEAD + line * 64, 0, 2);
        _tile_loadd(4, a + word, 4 * a_stride);
        _tile_loadd(6, here, 4 * PANEL);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, here + LANES, 4 * PANEL);
        _tile_dpbf16ps(1, 4, 7);
        if (R == 1) continue;
        _tile_loadd(5, a + LANES * a_stride + word, 4 * a_stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, 4 * PANEL);
    _tile_stored(1, c + LANES, 4 * PANEL);
    if (R == 2) _tile_stored(2, c + LANES * PANEL, 4 * PANEL);
    if (R == 2) _tile_stored(3, c + LANES * PANEL + LANES, 4 * PANEL);
}
#endif

// c [rows, PANEL] = a [rows, words] panel; there is room for 16 rows where there are fewer. `fetch`: as above.
template <class W>
inline void multiply_panel(const uint32_t* a, const uint32_t* panel, float* c, long rows, long words, bool fetch) {
#ifdef __AMX_BF16__
    if (W::per_word == 2 && has_tiles()) {
        finish_stores();
        long row = 0;
        for (; row + LANES < rows; row += 2 * LANES)
            multiply_panel_rows<2>(a + row * words, words, panel, c + row * PANEL, words, fetch && row == 0);
        if (row < rows)
            multiply_panel_rows<1>(a + row * words, words, panel, c + row * PANEL, words, fetch && row == 0);
        return;
    }
#endif
    multiply<W>(a, words, panel, PANEL, c, PANEL, rows, words, PANEL, false);
}

// What of a panel's row comes after the product: the sum of sixteen columns, rounded, with its bias.
template <class T>
inline f32x16 biased(const float* sums, const T* bias, long column) {
    return rounded<T>(bias ? load(sums) + load(bias + column) : load(sums));
}

// x [rows, words] times a matrix of `columns`; `use(row, column, sums)` gets PANEL sums from each column on. To be
// called by every thread of a parallel region; returns when all are through.
template <class T, class F>
inline void multiply_panels(const T* x, const Matrix& matrix, long rows, long words, long columns, const F& use) {
    const long num_panels = (columns + PANEL - 1) / PANEL;
    alignas(64) float sums[BLOCK * PANEL];
#pragma omp for schedule(static)
    for (long panel = 0; panel < num_panels; panel++) {
        const uint32_t* weights = (const uint32_t*)matrix.panels + panel * words * PANEL;
        for (long first = 0; first < rows; first += BLOCK) {
            const long count = std::min<long>(BLOCK, rows - first);
            const uint32_t* from = (const uint32_t*)x + first * words;
            multiply_panel<typename WordOf<T>::type>(from, weights, sums, count, words, first == 0);
            for (long row = 0; row < count; row++) use(first + row, panel * PANEL, sums + row * PANEL);
        }
    }
}
