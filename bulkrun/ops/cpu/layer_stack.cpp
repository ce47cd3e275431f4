// Every layer of a decoder over a step, in one call (layer_loop.h). Contract: layer_stack.py. Values are rounded where the
// ops of the same names round them.
//
// A layer begins with its mixer, which has a file of its own: block by block it projects the normed rows (`begin`), then
// all threads together mix the tokens of all blocks (`mix`), and the output projection multiplies what that gives
// (`mixed`). The product is added to the residual stream; so is, after another norm, what the MLP makes of it. Of some
// models the MLP stands beside the mixer, and takes what that took; some layers have none.

#include "attention_mixer.h"
#include "delta_net_mixer.h"
#include "gated.h"
#include "layer_loop.h"
#include "mamba2_mixer.h"
#include "mamba_mixer.h"
#include "short_conv_mixer.h"
#include "struct_layout.h"

enum Activation { SILU, GELU_TANH, GELU, RELU2, XIELU };

struct Norm {
    const void *weight, *bias;  // null: none
};

template <class T, class N>
struct LayerStack : BlockProducts<T> {
    using W = typename WordOf<T>::type;
    const Stack& s;
    const TimesFactor<T> to_residual;
    const long size, x_stride;
    const AttentionMixer<T, N> attention;
    const DeltaNetMixer<T> delta_net;
    const ShortConvMixer<T> short_conv;
    const Mamba2Mixer<T> mamba2;
    const MambaMixer<T, N> mamba;

    explicit LayerStack(const Stack& s)
        : BlockProducts<T>{s.bytes, s.row_scales, round_up(s.widest, BYTE_PAD)},
          s(s),
          to_residual{s.residual_multiplier},
          size(s.hidden_size),
          x_stride(s.x_stride()),
          attention(s, *this),
          delta_net(s, *this),
          short_conv(s, *this),
          mamba2(s, *this),
          mamba(s, *this) {}

    void run() const { run_layers<W>(*this); }

    void up_to_mixing(long i, const Block& block) const {
        if (i == 0) first_norm(block);
        else after_mixing(i - 1, block);
        const T* x = this->scratch(s.x, x_stride, block);
        with_mixer(s.layers[i], [&](const auto& mixer, const auto& layer) { mixer.begin(layer, x, block); });
    }

    long last_full() const { return s.last_full; }

    void mix(long i, char* memory) const {
        const bool of_kept = i >= s.last_full;
        with_mixer(s.layers[i], [&](const auto& mixer, const auto& layer) { mixer.mix(layer, of_kept, memory); });
    }

    // What was found for them, and where they stood.
    void move_kept(long i) const {
        const Mixed<T> mixed = mixed_by(s.layers[i]);
        this->move_to_front(mixed.rows, mixed.stride, s.kept, s.num_kept);
        if (i == s.last_full) this->move_to_front(s.residual, size, s.kept, s.num_kept);
    }

    // Up to the norm before the next layer.
    void after_mixing(long i, const Block& block) const {
        const Layer& layer = s.layers[i];
        const bool is_last = i + 1 == s.num_layers;
        const Mixed<T> mixed = mixed_by(layer);
        T *x = this->scratch(s.x, x_stride, block), *out = this->scratch(s.out, size, block);
        this->multiply(mixed.rows + block.first * mixed.stride, mixed.stride, layer.o, out, size, block, to_residual);
        const void* out_norm = layer.mixer_out_norm;
        if (layer.down.panels) out_norm = add_mlp(layer, x, out, block);
        if (layer.input_gate.panels) out_norm = take_inputs(i, x, out, block);
        if (!is_last) return add_norm(out, out_norm, before_mixer(i + 1), x, x_stride, block, layer.scale);
        const Norm last = {s.last_norm, s.last_bias};
        add_norm(out, out_norm, last, (T*)s.hidden + block.first * size, size, block, layer.scale);
    }

