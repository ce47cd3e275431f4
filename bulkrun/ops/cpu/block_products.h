// Products of a block of rows within a parallel region, whatever numbers the weights are of. Knows no model.
#pragma once

#include "panels.h"

template <class T>
struct BlockProducts {
    void *bytes, *row_scales;  // scratch: THREAD_ROWS per thread, of what is multiplied where weights are bytes
    long byte_stride;          // of its rows, for the widest

    // Rows of a buffer that has as many as a block, for this thread or for all.
    template <class Number = T>
    static Number* scratch(void* buffer, long stride, const Block& block) {
        return (Number*)buffer + (block.share.count > 1 ? 0 : omp_get_thread_num() * THREAD_ROWS) * stride;
    }

    static void meet(const Block& block) {
        if (block.share.count > 1) {
#pragma omp barrier
        }
    }

    // Some rows to the front, one behind the other: in ascending order none overtakes those before it.
    static void move_to_front(void* rows, long size, const int64_t* kept, long count) {
        for (long i = 0; i < count; i++) memmove((T*)rows + i * size, (T*)rows + kept[i] * size, size * sizeof(T));
    }

    // out [rows, columns] = change(x times the matrix plus its bias); all threads of the block are through.
    template <class Change>
    void multiply(const T* x, long stride, const Matrix& matrix, T* out, long columns, const Block& block,
                  const Change& change) const {
        with_operand(x, stride, matrix, block, [&](const Operand& rows, auto words) {
            project<decltype(words)>(rows, matrix, out, block.rows, columns, block.share, change);
        });
        meet(block);
    }

    // `use(rows, words)`: what this matrix multiplies, and of which words it is.
    template <class F>
    void with_operand(const T* x, long stride, const Matrix& matrix, const Block& block, const F& use) const {
        with_words<T>(matrix, [&](auto words) {
            if constexpr (words.per_word == ByteWords::per_word) use(quantized(x, stride, block), words);
            else use(operand<decltype(words)>(x, stride), words);
        });
    }

  private:
    // As bytes, once all threads of the block have done their rows.
    Operand quantized(const T* x, long stride, const Block& block) const {
        const long padded = round_up(stride, BYTE_PAD);
        uint8_t* to = scratch<uint8_t>(bytes, byte_stride, block);
        float* scales = scratch<float>(row_scales, 1, block);
        for (long row = block.share.begin(block.rows); row < block.share.end(block.rows); row++)
            scales[row] = quantize_row(x + row * stride, stride, to + row * padded);
        meet(block);
        return {(const uint32_t*)to, padded / ByteWords::per_word, scales};
    }
};
