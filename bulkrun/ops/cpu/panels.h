// A few rows times a weight that was packed once, into panels of columns. Knows matrices and threads; knows no model.
//
// Whoever computes a panel (panel_matrix.h) applies what comes after the product while the sums are in the cache.
#pragma once

#include <omp.h>

#include <algorithm>
#include <vector>

#include "slices.h"
#include "tile_slices.h"

// The rows that are multiplied; those of bytes have a scale each.
struct Operand {
    const uint32_t* rows;
    long words;  // of columns that a row meets
    const float* scales;
};

template <class W>
inline Operand operand(const void* rows, long stride) {
    return {(const uint32_t*)rows, stride / W::per_word, nullptr};
}

// `use(words)`: of which words a matrix is that rows of T are multiplied with.
template <class T, class F>
inline void with_words(const Matrix& matrix, const F& use) {
    if (matrix.in_bytes()) return use(ByteWords());
    if constexpr (sizeof(T) == sizeof(float))
        if (matrix.is_narrow) return use(NarrowWords());
    use(typename WordOf<T>::type());
}

// What of a panel's row comes after the product: sixteen columns, from their sums on.
template <class W, class T>
inline f32x16 finished(const float* sums, const Operand& x, long row, const Matrix& matrix, long column) {
    f32x16 number;
    if constexpr (W::per_word == ByteWords::per_word)
        number = numbers_of(sums, matrix.zeros + column) * x.scales[row] * load(matrix.scales + column);
    else number = load(sums);
    return matrix.bias ? number + load((const T*)matrix.bias + column) : number;
}

// Whether panels are multiplied in slices: where a pair is unpacked for many rows, or so large that it would come from
// further away than the second cache for every block of them (measured: above 512 KiB). On tiles, which wait for all of
// their rows too, where both are so large (above 1,280 KiB).
template <class W>
inline bool in_slices(long rows, long words) {
    const long pair = 4 * PAIR * words, all = pair + 4 * rows * words;
    return rows > BLOCK && (on_tiles<W>() ? all > 1280 << 10 : W::items > 1 || pair > 512 << 10);
}

// c [rows, PANEL] = a [rows, words] panel, for up to BLOCK rows, and with `other`, if there is one, BLOCK rows of sums
// further on. There is room for 16 rows where there are fewer. `fetch`: off tiles, whether to ask for what comes next.
template <class W, class F>
inline void multiply_pair(const uint32_t* a, const uint32_t* panel, const uint32_t* other, float* c, long rows,
                          long words, bool fetch, Pending<F>& pending, LinesAhead& ahead) {
#ifdef __AMX_BF16__
    if (on_tiles<W>()) {
        finish_stores();
        for (; panel; panel = other, other = nullptr, c += BLOCK * PANEL)
            multiply_panel_block<W>({a, words}, 0, rows, {panel, 0, words}, c, PANEL, pending, ahead);
        return;
    }
#endif
    constexpr bool both = BLOCK_VECTORS * LANES >= 2 * PANEL;
    const Columns<const uint32_t> here = {panel, PANEL, both && other ? other - panel : 0};
    const long size = words * PANEL;
    const Ahead next = {(const char*)(fetch ? panel + size : a), (const char*)(fetch && other ? other + size : a),
                        fetch ? 4 * PANEL : 0};
    const long stride = words * W::items;
    multiply_columns<W>(rows, both && other ? 4 : 2, a, stride, here, {c, PANEL, BLOCK * PANEL}, words, false, next);
    if (other && !both)
        multiply_columns<W>(rows, 2, a, stride, {other, PANEL, 0}, {c + BLOCK * PANEL, PANEL, 0}, words, false, next);
}

// Who computes what of something that several threads share, or one has for itself.
struct Share {
    long index, count;

    long begin(long size) const { return size * index / count; }
    long end(long size) const { return size * (index + 1) / count; }
};

// Rows that go through a product together: few, whose columns all threads share, or some of many, which one thread has
// for itself, so that what it writes and reads stays in its own cache.
struct Block {
    long first, rows;
    Share share;
};

// Of a block that one thread has for itself: what goes in and out of its products stays in its cache. Where products
// are fastest, weights must come from memory less often.
#ifdef __AMX_BF16__
constexpr int THREAD_ROWS = 256;
#else
constexpr int THREAD_ROWS = 128;
#endif
constexpr int MANY_ROWS = 128;    // per thread

