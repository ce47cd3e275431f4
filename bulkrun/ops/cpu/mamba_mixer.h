// Mamba, the first kind, as a layer's mixer (layer_stack.cpp): from normed rows to what the output projection multiplies.
#pragma once

#include "block_products.h"
#include "causal_conv.h"
#include "layer_stack.h"
#include "selective_scan.h"

struct MambaLayer {
    Matrix in_proj, x_proj, dt_proj;        // the first: what is convolved, and its gates; then see `find_steps`
    const void *conv, *conv_bias;           // [W, C], and [C] or null
    const void *dt_norm, *b_norm, *c_norm;  // [step_rank], [N] and [N]; null: none
    const float *rate, *dt_bias, *d;        // [N, C], [C] and [C]
    void* conv_state;                       // [R, W - 1, C]
    float* matrix_state;                    // [R, H, N, P], of P channels each
    int64_t num_heads, size, value_size, step_rank, num_taps;
    float norm_eps;

    long inner_dim() const { return num_heads * value_size; }  // C, a multiple of PAD
    long columns() const { return 2 * inner_dim(); }
    long narrow_columns() const { return step_rank + 2 * size; }
    long step_stride() const { return round_up(step_rank, PAD); }
};

template <class T, class N>
struct MambaMixer : BlockProducts<T> {
    using W = typename WordOf<T>::type;
    const Stack& s;

    MambaMixer(const Stack& s, const BlockProducts<T>& products) : BlockProducts<T>(products), s(s) {}

    void begin(const MambaLayer& layer, const T* x, const Block& block) const {
        const long columns = layer.columns();
        T* projected = (T*)s.projected + block.first * columns;
        this->multiply(x, s.x_stride(), layer.in_proj, projected, columns, block, AsItIs());
    }

    // Brings the sequences' states up to this step's last tokens: in the last layer too each token counts.
    void mix(const MambaLayer& layer, bool, char*) const {
        convolve<T>(convolution_of(layer));
        for (const Block& block : blocks_of(s.num_tokens)) find_steps(layer, block);
#pragma omp barrier
        const SelectiveScan scan = scan_of(layer);
        carry_heads(scan, [&](float* state, long head, long first, long end) {
            scan_head<T>(scan, state, head, first, end);
        });
    }

    Mixed<T> mixed(const MambaLayer& layer) const { return {(T*)s.corrected, layer.inner_dim()}; }

  private:
    Convolution convolution_of(const MambaLayer& layer) const {
        return {s.projected, layer.conv, layer.conv_bias, layer.conv_state, s.convolved, s.rows, s.cu_seqlens_q,
                s.context_lens, layer.columns(), layer.inner_dim(), layer.num_taps, s.num_seqs, s.num_tokens, 1,
                s.num_threads};
    }

    // Of what was convolved: steps in short, what writes states and what reads them; of the first each channel's step.
    void find_steps(const MambaLayer& layer, const Block& block) const {
        const long channels = layer.inner_dim(), columns = layer.narrow_columns(), stride = layer.step_stride();
        const T* convolved = (const T*)s.convolved + block.first * channels;
        T *narrow = (T*)s.narrow + block.first * columns, *in_short = this->scratch(s.steps, stride, block);
        this->multiply(convolved, channels, layer.x_proj, narrow, columns, block, AsItIs());
        for (long row = block.share.begin(block.rows); row < block.share.end(block.rows); row++)
            norm_parts(layer, narrow + row * columns, in_short + row * stride);
        this->meet(block);
        T* steps = (T*)s.corrected + block.first * channels;
        this->multiply(in_short, stride, layer.dt_proj, steps, channels, block, AsItIs());
    }

    // A token's step to where it is multiplied; what writes and what reads stays where it is.
    void norm_parts(const MambaLayer& layer, T* narrow, T* in_short) const {
        if (!layer.dt_norm) {
            memcpy(in_short, narrow, layer.step_rank * sizeof(T));
            return;
        }
        T *b = narrow + layer.step_rank, *c = b + layer.size;
        norm_row(narrow, (const N*)layer.dt_norm, in_short, layer.step_rank, layer.norm_eps);
        norm_row(b, (const N*)layer.b_norm, b, layer.size, layer.norm_eps);
        norm_row(c, (const N*)layer.c_norm, c, layer.size, layer.norm_eps);
    }

    // What comes out of a channel takes the place of its step.
    SelectiveScan scan_of(const MambaLayer& layer) const {
        const long channels = layer.inner_dim(), columns = layer.narrow_columns();
        const T *b = (const T*)s.narrow + layer.step_rank, *gates = (const T*)s.projected + channels;
        return {s.convolved, s.corrected, b, b + layer.size, gates, layer.rate, layer.dt_bias, layer.d,
                layer.matrix_state, s.corrected, s.rows, s.cu_seqlens_q, s.context_lens, channels, channels, columns,
                columns, layer.columns(), layer.num_heads, layer.size, layer.value_size, s.num_seqs, s.num_tokens,
                s.num_threads};
    }
};
