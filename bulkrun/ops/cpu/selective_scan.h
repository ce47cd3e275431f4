// Mamba's selective state space, token by token, some channels of a sequence at a time. Knows no threads.
#pragma once

#include "head_states.h"

struct SelectiveScan {
    const void *x, *dt, *b, *c, *gate;    // [T, H P], [T, H P], [T, N], [T, N] and [T, H P]
    const float *rate, *dt_bias, *d;      // [N, H P], [H P] and [H P]
    float* state;                         // [R, H, N, P]
    void* out;                            // [T, H P]
    const int64_t* rows;
    const int32_t *cu_seqlens, *context_lens;
    int64_t x_stride, dt_stride, b_stride, c_stride, gate_stride;
    int64_t num_heads, size, value_size, num_seqs, num_tokens;
    int32_t num_threads;
};

// What some tokens write to their channels' states, and read them with.
struct ScanInputs {
    float b[TOKENS][MAX_SIZE], c[TOKENS][MAX_SIZE];
};

template <class T>
inline void prepare(const SelectiveScan& s, long token, ScanInputs& p, long at) {
    const T *b = (const T*)s.b + token * s.b_stride, *c = (const T*)s.c + token * s.c_stride;
    for (long n = 0; n < s.size; n += LANES) {
        store(p.b[at] + n, load(b + n, s.size - n), s.size - n);
        store(p.c[at] + n, load(c + n, s.size - n), s.size - n);
    }
}

// One token in sixteen channels; `rates` as powers of two.
template <class T>
inline void scan_token(const SelectiveScan& s, long token, long channel, const f32x16* rates, const float* b,
                       const float* c, float* state) {
    const f32x16 x = load((const T*)s.x + token * s.x_stride + channel);
    const f32x16 dt = load((const T*)s.dt + token * s.dt_stride + channel);
    const f32x16 gate = load((const T*)s.gate + token * s.gate_stride + channel);
    const f32x16 step = softplus_of(dt + load(s.dt_bias + channel)), written = step * x;
    f32x16 total = load(s.d + channel) * x;
    for (long n = 0; n < s.size; n++) {
        float* place = state + n * s.value_size;
        const f32x16 next = load(place) * exp2_near_0(step * rates[n]) + written * b[n];
        store(place, next);
        total += next * c[n];
    }
    store((T*)s.out + token * s.num_heads * s.value_size + channel, total * gate * sigmoid<float>(gate));
}

template <class T>
inline void scan_head(const SelectiveScan& s, float* state, long head, long first, long end) {
    const long num_channels = s.num_heads * s.value_size;
    f32x16 rates[MAX_SIZE];
    ScanInputs p;
    for (long token = first; token < end; token += TOKENS) {
        const long count = std::min(TOKENS, end - token);
        for (long at = 0; at < count; at++) prepare<T>(s, token + at, p, at);
        for (long column = 0; column < s.value_size; column += LANES) {
            const long channel = head * s.value_size + column;
            for (long n = 0; n < s.size; n++) {
                __builtin_prefetch(state + (s.size + n) * s.value_size + column, 1);  // the next head's
                rates[n] = load(s.rate + n * num_channels + channel) * LOG2_E;
            }
            for (long at = 0; at < count; at++)
                scan_token<T>(s, token + at, channel, rates, p.b[at], p.c[at], state + column);
        }
    }
}
