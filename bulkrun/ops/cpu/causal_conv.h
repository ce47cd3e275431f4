// A short convolution over each sequence's last tokens: how the threads of a parallel region share it.
#pragma once

#include <algorithm>

#include "row_ops.h"

struct Convolution {
    const void *x, *weight, *bias;  // [T, C], [W, C] and [C] or null
    void *state, *out;              // [R, W - 1, C] and [T, C]
    const int64_t* rows;
    const int32_t *cu_seqlens, *context_lens;
    int64_t x_stride, num_channels, num_taps, num_seqs, num_tokens;
    int32_t silu, num_threads;
};

constexpr long CHANNELS = 256;  // of one piece of work

// One sequence's tokens, in some of the channels; `begins`: what the state holds is another's.
template <class T>
inline void convolve(const Convolution& c, const T* x, T* state, T* out, long count, bool begins, long first, long end) {
    const T *weight = (const T*)c.weight, *bias = (const T*)c.bias;
    const long before = c.num_taps - 1, size = c.num_channels;
    for (long token = 0; token < count; token++)
        for (long i = first; i < end; i += LANES) {
            f32x16 total = bias ? load(bias + i, end - i) : f32x16{};
            for (long tap = begins ? std::max(0L, before - token) : 0; tap <= before; tap++) {
                const long source = token + tap - before;
                const T* input = source < 0 ? state + (before + source) * size : x + source * c.x_stride;
                total += load(input + i, end - i) * load(weight + tap * size + i, end - i);
            }
            store(out + token * size + i, c.silu ? Silu<T>()(total) : total, end - i);
        }
    for (long slot = 0; slot < before; slot++) {  // the last inputs, oldest first
        const long source = count + slot - before;
        T* to = state + slot * size;
        if (source < 0 && begins) std::fill(to + first, to + end, T{});
        else {
            const T* from = source < 0 ? state + (before + source) * size : x + source * c.x_stride;
            std::copy(from + first, from + end, to + first);
        }
    }
}

// All of it, by the threads of a parallel region.
template <class T>
inline void convolve(const Convolution& c) {
    const long pieces = (c.num_channels + CHANNELS - 1) / CHANNELS, state_size = (c.num_taps - 1) * c.num_channels;
#pragma omp for collapse(2)
    for (long seq = 0; seq < c.num_seqs; seq++)
        for (long piece = 0; piece < pieces; piece++) {
            const long token = c.cu_seqlens[seq], count = c.cu_seqlens[seq + 1] - token, first = piece * CHANNELS;
            if (count == 0) continue;
            convolve(c, (const T*)c.x + token * c.x_stride, (T*)c.state + c.rows[seq] * state_size,
                     (T*)c.out + token * c.num_channels, count, c.context_lens[seq] == count, first,
                     std::min(first + CHANNELS, (long)c.num_channels));
        }
}
