// Mamba 2's state space, token by token, a head of a sequence at a time. Knows no threads.
#pragma once

#include "head_states.h"

struct StateSpace {
    const void *xbc, *dt;  // [T, H P + 2 G N] and [T, H]
    const float *a_log, *dt_bias, *d;
    float* state;  // [R, H, N, P]
    void* out;     // [T, H, P]
    const int64_t* rows;
    const int32_t *cu_seqlens, *context_lens;
    int64_t xbc_stride, dt_stride, num_heads, num_groups, size, value_size, num_seqs, num_tokens;
    int32_t num_threads;
};

// Of some tokens of a head.
struct SpaceInputs {
    float b[TOKENS][MAX_SIZE], c[TOKENS][MAX_SIZE], decays[TOKENS], steps[TOKENS];
};

// How much the state forgets at one token, what is written into it, and with what it is read.
template <class T>
inline void prepare(const StateSpace& s, long token, long head, SpaceInputs& p, long at) {
    const T* xbc = (const T*)s.xbc + token * s.xbc_stride;
    const T *b = xbc + s.num_heads * s.value_size + head / (s.num_heads / s.num_groups) * s.size,
            *c = b + s.num_groups * s.size;
    for (long n = 0; n < s.size; n += LANES) {
        store(p.b[at] + n, load(b + n, s.size - n), s.size - n);
        store(p.c[at] + n, load(c + n, s.size - n), s.size - n);
    }
    p.steps[at] = softplus(as_float((const T*)s.dt + token * s.dt_stride + head) + s.dt_bias[head]);
    p.decays[at] = std::exp(-std::exp(s.a_log[head]) * p.steps[at]);
}

// One token in some columns.
template <int WIDES, class T>
inline void advance(float* state, long size, long stride, const SpaceInputs& p, long at, float d, const T* x, T* out) {
    const float *b = p.b[at], *c = p.c[at], decay = p.decays[at];
    wide input[WIDES], written[WIDES], total[WIDES] = {};
    load_columns(x, input);
    for (int w = 0; w < WIDES; w++) written[w] = input[w] * p.steps[at];
    for (long n = 0; n < size; n++)
        for (int w = 0; w < WIDES; w++) {
            float* place = state + n * stride + w * WIDTH;
            const wide next = load_wide(place) * decay + written[w] * b[n];
            store_wide(place, next);
            total[w] += next * c[n];
        }
    for (int w = 0; w < WIDES; w++) total[w] += input[w] * d;
    store_columns(out, total);
}

template <class T>
inline void advance_head(const StateSpace& s, float* state, long head, long first, long end) {
    const long out_size = s.num_heads * s.value_size, own = head * s.value_size;
    SpaceInputs p;
    for (long token = first; token < end; token += TOKENS) {
        const long count = std::min(TOKENS, end - token);
        for (long at = 0; at < count; at++) prepare<T>(s, token + at, head, p, at);
        for_columns(s.value_size, [&](auto wides, long column) {
            const T* x = (const T*)s.xbc + token * s.xbc_stride + own + column;
            T* out = (T*)s.out + token * out_size + own + column;
            for (long at = 0; at < count; at++)
                advance<wides>(state + column, s.size, s.value_size, p, at, s.d[head], x + at * s.xbc_stride,
                               out + at * out_size);
        });
    }
}