  private:
    // `use(mixer, layer)` with this layer's kind of mixer, and its weights.
    template <class F>
    auto with_mixer(const Layer& layer, const F& use) const {
        switch (layer.mixer_kind) {
            case DELTA_NET: return use(delta_net, *(const DeltaNetLayer*)layer.mixer);
            case SHORT_CONV: return use(short_conv, *(const ShortConvLayer*)layer.mixer);
            case MAMBA2: return use(mamba2, *(const Mamba2Layer*)layer.mixer);
            case MAMBA: return use(mamba, *(const MambaLayer*)layer.mixer);
            default: return use(attention, *(const AttentionLayer*)layer.mixer);
        }
    }

    Mixed<T> mixed_by(const Layer& layer) const {
        return with_mixer(layer, [](const auto& mixer, const auto& layer) { return mixer.mixed(layer); });
    }

    void first_norm(const Block& block) const {
        T* x = this->scratch(s.x, x_stride, block);
        for (long row = block.share.begin(block.rows); row < block.share.end(block.rows); row++) {
            const T* residual = (const T*)s.residual + (block.first + row) * size;
            norm_or_copy(residual, before_mixer(0), x + row * x_stride);
        }
        this->meet(block);
    }

    Norm before_mixer(long i) const { return {s.layers[i].input_norm, s.layers[i].input_bias}; }

    void norm_or_copy(const T* from, const Norm& by, T* to) const {
        if (by.weight) norm(from, by, to);
        else memcpy(to, from, size * sizeof(T));
    }

    void norm(const T* from, const Norm& by, T* to) const {
        if (s.is_layer_norm) layer_norm_row(from, (const N*)by.weight, (const N*)by.bias, to, size, s.eps);
        else norm_row(from, (const N*)by.weight, to, size, s.eps);
    }

    // To the residual stream what is added, and the norm of their sum to `to`; of layer norms it is not scaled.
    void add_and_norm(const T* added, T* residual, const Norm& by, T* to, float scale) const {
        if (!s.is_layer_norm)
            return add_norm_row(added, residual, (const N*)by.weight, to, residual, size, s.eps, scale);
        add_row(added, residual, to, size);
        norm(residual, by, to);
    }

    // To the residual stream comes what a block has computed, with a norm of its own if there is one.
    void add_norm(T* out, const void* out_norm, const Norm& by, T* to, long stride, const Block& block,
                  float scale = 1.0f) const {
        for (long row = block.share.begin(block.rows); row < block.share.end(block.rows); row++) {
            T *added = out + row * size, *residual = (T*)s.residual + (block.first + row) * size;
            if (out_norm) norm(added, {out_norm, nullptr}, added);
            if (by.weight) add_and_norm(added, residual, by, to + row * stride, scale);
            else add_row(added, residual, to + row * stride, size);
        }
        this->meet(block);
    }

    // What the mixer found to the residual stream, and to `out` what the MLP makes of that; returns the norm behind it.
    const void* add_mlp(const Layer& layer, T* x, T* out, const Block& block) const {
        const Norm before = {layer.mlp_norm, layer.mlp_bias};
        if (s.is_beside) add_beside(out, before, x, block);
        else add_norm(out, layer.mixer_out_norm, before, x, x_stride, block);
        run_mlp(layer, x, out, block);
        return layer.mlp_out_norm;
    }

    // To the residual stream comes what the mixer found; to `x` the norm of what it was before, once more.
    void add_beside(T* out, const Norm& by, T* x, const Block& block) const {
        for (long row = block.share.begin(block.rows); row < block.share.end(block.rows); row++) {
            T *found = out + row * size, *residual = (T*)s.residual + (block.first + row) * size;
            norm(residual, by, x + row * x_stride);
            add_row(found, residual, found, size);
        }
        this->meet(block);
    }