// The blocks of this thread, one of a parallel region.
inline std::vector<Block> blocks_of(long rows) {
    const long thread = omp_get_thread_num(), threads = omp_get_num_threads();
    if (rows < threads * MANY_ROWS) return {{0, rows, {thread, threads}}};
    std::vector<Block> blocks;
    const long even = (rows + threads - 1) / threads;
    const long share = (even + LANES - 1) / LANES * LANES;  // whole sixteens: there is room for those of `rows` alone
    const long end = std::min(rows, (thread + 1) * share);
    for (long first = thread * share; first < end; first += THREAD_ROWS)
        blocks.push_back({first, std::min<long>(THREAD_ROWS, end - first), {0, 1}});
    return blocks;
}

// Those of this share's panels, in pairs as below.
template <class W>
inline LinesAhead lines_ahead(const Panels<W>& panels, long count, Share share) {
    const long half = (count + 1) / 2, begin = share.begin(half), end = share.end(half);
    if (!on_tiles<W>() || panels.unpacked || begin == end) return {};
    const long lines = panels.words * PANEL * sizeof(uint32_t) / 64, pairs = std::min(end, count - half) - begin;
    LinesAhead ahead = {(const char*)panels.at(begin, 0), (const char*)panels.at(half + begin, 1), lines, lines,
                        end - begin + pairs};
    ahead.ask(LinesAhead::EARLY / 64);
    return ahead;
}

// x times `count` panels, in pairs: the first half of them, rounded up, each with one of the second half.
// `use(row, panel, sums, apart)` gets PANEL sums of a panel, and those of its partner, if it has one, so far apart.
template <class W, class F>
inline void multiply_panels(const Operand& x, const Matrix& matrix, long rows, long count, Share share, const F& use) {
    const Panels<W> panels(matrix, x.words);
    const long half = (count + 1) / 2, words = x.words;
    if (in_slices<W>(rows, words))
        return (on_tiles<W>() ? multiply_tile_slices<W, F> : multiply_sliced_panels<W, F>)(
            x.rows, panels, rows, count, share.begin(half), share.end(half), use);
    alignas(64) float sums[2][2 * BLOCK * PANEL];
    Pending<F> pending = {use};
    LinesAhead ahead = lines_ahead(panels, count, share);
    int turn = 0;
    for (long panel = share.begin(half); panel < share.end(half); panel++) {
        const uint32_t* one = panels.at(panel, 0);
        const uint32_t* other = half + panel < count ? panels.at(half + panel, 1) : nullptr;
        for (long first = 0; first < rows; first += BLOCK, turn ^= 1) {
            const long here = std::min<long>(BLOCK, rows - first);
            ahead.begin_pass(first / BLOCK, (rows + BLOCK - 1) / BLOCK, panel == share.begin(half) && first == 0);
            multiply_pair<W>(x.rows + first * words * W::items, one, other, sums[turn], here, words,
                             first == 0 && !panels.unpacked, pending, ahead);
            pending.use_rows(BLOCK);
            pending.first = first, pending.panel = panel, pending.rows = here, pending.done = 0;
            pending.sums = sums[turn];
        }
    }
    pending.use_rows(BLOCK);
}

// What is stored of a product.
struct AsItIs {
    f32x16 operator()(f32x16 number) const { return number; }
};

// Rounded, and times a constant.
template <class T>
struct TimesFactor {
    float factor;

    f32x16 operator()(f32x16 number) const { return factor == 1 ? number : rounded<T>(number) * factor; }
};

// out [rows, columns] = change(x times the matrix plus its bias).
template <class W, class T, class Change>
inline void project(const Operand& x, const Matrix& matrix, T* out, long rows, long columns, Share share,
                    const Change& change) {
    const long count = (columns + PANEL - 1) / PANEL, half = (count + 1) / 2;
    multiply_panels<W>(x, matrix, rows, count, share, [&](long row, long panel, const float* sums, long apart) {
        for (; panel < count; panel += half, sums += apart) {
            const long first = panel * PANEL, end = std::min<long>(PANEL, columns - first);
            T* to = out + row * columns + first;
            for (long i = 0; i < end; i += LANES)
                store(to + i, change(finished<W, T>(sums + i, x, row, matrix, first + i)), end - i);
        }
    });
}
