// Up to 32 rows times a panel on the tile unit, while sums of before are used and what comes next is asked for: the three
// units that do it work side by side when their instructions come close together. Knows no threads.
#pragma once

#include <algorithm>

#include "panel_matrix.h"

constexpr int BLOCK = 32;  // rows of sums at a time: what the tile unit holds

// A block's sums that are not used yet: some rows of them at every step of the next product, for the tile unit and the
// vector unit work side by side when their instructions come close together.
template <class F>
struct Pending {
    const F& use;
    long first = 0, panel = 0, rows = 0, done = 0;
    const float* sums = nullptr;

    void use_rows(long count) {
        for (const long end = std::min(rows, done + count); done < end; done++)
            use(first + done, panel, sums + done * PANEL, BLOCK * PANEL);
    }
};

// Lines of a thread's panels, asked for in the order in which they are multiplied: early, for memory answers slowly, and
// evenly, for a core that has asked for as many as it may waits, and multiplies nothing.
struct LinesAhead {
    static constexpr long EARLY = 8192, OF_STEP = PANEL * LANES * sizeof(uint32_t) / 64;  // bytes; of sixteen words

    const char *next = nullptr, *other = nullptr;  // of the panel that is asked for, and of that beside it
    long lines = 0, left = 0, panels = 0;  // of a panel; of this one; from this one on
    long at_a_time = 0;  // of sixteen words that are multiplied

    // LOCALITY: of the cache, as GCC's prefetch has it.
    template <int LOCALITY = 2>
    void ask(long count) {
        while (count && panels) {
            const long here = std::min(count, left);
            for (long line = 0; line < here; line++) __builtin_prefetch(next + line * 64, 0, LOCALITY);
            next += here * 64, left -= here, count -= here;
            if (left) continue;
            std::swap(next, other);
            left = lines, panels--;
        }
    }

    // The next pair of panels is asked for during all passes over one, each of other rows. But nobody has asked for the
    // first one.
    void begin_pass(long pass, long passes, bool is_first) {
        const auto asked = [&](long done) { return (OF_STEP * done + passes - 1) / passes; };
        at_a_time = is_first ? OF_STEP : asked(pass + 1) - asked(pass);
    }
};

// Whether rows of such words are multiplied on the tile unit.
template <class W>
inline bool on_tiles() {
    return W::per_word > 1 && W::items == 1 && has_tiles();
}

// Rows as tiles read them, so many words apart.
struct TileRows {
    const uint32_t* rows;
    long stride;
};

// Some words of a panel, from number `first` on.
struct PanelWords {
    const uint32_t* words;
    long first, count;
};

#ifdef __AMX_BF16__
#define MULTIPLY_TILES(SUMS, ROWS, COLUMNS)                                                         \
    do {                                                                                            \
        if constexpr (W::per_word == ByteWords::per_word) _tile_dpbusd(SUMS, ROWS, COLUMNS);        \
        else _tile_dpbf16ps(SUMS, ROWS, COLUMNS);                                                   \
    } while (false)

template <int R>
inline void begin_sums(const float* c, long stride, bool accumulate) {
    _tile_zero(0);
    _tile_zero(1);
    if (R == 2) _tile_zero(2);
    if (R == 2) _tile_zero(3);
    if (!accumulate) return;
    _tile_loadd(0, c, 4 * stride);
    _tile_loadd(1, c + LANES, 4 * stride);
    if (R == 2) _tile_loadd(2, c + LANES * stride, 4 * stride);
    if (R == 2) _tile_loadd(3, c + LANES * stride + LANES, 4 * stride);
}

// c [16 R, PANEL] = 16 R rows of a, from `row` on, times a panel's words; but its first ones, the sums go on in c.
template <class W, int R, class P>
inline void multiply_panel_rows(const TileRows& a, long row, const PanelWords& panel, float* c, long c_stride,
                                P& pending, LinesAhead& ahead) {
    constexpr int LOCALITY = R == 1 ? 2 : 3;  // measured: 32 rows gain from lines in the nearest cache, 16 lose a little
    const long at_a_time = pending.rows * LANES / panel.count / 2 + 1, quarter = ahead.at_a_time / 4;
    const long stride = sizeof(uint32_t) * a.stride;
    const uint32_t *rows = a.rows + row * a.stride, *below = rows + LANES * a.stride;
    begin_sums<R>(c, c_stride, panel.first > 0);
    for (long word = 0; word < panel.count; word += LANES) {
        const uint32_t* here = panel.words + word * PANEL;
        _tile_loadd(4, rows + word, stride);
        _tile_loadd(6, here, 4 * PANEL);
        ahead.ask<LOCALITY>(quarter);
        MULTIPLY_TILES(0, 4, 6);
        ahead.ask<LOCALITY>(quarter);
        _tile_loadd(7, here + LANES, 4 * PANEL);
        MULTIPLY_TILES(1, 4, 7);
        ahead.ask<LOCALITY>(quarter);
        if (R == 2) {
            _tile_loadd(5, below + word, stride);
            MULTIPLY_TILES(2, 5, 6);
            MULTIPLY_TILES(3, 5, 7);
        }
        ahead.ask<LOCALITY>(ahead.at_a_time - 3 * quarter);
        pending.use_rows(at_a_time);
    }
    _tile_stored(0, c, 4 * c_stride);
    _tile_stored(1, c + LANES, 4 * c_stride);
    if (R == 2) _tile_stored(2, c + LANES * c_stride, 4 * c_stride);
    if (R == 2) _tile_stored(3, c + LANES * c_stride + LANES, 4 * c_stride);
}

// The same for up to BLOCK rows; there is room for 16 where there are fewer.
template <class W, class P>
inline void multiply_panel_block(const TileRows& a, long row, long rows, const PanelWords& panel, float* c,
                                 long c_stride, P& pending, LinesAhead& ahead) {
    if (rows <= LANES) multiply_panel_rows<W, 1>(a, row, panel, c, c_stride, pending, ahead);
    else multiply_panel_rows<W, 2>(a, row, panel, c, c_stride, pending, ahead);
}
#endif
