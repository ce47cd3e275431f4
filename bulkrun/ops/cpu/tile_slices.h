// Many rows times panels of many words on the tile unit, a slice at a time: some words of several pairs of panels, which
// meet all of up to 256 rows before the next ones do. Otherwise rows and panels would come from beyond the second cache,
// again and again. Sums wait in memory from slice to slice, so they are taken in the order of matrix.h. Knows no threads.
#pragma once

#include "slices.h"
#include "tile_rows.h"

constexpr long TILE_SLICE = 512;      // words: 64 KiB of a panel, 512 KiB of all rows
constexpr long TILE_SLICE_ROWS = 256;
constexpr long TILE_SLICE_PAIRS = 8;  // whose sums stay near: 512 KiB

#ifdef __AMX_BF16__

// Nothing is left of the product before.
struct NothingPending {
    static constexpr long rows = 0;
    void use_rows(long) const {}
};

// sums [rows, PAIR], one half: x times a panel's words; `next`: those that come after them, or null.
template <class W>
inline void multiply_tile_slice(const TileRows& x, long rows, const PanelWords& panel, const uint32_t* next,
                                float* sums) {
    const long lines = panel.count * PANEL * sizeof(uint32_t) / 64, passes = (rows + BLOCK - 1) / BLOCK;
    LinesAhead ahead = {(const char*)next, nullptr, lines, lines, next ? 1 : 0};
    NothingPending nothing;
    finish_stores();
    for (long row = 0; row < rows; row += BLOCK) {
        ahead.begin_pass(row / BLOCK, passes, false);
        multiply_panel_block<W>(x, row, rows - row, panel, sums + row * PAIR, PAIR, nothing, ahead);
    }
}

// Some pairs of panels, numbered as they are multiplied: the first one, its partner, the second one, and so on.
template <class W>
struct PairsOfPanels {
    const Panels<W>& panels;
    long first, half, count;  // of them: the last one may have no partner

    const uint32_t* at(long i, long word, long words) const {
        return panels.at(first + i / 2 + i % 2 * half, 0, word, words);
    }

    // What comes after it, where it need not be unpacked.
    const uint32_t* after(long i, long word, long words) const {
        if (panels.unpacked) return nullptr;
        if (i + 1 < count) return at(i + 1, word, words);
        return word + words < panels.words ? at(0, word + words, words) : nullptr;
    }
};

// The rows of a slice: where they lie, or copied.
struct SlicedRows {
    static constexpr long STRIDE = TILE_SLICE + LANES;  // words: sixteen rows do not fall on the same lines of a cache
    const uint32_t* rows;
    long words;  // of a row
    bool are_copied;

    TileRows at(long word) const {
        if (are_copied) return {rows + word / TILE_SLICE * TILE_SLICE_ROWS * STRIDE, STRIDE};
        return {rows + word, words};
    }
};

inline SlicedRows copied(const uint32_t* x, long rows, long words) {
    constexpr long STRIDE = SlicedRows::STRIDE, SLICE = TILE_SLICE_ROWS * STRIDE;
    uint32_t* const copy = thread_words<SlicedRows>(SLICE * (words / TILE_SLICE + 1));
    uint32_t* to = copy;
    for (long word = 0; word < words; word += TILE_SLICE, to += SLICE) {
        const size_t bytes = sizeof(uint32_t) * std::min(TILE_SLICE, words - word);
        for (long row = 0; row < rows; row++) memcpy(to + row * STRIDE, x + row * words + word, bytes);
    }
    return {copy, words, true};
}

// sums [pairs, TILE_SLICE_ROWS, PAIR] = x times pairs of panels.
template <class W>
inline void multiply_pairs(const SlicedRows& x, long rows, const PairsOfPanels<W>& pairs, float* sums) {
    for (long word = 0, count; word < x.words; word += count) {
        count = std::min(TILE_SLICE, x.words - word);
        for (long i = 0; i < pairs.count; i++)
            multiply_tile_slice<W>(x.at(word), rows, {pairs.at(i, word, count), word, count},
                                   pairs.after(i, word, count),
                                   sums + i / 2 * TILE_SLICE_ROWS * PAIR + i % 2 * PANEL);
    }
}

// Panels from `begin` to `end` of the first half, each with its partner, times x [rows, words]. `use`: as in panels.h.
template <class W, class F>
inline void multiply_tile_slices(const uint32_t* x, const Panels<W>& panels, long rows, long count, long begin,
                                 long end, const F& use) {
    const long half = (count + 1) / 2, words = panels.words, apart = TILE_SLICE_ROWS * PAIR;
    float* sums = (float*)thread_words<PairsOfPanels<W>>(TILE_SLICE_PAIRS * apart);
    const bool are_many = end - begin > 2 * TILE_SLICE_PAIRS;  // for fewer a copy takes as long as it saves
    for (long first = 0; first < rows; first += TILE_SLICE_ROWS, x += TILE_SLICE_ROWS * words) {
        const long here = std::min(TILE_SLICE_ROWS, rows - first);
        const SlicedRows some = are_many ? copied(x, here, words) : SlicedRows{x, words, false};
        for (long pair = begin, stop; pair < end; pair = stop) {
            stop = std::min(pair + TILE_SLICE_PAIRS, end);
            const long partners = std::min(stop, count - half) - pair;
            multiply_pairs<W>(some, here, {panels, pair, half, stop - pair + partners}, sums);
            for (long i = pair; i < stop; i++)
                for (long row = 0; row < here; row++)
                    use(first + row, i, sums + (i - pair) * apart + row * PAIR, PANEL);
        }
    }
}

#else

template <class W, class F>
inline void multiply_tile_slices(const uint32_t*, const Panels<W>&, long, long, long, long, const F&) {}

#endif
