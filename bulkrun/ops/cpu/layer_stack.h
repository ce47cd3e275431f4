// What a decoder's step is given as: its layers, and the memory that they work in. Mirror: layer_stack.py.
#pragma once

#include "matrix.h"
#include "panel_matrix.h"

constexpr int PAD = 32;  // numbers

// A mixer is what brings the tokens of a sequence together: attention, or what stands in its place.
enum MixerKind { ATTENTION, DELTA_NET, SHORT_CONV, MAMBA2, MAMBA };

struct Layer {
    const void* mixer;  // an AttentionLayer or whatever its kind has
    int64_t mixer_kind;
    Matrix o, gate_up, down;                    // gate_up: ups alone, where MLPs have no gates; no panels: no MLP
    const void *input_norm, *mlp_norm;          // before mixer and MLP; null: none
    const void *mixer_out_norm, *mlp_out_norm;  // of what they add to the residual stream; null: none
    const void *input_bias, *mlp_bias;          // of layer norms before mixer and MLP; null: none
    Matrix input_gate, input_out;               // of what the layer is told of each token anew; no panels: nothing
    const void* input_out_norm;
    int64_t intermediate_size;
    float scale;         // of the residual stream behind it
    float above, below;  // of Xielu
};

struct Rotary {
    const void *cos, *sin;
    int64_t dim;
};

struct Stack {
    const Layer* layers;
    const Rotary* rotaries;
    const void *last_norm, *last_bias;
    const void* inputs;                                // [layers, T, input_size], or null
    void *residual, *hidden;                           // [T, E]: the embeddings, changed in place; what comes out
    void *q, *attended;                                // scratch: a row per token
    void *projected, *narrow, *convolved, *corrected;  // the same: what mixers read once it is there for all tokens
    void *x, *qkv, *out, *gated, *steps;               // scratch: THREAD_ROWS per thread; what is multiplied is padded
    void *bytes, *row_scales;                          // the same, of what is multiplied where weights are bytes
    const int64_t *slots, *rows, *kv_copies, *kept;    // kv_copies: [2, num_copies]; kept: null for all tokens
    const int32_t *block_tables, *context_lens, *cu_seqlens_q;
    int64_t num_layers, num_tokens, num_seqs, table_width, num_copies, num_kept;
    int64_t hidden_size, num_heads, head_dim, input_size, block_size;  // head_dim: of the widest heads
    int64_t widest;                                                    // numbers in the longest row that is multiplied
    int64_t widest_gated;  // the same of gates': threads are in blocks of different widths at a time
    int64_t last_full;  // the last layer that makes keys, or a state, of all tokens
    float eps, scale, soft_cap, residual_multiplier;
    int32_t activation;       // see layer_stack.cpp
    int32_t is_layer_norm;    // 0: norms are of root mean squares
    int32_t is_beside;        // MLPs take what mixers take, behind their own norm, and what both give is added up
    int32_t has_mlp_gates;
    int32_t gates_attention;  // its queries come behind gates of what it gives
    int32_t sees_later;       // see paged_attention.h
    int32_t cache_format;     // a CacheFormat
    int32_t num_threads;

    long x_stride() const { return round_up(hidden_size, PAD); }
};

// What a mixer gives, a row per token.
template <class T>
struct Mixed {
    T* rows;
    long stride;
};
