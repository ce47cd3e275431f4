// The gated delta rule, token by token. Contract: ops/linear_attention/gated_delta_rule.py.
//
// Columns of a state never meet, so they are worked on some at a time, which stay in the first cache for several tokens.

#include <algorithm>
#include <cmath>

#include "struct_layout.h"
#include "vector.h"

struct DeltaRule {
    const void *qkv, *ba;  // [T, 2 K D + H V] and [T, 2 H]
    const float *a_log, *dt_bias;
    float* state;  // [R, H, D, V]
    void* out;     // [T, H, V]
    const int64_t* rows;
    const int32_t *cu_seqlens, *context_lens;
    int64_t qkv_stride, ba_stride, num_heads, num_key_heads, size, value_size, num_seqs, num_tokens;
    float norm_eps;
    int32_t num_threads;
};

EXPORT_LAYOUT(DeltaRule, num_threads)

static const long MAX_SIZE = 256;  // dimensions of a key
static const long TOKENS = 16;     // that are prepared together

extern "C" int64_t max_delta_rule_size() { return MAX_SIZE; }

struct Prepared {
    float queries[TOKENS][MAX_SIZE], keys[TOKENS][MAX_SIZE], decays[TOKENS], betas[TOKENS];
};

// A head times `factor`, brought to length 1.
template <class T>
static void scale_head(const T* head, float* out, long size, float factor, float eps) {
    f32x16 squares = {};
    for (long i = 0; i < size; i += LANES) squares += load(head + i, size - i) * load(head + i, size - i);
    const float scale = factor / std::sqrt(sum(squares) + eps);
    for (long i = 0; i < size; i += LANES) store(out + i, load(head + i, size - i) * scale, size - i);
}

template <class T>
static float as_float(const T* number) { return load(number, 1)[0]; }

static float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

// How much the state forgets, and how much of its error it corrects, at one token.
template <class T>
static void prepare(const DeltaRule& r, long token, long head, Prepared& p, long at) {
    const T *qkv = (const T*)r.qkv + token * r.qkv_stride, *ba = (const T*)r.ba + token * r.ba_stride;
    const long key_head = head / (r.num_heads / r.num_key_heads), key_dim = r.num_key_heads * r.size;
    scale_head(qkv + key_head * r.size, p.queries[at], r.size, 1 / std::sqrt((float)r.size), r.norm_eps);
    scale_head(qkv + key_dim + key_head * r.size, p.keys[at], r.size, 1.0f, r.norm_eps);
    const float step = softplus(as_float(ba + r.num_heads + head) + r.dt_bias[head]);
    p.decays[at] = std::exp(-std::exp(r.a_log[head]) * step);
    p.betas[at] = 1 / (1 + std::exp(-as_float(ba + head)));
}

// One token in 16 VECTORS columns; sums over even and odd rows are apart, or each addition would wait for the last.
template <int VECTORS, class T>
static void correct(float* state, long size, long stride, const Prepared& p, long at, const T* value, T* out) {
    const float *query = p.queries[at], *key = p.keys[at], decay = p.decays[at];
    f32x16 known[2][VECTORS] = {}, found[2][VECTORS] = {}, error[VECTORS];
    for (long d = 0; d < size; d += 2)
        for (int odd = 0; odd < 2; odd++)
            for (int v = 0; v < VECTORS; v++)
                known[odd][v] += load(state + (d + odd) * stride + v * LANES) * key[d + odd];
    for (int v = 0; v < VECTORS; v++)
        error[v] = (load(value + v * LANES) - decay * (known[0][v] + known[1][v])) * p.betas[at];
    for (long d = 0; d < size; d += 2)
        for (int odd = 0; odd < 2; odd++)
            for (int v = 0; v < VECTORS; v++) {
                float* place = state + (d + odd) * stride + v * LANES;
                const f32x16 corrected = load(place) * decay + error[v] * key[d + odd];
                store(place, corrected);
                found[odd][v] += corrected * query[d + odd];
            }
    for (int v = 0; v < VECTORS; v++) store(out + v * LANES, found[0][v] + found[1][v]);
}

// Some columns of a head's state, through all tokens that are prepared.
template <int VECTORS, class T>
static void correct_all(const DeltaRule& r, float* state, const Prepared& p, long token, long count, long head,
                        long column) {
    const long value_dim = r.num_heads * r.value_size, own = head * r.value_size + column;
    const T* value = (const T*)r.qkv + token * r.qkv_stride + 2 * r.num_key_heads * r.size + own;
    T* out = (T*)r.out + token * value_dim + own;
    for (long at = 0; at < count; at++)
        correct<VECTORS>(state + column, r.size, r.value_size, p, at, value + at * r.qkv_stride, out + at * value_dim);
}

template <class T>
static void run_head(const DeltaRule& r, long seq, long head) {
    const long first = r.cu_seqlens[seq], end = r.cu_seqlens[seq + 1];
    if (first == end) return;
    float* state = r.state + (r.rows[seq] * r.num_heads + head) * r.size * r.value_size;
    if (r.context_lens[seq] == end - first) std::fill_n(state, r.size * r.value_size, 0.0f);
    Prepared p;
    for (long token = first; token < end; token += TOKENS) {
        const long count = std::min(TOKENS, end - token);
        for (long at = 0; at < count; at++) prepare<T>(r, token + at, head, p, at);
        long column = 0;
        for (; column + 4 * LANES <= r.value_size; column += 4 * LANES)
            correct_all<4, T>(r, state, p, token, count, head, column);
        for (; column < r.value_size; column += LANES) correct_all<1, T>(r, state, p, token, count, head, column);
    }
}

template <class T>
static void run(const DeltaRule& r) {
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(r.num_threads)
    for (long seq = 0; seq < r.num_seqs; seq++)
        for (long head = 0; head < r.num_heads; head++) run_head<T>(r, seq, head);
    const long value_dim = r.num_heads * r.value_size, real = r.cu_seqlens[r.num_seqs];
    std::fill((T*)r.out + real * value_dim, (T*)r.out + r.num_tokens * value_dim, T{});
}

extern "C" void gated_delta_rule_float32(const DeltaRule* r) { run<float>(*r); }
extern "C" void gated_delta_rule_bfloat16(const DeltaRule* r) { run<bf16>(*r); }
