// A gated delta net as a layer's mixer (layer_stack.cpp): from normed rows to what the output projection multiplies.
#pragma once

#include "block_products.h"
#include "causal_conv.h"
#include "gated_delta_rule.h"
#include "layer_stack.h"

struct DeltaNetLayer {
    Matrix qkvz, ba;               // what is convolved, and the norm's gates z; how much a token corrects and forgets
    const void *conv, *norm;       // [W, C] and [V]
    const float *a_log, *dt_bias;  // [H]
    void* conv_state;              // [R, W - 1, C]
    float* delta_state;            // [R, H, D, V]
    int64_t num_heads, num_key_heads, size, value_size, num_taps;
    float norm_eps, beta_scale;  // of keys and queries; see gated_delta_rule.py
    float out_norm_eps;

    long value_dim() const { return num_heads * value_size; }  // a multiple of PAD
    long conv_dim() const { return 2 * num_key_heads * size + value_dim(); }
    long columns() const { return conv_dim() + value_dim(); }
};

template <class T>
struct DeltaNetMixer : BlockProducts<T> {
    using W = typename WordOf<T>::type;
    const Stack& s;

    DeltaNetMixer(const Stack& s, const BlockProducts<T>& products) : BlockProducts<T>(products), s(s) {}

    void begin(const DeltaNetLayer& layer, const T* x, const Block& block) const {
        project(x, layer.qkvz, (T*)s.projected, layer.columns(), block);
        project(x, layer.ba, (T*)s.narrow, 2 * layer.num_heads, block);
    }

    // Brings the sequences' states up to this step's last tokens: in the last layer too each token counts.
    void mix(const DeltaNetLayer& layer, bool, char*) const {
        convolve<T>(convolution_of(layer));
        const DeltaRule rule = rule_of(layer);
        carry_heads(rule, [&](float* state, long head, long first, long end) {
            correct_head<T>(rule, state, head, first, end);
            norm_head(layer, head, first, end);
        });
    }

    Mixed<T> mixed(const DeltaNetLayer& layer) const { return {(T*)s.corrected, layer.value_dim()}; }

  private:
    void project(const T* x, const Matrix& matrix, T* to, long columns, const Block& block) const {
        this->multiply(x, s.x_stride(), matrix, to + block.first * columns, columns, block, AsItIs());
    }

    Convolution convolution_of(const DeltaNetLayer& layer) const {
        return {s.projected, layer.conv, nullptr, layer.conv_state, s.convolved, s.rows, s.cu_seqlens_q,
                s.context_lens, layer.columns(), layer.conv_dim(), layer.num_taps, s.num_seqs, s.num_tokens, 1,
                s.num_threads};
    }

    DeltaRule rule_of(const DeltaNetLayer& layer) const {
        return {s.convolved, s.narrow, layer.a_log, layer.dt_bias, layer.delta_state, s.corrected, s.rows, s.cu_seqlens_q,
                s.context_lens, layer.conv_dim(), 2 * layer.num_heads, layer.num_heads, layer.num_key_heads,
                layer.size, layer.value_size, 1, s.num_seqs, s.num_tokens, layer.norm_eps, layer.beta_scale, s.num_threads};
    }

    // Of some tokens, while what the rule gave is in the cache.
    void norm_head(const DeltaNetLayer& layer, long head, long first, long end) const {
        const long at = head * layer.value_size;
        for (long token = first; token < end; token++) {
            const T* gates = (const T*)s.projected + token * layer.columns() + layer.conv_dim() + at;
            T* corrected = (T*)s.corrected + token * layer.value_dim() + at;
            norm_gate_row(corrected, gates, (const T*)layer.norm, corrected, layer.value_size, layer.out_norm_eps);
        }
    }
};
