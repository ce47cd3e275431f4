// A gated short convolution as a layer's mixer (layer_stack.cpp): from normed rows to what the output projection multiplies.
#pragma once

#include "block_products.h"
#include "causal_conv.h"
#include "layer_stack.h"

struct ShortConvLayer {
    Matrix in_proj;                // gates before the convolution, gates after it, what is convolved
    const void *conv, *conv_bias;  // [W, E], and [E] or null
    void* conv_state;              // [R, W - 1, E]
    int64_t num_taps;
};

template <class T>
struct ShortConvMixer : BlockProducts<T> {
    using W = typename WordOf<T>::type;
    const Stack& s;
    const long size, columns;  // size: a multiple of PAD

    ShortConvMixer(const Stack& s, const BlockProducts<T>& products)
        : BlockProducts<T>(products), s(s), size(s.hidden_size), columns(3 * size) {}

    void begin(const ShortConvLayer& layer, const T* x, const Block& block) const {
        T* projected = (T*)s.projected + block.first * columns;
        this->multiply(x, s.x_stride(), layer.in_proj, projected, columns, block, AsItIs());
    }

    // Brings the sequences' states up to this step's last tokens: in the last layer too each token counts.
    void mix(const ShortConvLayer& layer, bool, char*) const {
        T *projected = (T*)s.projected, *inputs = projected + 2 * size;
        gate(projected, inputs, columns);
        convolve<T>({inputs, layer.conv, layer.conv_bias, layer.conv_state, s.convolved, s.rows, s.cu_seqlens_q,
                     s.context_lens, columns, size, layer.num_taps, s.num_seqs, s.num_tokens, 0, s.num_threads});
        gate(projected + size, (T*)s.convolved, size);
    }

    Mixed<T> mixed(const ShortConvLayer&) const { return {(T*)s.convolved, size}; }

  private:
    // Rows times their gates, in place.
    void gate(const T* gates, T* rows, long stride) const {
#pragma omp for
        for (long token = 0; token < s.num_tokens; token++)
            for (long i = 0; i < size; i += LANES) {
                T* here = rows + token * stride + i;
                store(here, load(here) * load(gates + token * columns + i));
            }
    }
};
