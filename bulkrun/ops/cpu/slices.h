// Many rows times a pair of panels, a slice at a time: some words of all its columns, which stay in the nearest caches
// while all rows meet them. As a whole a pair of many words would come from further away for every few rows. Sums wait in
// memory from slice to slice, so they are taken in the order of matrix.h. Knows no threads.
#pragma once

#include "four_bits.h"

constexpr int PAIR = 2 * PANEL;  // columns
constexpr int SLICE_ROWS = 128;  // whose sums stay near: 32 KiB

// A slice as it is multiplied: where it lies in both panels (64 KiB; `other`: null, if there is none).
template <class W>
struct Slice {
    using Words = W;
    static constexpr long words = 256;

    Columns<const uint32_t> columns(const uint32_t* one, const uint32_t* other, long) const {
        return {one, PANEL, other ? other - one : 0};
    }
};

// Unpacked once for all rows: floats, side by side (32 KiB).
template <>
struct Slice<NarrowWords> {
    using Words = UnpackedWords;
    static constexpr long words = 64;
    alignas(64) uint32_t floats[words * NarrowWords::items * PAIR];

    Columns<const uint32_t> columns(const uint32_t* one, const uint32_t* other, long count) {
        static_assert(PAIR == UnpackedWords::columns, "as they are multiplied");
        unpack(one, count, floats);
        if (other) unpack(other, count, floats + PANEL);
        return {floats, PAIR, PANEL};
    }

  private:
    static void unpack(const uint32_t* panel, long count, uint32_t* to) {
        for (long word = 0; word < count; word++, panel += PANEL, to += 2 * PAIR)
#pragma GCC unroll 2
            for (int i = 0; i < PANEL; i += LANES) {
                u32x16 floats[NarrowWords::items];
                FloatWords::unpack((const bf16*)nullptr, load_words(panel + i), floats);
                store_words(to + i, floats[0]);
                store_words(to + PAIR + i, floats[1]);
            }
    }
};

// sums [rows, PAIR] = x [rows, words] times two panels, or one. `fetch`: whether to ask for what comes next.
template <class W>
inline void multiply_slices(const uint32_t* x, const uint32_t* one, const uint32_t* other, float* sums, long rows,
                            long words, bool fetch) {
    Slice<W> slice;
    for (long word = 0, count; word < words; word += count) {
        count = std::min(slice.words, words - word);
        const long here = word * PANEL, next = here + count * PANEL;
        const Ahead ahead = {(const char*)(fetch ? one + next : x), (const char*)(fetch && other ? other + next : x),
                             fetch ? 4 * PANEL : 0};
        multiply_columns<typename Slice<W>::Words>(
            rows, other ? 4 : 2, x + word * W::items, words * W::items,
            slice.columns(one + here, other ? other + here : nullptr, count), {sums, PAIR, PANEL}, count, word > 0,
            ahead);
    }
}

// Panels from `begin` to `end` of the first half, each with its partner, times x [rows, words]. `use`: as in panels.h.
template <class W, class F>
inline void multiply_sliced_panels(const uint32_t* x, const Panels<W>& panels, long rows, long count, long begin,
                                   long end, const F& use) {
    const long half = (count + 1) / 2, words = panels.words;
    const long pieces = (rows + SLICE_ROWS - 1) / SLICE_ROWS;
    alignas(64) float sums[SLICE_ROWS * PAIR];
    for (long panel = begin; panel < end; panel++) {
        const uint32_t* one = panels.at(panel, 0);
        const uint32_t* other = half + panel < count ? panels.at(half + panel, 1) : nullptr;
        for (long piece = 0; piece < pieces; piece++) {  // even ones: none is of few rows
            const long first = rows * piece / pieces, here = rows * (piece + 1) / pieces - first;
            const bool fetch = first == 0 && !panels.unpacked;
            multiply_slices<W>(x + first * words * W::items, one, other, sums, here, words, fetch);
            for (long row = 0; row < here; row++) use(first + row, panel, sums + row * PAIR, PANEL);
        }
    }
}
