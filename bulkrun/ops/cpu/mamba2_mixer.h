// Mamba 2 as a layer's mixer (layer_stack.cpp): from normed rows to what the output projection multiplies.
#pragma once

#include <vector>

#include "block_products.h"
#include "causal_conv.h"
#include "layer_stack.h"
#include "state_space.h"

struct Mamba2Layer {
    Matrix in_proj;                       // the norm's gates z, what is convolved, a step for each head
    const void *conv, *conv_bias, *norm;  // [W, C], [C] or null, and [H P]
    const float *a_log, *dt_bias, *d;     // [H]
    void* conv_state;                     // [R, W - 1, C]
    float* matrix_state;                  // [R, H, N, P]
    int64_t num_heads, num_groups, size, value_size, num_taps;

    long inner_dim() const { return num_heads * value_size; }  // a multiple of PAD
    long conv_dim() const { return inner_dim() + 2 * num_groups * size; }
    long columns() const { return inner_dim() + conv_dim() + num_heads; }
};

template <class T>
struct Mamba2Mixer : BlockProducts<T> {
    using W = typename WordOf<T>::type;
    const Stack& s;

    Mamba2Mixer(const Stack& s, const BlockProducts<T>& products) : BlockProducts<T>(products), s(s) {}

    void begin(const Mamba2Layer& layer, const T* x, const Block& block) const {
        const long columns = layer.columns();
        T* projected = (T*)s.projected + block.first * columns;
        this->multiply(x, s.x_stride(), layer.in_proj, projected, columns, block, AsItIs());
    }

    // Brings the sequences' states up to this step's last tokens: in the last layer too each token counts.
    void mix(const Mamba2Layer& layer, bool, char*) const {
        convolve<T>(convolution_of(layer));
        const StateSpace space = space_of(layer);
        carry_heads(space, [&](float* state, long head, long first, long end) {
            advance_head<T>(space, state, head, first, end);
        });
        norm_tokens(layer);
    }

    Mixed<T> mixed(const Mamba2Layer& layer) const { return {(T*)s.corrected, layer.inner_dim()}; }

  private:
    Convolution convolution_of(const Mamba2Layer& layer) const {
        return {(const T*)s.projected + layer.inner_dim(), layer.conv, layer.conv_bias, layer.conv_state, s.convolved,
                s.rows, s.cu_seqlens_q, s.context_lens, layer.columns(), layer.conv_dim(), layer.num_taps, s.num_seqs,
                s.num_tokens, 1, s.num_threads};
    }

    StateSpace space_of(const Mamba2Layer& layer) const {
        const T* steps = (const T*)s.projected + layer.inner_dim() + layer.conv_dim();
        return {s.convolved, steps, layer.a_log, layer.dt_bias, layer.d, layer.matrix_state, s.corrected, s.rows,
                s.cu_seqlens_q, s.context_lens, layer.conv_dim(), layer.columns(), layer.num_heads, layer.num_groups,
                layer.size, layer.value_size, s.num_seqs, s.num_tokens, s.num_threads};
    }

    // Heads of a group are normed as one, so all of them must be there.
    void norm_tokens(const Mamba2Layer& layer) const {
        const long group = layer.inner_dim() / layer.num_groups;
        std::vector<float> gated(group);
#pragma omp for
        for (long token = 0; token < s.num_tokens; token++)
            for (long at = 0; at < layer.inner_dim(); at += group) {
                T* row = (T*)s.corrected + token * layer.inner_dim() + at;
                const T* gates = (const T*)s.projected + token * layer.columns() + at;
                gate_norm_row(row, gates, (const T*)layer.norm + at, row, gated.data(), group, s.eps);
            }
    }
};
