// Few rows times keys and values where these lie in the cache: nothing is laid out first, all stays in registers.
// Sums go in the same order as in matrix.h.
#pragma once

#include "matrix.h"

constexpr int TILE = 64;  // keys

// Some keys of a tile, or their values: where they lie, and where those that come after them lie. Null: nowhere.
// C is what the cache holds of a number.
template <class C>
struct Part {
    long first, count;
    const C *at[TILE], *next[TILE];
};

// Sixteen keys of `size` numbers, a line of each from number `first` on, as columns of what memory holds. Meanwhile the
// next ones are asked for, line by line, so that reading and computing overlap.
template <class C>
inline void load_columns(const Part<C>& part, long key, long head, long first, long size, u32x16* square) {
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
        __builtin_prefetch(part.next[key + i] + head + first, 0, 2);
        const C* at = part.at[key + i];
        square[i] = at ? load_line(at + head, first, size) : u32x16{};
    }
    transpose(square);
}

// Words of sixteen keys, one after the other, as columns: use(word, column) for each of `words`, a multiple of LANES.
template <class W, class C, class F>
inline void each_column(const Part<C>& part, long key, long head, long words, long size, const F& use) {
    constexpr int unpacked = UNPACKED<W, C>;
    for (long word = 0; word < words; word += LANES * unpacked) {
        u32x16 square[LANES], columns[unpacked];
        load_columns(part, key, head, word * W::per_word, size, square);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            if (i * unpacked % LANES == 0 && word + i * unpacked >= words) break;
            W::unpack((const C*)nullptr, square[i], columns);
#pragma GCC unroll 4
            for (int j = 0; j < unpacked; j++) use(word + i * unpacked + j, columns[j]);
        }
    }
}

#ifdef __AVX512F__
constexpr int FEW_ROWS = 4;  // their sums and sixteen columns fit 32 registers; each number takes time to compile
#else
constexpr int FEW_ROWS = 0;
#endif

// scores [R, 16] of sixteen keys; query: [R, words].
template <class W, int R, class C>
inline void score_few(const uint32_t* query, long words, const Part<C>& part, long key, long head, long size,
                      float* scores, long stride) {
    f32x16 sums[R] = {};
    each_column<W>(part, key, head, words, size, [&](long word, u32x16 column) {
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) sums[r] = W::multiply_add(W::number(query + r * words + word, 0), column, sums[r]);
    });
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) store(scores + r * stride, sums[r]);
}

// out [R, 16 V] += weights [R, words] times values, of which dimensions from `first` on.
template <class W, int R, int V, class C>
inline void add_few(const uint32_t* weights, long stride, const Part<C>& part, long head, long first, long size,
                    float* out, long width) {
    f32x16 sums[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) sums[r][v] = load(out + r * width + v * LANES);
    for (long key = 0; key < part.count; key += W::per_word) {
        const C* vectors[W::per_word];
        for (int i = 0; i < W::per_word; i++) {
            vectors[i] = part.at[key + i] ? part.at[key + i] + head : nullptr;
            for (int ahead = 0; ahead < V * LANES; ahead += 64 / sizeof(C))
                __builtin_prefetch(part.next[key + i] + head + first + ahead, 0, 2);
        }
        u32x16 columns[V];
#pragma GCC unroll 2
        for (int v = 0; v < V; v += 2) W::mix(vectors, first + v * LANES, size, columns[v], columns[v + 1]);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) {
                const uint32_t* weight = weights + r * stride + key / W::per_word;
                sums[r][v] = W::multiply_add(W::number(weight, 0), columns[v], sums[r][v]);
            }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) store(out + r * width + v * LANES, sums[r][v]);
}

// `count` <= R rows: the scores of a part's keys, and its values by the weights of their keys. width: a multiple of 32.
template <class W, class C, int R = FEW_ROWS>
struct FewRows {
    static void score(long count, const uint32_t* query, long words, const Part<C>& part, long head, long size,
                      float* scores) {
        if (count < R) return FewRows<W, C, R - 1>::score(count, query, words, part, head, size, scores);
        for (long key = 0; key < part.count; key += LANES)
            score_few<W, R>(query, words, part, key, head, size, scores + key, TILE);
    }

    static void add_values(long count, const uint32_t* weights, const Part<C>& part, long head, long size, float* out,
                           long width) {
        if (count < R) return FewRows<W, C, R - 1>::add_values(count, weights, part, head, size, out, width);
        constexpr long stride = TILE / W::per_word;
        long dim = 0;
        for (; dim + 4 * LANES <= width; dim += 4 * LANES)
            add_few<W, R, 4>(weights, stride, part, head, dim, size, out + dim, width);
        for (; dim < width; dim += 2 * LANES)
            add_few<W, R, 2>(weights, stride, part, head, dim, size, out + dim, width);
    }
};

template <class W, class C>
struct FewRows<W, C, 0> {
    static void score(long, const uint32_t*, long, const Part<C>&, long, long, float*) {}
    static void add_values(long, const uint32_t*, const Part<C>&, long, long, float*, long) {}
};
