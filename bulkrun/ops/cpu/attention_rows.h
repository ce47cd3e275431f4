// Scratch memory of one thread for a work item of attention.
#pragma once

#include "few_rows.h"

constexpr int MAX_ROWS = 128;  // of one item: a tile's layout is paid by so many; a multiple of LANES

// The tile unit works on sixteen rows at a time.
inline long rows_per_kv_head(long rows) { return round_up(rows, LANES); }

// What one item keeps while keys go by: scratch memory of one thread.
template <class W>
struct Rows {
    long words, width;  // of a query, in words, and of an output, in floats; padded to LANES and twice as many
    uint32_t *query, *keys, *weights, *values;
    float *scores, *out, *top;
    f32x16* total;

    static long bytes(long head_dim) {
        return 4 * (2 * MAX_ROWS + 2 * TILE) * (head_dim + 2 * LANES) + 4 * MAX_ROWS * (2 * TILE + 2 * LANES) + 4096;
    }

    Rows(char* memory, long head_dim, long value_dim) {
        words = round_up((head_dim + W::per_word - 1) / W::per_word, LANES);
        width = round_up(value_dim, 2 * LANES);
        auto take = [&](long count) {
            char* here = memory;
            memory += round_up(4 * count, 64);
            return here;
        };
        query = (uint32_t*)take(MAX_ROWS * words);
        keys = (uint32_t*)take(words * TILE);
        weights = (uint32_t*)take(MAX_ROWS * TILE);
        values = (uint32_t*)take(TILE * width);
        scores = (float*)take(MAX_ROWS * TILE);
        out = (float*)take(MAX_ROWS * width);
        total = (f32x16*)take(MAX_ROWS * LANES);
        top = (float*)take(MAX_ROWS);
    }

    // The same scratch, with rows from `first` on.
    Rows from(long first) const {
        Rows rest = *this;
        rest.query += first * words;
        rest.weights += first * (TILE / W::per_word);
        rest.scores += first * TILE;
        rest.out += first * width;
        rest.total += first;
        rest.top += first;
        return rest;
    }
};
