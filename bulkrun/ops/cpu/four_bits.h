// A panel of codes of four bits, unpacked into the words that are multiplied. Contract: ops/matmul/four_bit_linear.py.
// Knows no product.
#pragma once

#include <algorithm>
#include <vector>

#include "panel_matrix.h"

constexpr int CODES = 8;  // in 32 bits, the first in the lowest

// Sixteen columns of a group of inputs.
struct Group {
    f32x16 codebook, zero, scale, byte_factor;

    template <class W, bool HAS_ZERO>
    f32x16 number(u32x16 code) const {
        const f32x16 found = looked_up(codebook, code), number = (HAS_ZERO ? found - zero : found) * scale;
        if constexpr (W::per_word == ByteWords::per_word) return number * byte_factor;
        else return number;
    }
};

template <class W, bool HAS_ZERO>
inline void unpack_group(const Group& group, const uint32_t* codes, long size, uint32_t* to) {
    for (long first = 0; first < size; first += CODES, codes += PANEL) {
        __builtin_prefetch((const char*)codes + AHEAD, 0, 2);
        const u32x16 eight = load_words(codes);
#pragma GCC unroll 8
        for (int i = 0; i < CODES; i += W::per_word, to += PANEL) {
            f32x16 numbers[W::per_word];
#pragma GCC unroll 4
            for (int j = 0; j < W::per_word; j++) numbers[j] = group.number<W, HAS_ZERO>(eight >> 4 * (i + j));
            store_words(to, W::joined(numbers));
        }
    }
}

// Inputs from `begin` to `end` of a panel with `size` of them.
template <class W, bool HAS_ZERO>
inline void unpack_panel(const Matrix& matrix, long panel, long size, long begin, long end, uint32_t* to) {
    const uint32_t* codes = (const uint32_t*)matrix.panels + panel * PANEL * (size / CODES);
    const long num_groups = size / matrix.group_size;
    Group group = {load(matrix.codebook)};
    for (long first = begin, next; first < end; first = next) {
        const long i = first / matrix.group_size;
        next = std::min(end, (i + 1) * matrix.group_size);
        for (long column = 0; column < PANEL; column += LANES) {
            const long at = (panel * num_groups + i) * PANEL + column;
            group.scale = matrix.scales_at(at);
            if (HAS_ZERO) group.zero = load(matrix.group_zeros + at);
            if (matrix.in_bytes()) group.byte_factor = load(matrix.byte_factors + panel * PANEL + column);
            unpack_group<W, HAS_ZERO>(group, codes + first / CODES * PANEL + column, next - first,
                                      to + (first - begin) / W::per_word * PANEL + column);
        }
    }
}

// Memory of this thread, for one purpose, which stays: asking for it anew would take longer than unpacking.
template <class Purpose>
inline uint32_t* thread_words(size_t count) {
    struct alignas(64) Line {
        uint32_t words[LANES];
    };
    thread_local std::vector<Line> lines;
    if (lines.size() * LANES < count) lines.resize(count / LANES + 1);
    return lines.data()->words;
}

// A matrix's panels as they are multiplied: where they lie or, of codes, unpacked.
template <class W>
struct Panels {
    const Matrix& matrix;
    const long words;  // of a column
    uint32_t* const unpacked;

    Panels(const Matrix& matrix, long words)
        : matrix(matrix), words(words), unpacked(matrix.codebook ? thread_words<Panels>(2 * words * PANEL) : nullptr) {}

    // `count` words of a column of it, from the first one on. Of two, told apart by `place`, until the next one there.
    const uint32_t* at(long panel, int place, long first, long count) const {
        if (!unpacked) return (const uint32_t*)matrix.panels + (panel * words + first) * PANEL;
        uint32_t* to = unpacked + place * words * PANEL;
        const long size = words * W::per_word, begin = first * W::per_word, end = (first + count) * W::per_word;
        if (matrix.group_zeros) unpack_panel<W, true>(matrix, panel, size, begin, end, to);
        else unpack_panel<W, false>(matrix, panel, size, begin, end, to);
        return to;
    }

    const uint32_t* at(long panel, int place) const { return at(panel, place, 0, words); }
};
