// The gated delta rule, token by token: a head of one sequence.
#pragma once

#include "head_states.h"

struct DeltaRule {
    const void *qkv, *ba;          // [T, 2 K D + H V] and [T, H (1 + num_decays)]
    const float *a_log, *dt_bias;  // [H] and [H, num_decays]
    float* state;  // [R, H, D, V]
    void* out;     // [T, H, V]
    const int64_t* rows;
    const int32_t *cu_seqlens, *context_lens;
    int64_t qkv_stride, ba_stride, num_heads, num_key_heads, size, value_size;
    int64_t num_decays;  // of a head: one, or one for each channel of its keys
    int64_t num_seqs, num_tokens;
    float norm_eps, beta_scale;
    int32_t num_threads;
};

struct Prepared {
    float queries[TOKENS][MAX_SIZE], keys[TOKENS][MAX_SIZE], decays[TOKENS][MAX_SIZE], betas[TOKENS];
};

// A head times `factor`, brought to length 1.
template <class T>
inline void scale_head(const T* head, float* out, long size, float factor, float eps) {
    f32x16 squares = {};
    for (long i = 0; i < size; i += LANES) squares += load(head + i, size - i) * load(head + i, size - i);
    const float scale = factor / std::sqrt(sum(squares) + eps);
    for (long i = 0; i < size; i += LANES) store(out + i, load(head + i, size - i) * scale, size - i);
}

// By what a head's state is multiplied at one token: one number, or one for each channel.
template <class T>
inline void forget(const T* a, const float* dt_bias, float forgetting, long num_decays, float* decays) {
    if (num_decays == 1) decays[0] = std::exp(-forgetting * softplus(as_float(a) + dt_bias[0]));
    else
        for (long i = 0; i < num_decays; i += LANES) {
            const long count = num_decays - i;
            const f32x16 step = softplus_of(load(a + i, count) + load(dt_bias + i, count));
            store(decays + i, exp2_near_0(step * (-forgetting * LOG2_E)), count);
        }
}

// How much the state forgets, and how much of its error it corrects, at one token.
template <class T>
inline void prepare(const DeltaRule& r, long token, long head, Prepared& p, long at) {
    const T *qkv = (const T*)r.qkv + token * r.qkv_stride, *ba = (const T*)r.ba + token * r.ba_stride;
    const long key_head = head / (r.num_heads / r.num_key_heads), key_dim = r.num_key_heads * r.size;
    scale_head(qkv + key_head * r.size, p.queries[at], r.size, 1 / std::sqrt((float)r.size), r.norm_eps);
    scale_head(qkv + key_dim + key_head * r.size, p.keys[at], r.size, 1.0f, r.norm_eps);
    forget(ba + r.num_heads + head * r.num_decays, r.dt_bias + head * r.num_decays, std::exp(r.a_log[head]),
           r.num_decays, p.decays[at]);
    p.betas[at] = r.beta_scale / (1 + std::exp(-as_float(ba + head)));
}

// One token in some columns; sums over even and odd rows are apart, or each addition would wait for the last.
template <int WIDES, bool HAS_CHANNELS, class T>
inline void correct(float* state, long size, long stride, const Prepared& p, long at, const T* value, T* out) {
    const float *query = p.queries[at], *key = p.keys[at], *decays = p.decays[at], decay = decays[0];
    wide known[2][WIDES] = {}, found[2][WIDES] = {}, error[WIDES];
    for (long d = 0; d < size; d += 2)
        for (int odd = 0; odd < 2; odd++)
            for (int w = 0; w < WIDES; w++)
                known[odd][w] += load_wide(state + (d + odd) * stride + w * WIDTH) *
                                 (HAS_CHANNELS ? key[d + odd] * decays[d + odd] : key[d + odd]);
    load_columns(value, error);
    for (int w = 0; w < WIDES; w++) {
        const wide expected = known[0][w] + known[1][w];
        error[w] = (error[w] - (HAS_CHANNELS ? expected : decay * expected)) * p.betas[at];
    }
    for (long d = 0; d < size; d += 2)
        for (int odd = 0; odd < 2; odd++)
            for (int w = 0; w < WIDES; w++) {
                float* place = state + (d + odd) * stride + w * WIDTH;
                const float kept = HAS_CHANNELS ? decays[d + odd] : decay;
                const wide corrected = load_wide(place) * kept + error[w] * key[d + odd];
                store_wide(place, corrected);
                found[odd][w] += corrected * query[d + odd];
            }
    for (int w = 0; w < WIDES; w++) found[0][w] += found[1][w];
    store_columns(out, found[0]);
}

template <bool HAS_CHANNELS, class T>
inline void correct_tokens(const DeltaRule& r, float* state, long head, long first, long end) {
    const long value_dim = r.num_heads * r.value_size, own = head * r.value_size;
    const T* values = (const T*)r.qkv + 2 * r.num_key_heads * r.size + own;
    Prepared p;
    for (long token = first; token < end; token += TOKENS) {
        const long count = std::min(TOKENS, end - token);
        for (long at = 0; at < count; at++) prepare<T>(r, token + at, head, p, at);
        for_columns(r.value_size, [&](auto wides, long column) {
            const T* value = values + token * r.qkv_stride + column;
            T* out = (T*)r.out + token * value_dim + own + column;
            for (long at = 0; at < count; at++)
                correct<wides, HAS_CHANNELS>(state + column, r.size, r.value_size, p, at, value + at * r.qkv_stride,
                               out + at * value_dim);
        });
    }
}

template <class T>
inline void correct_head(const DeltaRule& r, float* state, long head, long first, long end) {
    if (r.num_decays > 1) correct_tokens<true, T>(r, state, head, first, end);
    else correct_tokens<false, T>(r, state, head, first, end);
}