    // The MLP's part to the residual stream, and to `out` what the layer's inputs make of that; returns the norm behind it.
    const void* take_inputs(long i, T* x, T* out, const Block& block) const {
        const Layer& layer = s.layers[i];
        const long width = s.input_size;
        add_norm(out, layer.mlp_out_norm, {nullptr, nullptr}, x, x_stride, block);
        T* gated = this->scratch(s.gated, s.widest_gated, block);
        this->multiply(x, x_stride, layer.input_gate, gated, width, block, AsItIs());
        for (long row = block.share.begin(block.rows); row < block.share.end(block.rows); row++) {
            const long token = block.first + row, place = s.kept && i >= s.last_full ? s.kept[token] : token;
            const T* input = (const T*)s.inputs + (i * s.num_tokens + place) * width;
            for (T* gate = gated + row * width; gate < gated + (row + 1) * width; gate += LANES, input += LANES)
                store(gate, GateTimesUp<T, GeluTanh<T>>()(load(gate), load(input)));
        }
        this->meet(block);
        this->multiply(gated, width, layer.input_out, out, size, block, to_residual);
        return layer.input_out_norm;
    }

    void run_mlp(const Layer& layer, const T* x, T* out, const Block& block) const {
        if (!s.has_mlp_gates) return run_plain(layer, x, out, block);
        switch (s.activation) {
            case SILU: return run_gated<Silu<T>>(layer, x, out, block);
            case GELU_TANH: return run_gated<GeluTanh<T>>(layer, x, out, block);
            default: return run_gated<Gelu<T>>(layer, x, out, block);
        }
    }

    // Without gates; its width is whole words.
    void run_plain(const Layer& layer, const T* x, T* out, const Block& block) const {
        switch (s.activation) {
            case GELU_TANH: return run_plain(layer, x, out, block, GeluTanh<T>());
            case GELU: return run_plain(layer, x, out, block, Gelu<T>());
            case RELU2: return run_plain(layer, x, out, block, ReluSquared());
            default: return run_plain(layer, x, out, block, Xielu{layer.above, layer.below});
        }
    }

    template <class Activation>
    void run_plain(const Layer& layer, const T* x, T* out, const Block& block, const Activation& activation) const {
        const long width = layer.intermediate_size;
        T* up = this->scratch(s.gated, s.widest_gated, block);
        this->multiply(x, x_stride, layer.gate_up, up, width, block, [&](f32x16 v) { return activation(rounded<T>(v)); });
        this->multiply(up, width, layer.down, out, size, block, to_residual);
    }

    template <class Gate>
    void run_gated(const Layer& layer, const T* x, T* out, const Block& block) const {
        const long gated_stride = round_up(layer.intermediate_size, PAD);
        T* gated = this->scratch(s.gated, s.widest_gated, block);
        this->with_operand(x, x_stride, layer.gate_up, block, [&](const Operand& rows, auto words) {
            multiply_gated<decltype(words)>(rows, layer.gate_up, gated, gated_stride, block.rows, layer.intermediate_size,
                                            block.share, GateTimesUp<T, Gate>());
        });
        this->meet(block);
        this->multiply(gated, gated_stride, layer.down, out, size, block, to_residual);
    }
};

EXPORT_LAYOUT(Matrix, is_narrow)
EXPORT_LAYOUT(AttentionLayer, norms_values)
EXPORT_LAYOUT(DeltaNetLayer, out_norm_eps)
EXPORT_LAYOUT(ShortConvLayer, num_taps)
EXPORT_LAYOUT(Mamba2Layer, num_taps)
EXPORT_LAYOUT(MambaLayer, norm_eps)
EXPORT_LAYOUT(Layer, below)
EXPORT_LAYOUT(Rotary, dim)
EXPORT_LAYOUT(Stack, num_threads)
extern "C" void layer_stack_float32_float32(const Stack* s) { LayerStack<float, float>(*s).run(); }
#ifdef __AVX512BF16__
extern "C" void layer_stack_bfloat16_float32(const Stack* s) { LayerStack<bf16, float>(*s).run(); }
extern "C" void layer_stack_bfloat16_bfloat16(const Stack* s) { LayerStack<bf16, bf16>(*s).run(); }
#endif
