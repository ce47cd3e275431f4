// Every layer of a decoder over a step, in one call (layer_loop.h). Contract: layer_stack.py. Values are rounded where the
// ops of the same names round them.

#include "gated.h"
#include "layer_loop.h"
#include "norm_rotary_store.h"
#include "struct_layout.h"

struct Layer {
    Matrix qkv, o, gate_up, down;
    const void *input_norm, *mlp_norm;            // before attention and MLP; null: none
    const void *attention_out_norm, *mlp_out_norm;  // of what they add to the residual stream; null: none
    const void *qk_norm, *q_norm, *k_norm;        // of each head by itself, or of all heads as one; null: none
    void *k_cache, *v_cache;
    int64_t window, rotary;  // 0: none; -1: none
};

struct Rotary {
    const void *cos, *sin;
    int64_t dim;
};

struct Stack {
    const Layer* layers;
    const Rotary* rotaries;
    const void* last_norm;
    void *residual, *hidden;                         // [T, E]: the embeddings, changed in place; what comes out
    void *q, *attended;                              // scratch: a row per token
    void *x, *qkv, *out, *gated;                     // scratch: THREAD_ROWS per thread; what is multiplied is padded
    void *bytes, *row_scales;                        // the same, of what is multiplied where weights are bytes
    const int64_t *slots, *kv_copies, *kept;         // kv_copies: [2, num_copies]; kept: null for all tokens
    const int32_t *block_tables, *context_lens, *cu_seqlens_q;
    int64_t num_layers, num_tokens, num_seqs, table_width, num_copies, num_kept;
    int64_t hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, block_size;
    float eps, scale, soft_cap, residual_multiplier;
    int32_t activation;     // SILU, GELU_TANH or GELU
    int32_t is_layer_norm;  // 0: norms are of root mean squares
    int32_t sees_later;     // see paged_attention.h
    int32_t has_fp8_cache;  // 0: it holds what goes through the layers
    int32_t num_threads;
};

constexpr int PAD = 32;  // numbers
enum Activation { SILU, GELU_TANH, GELU };

template <class T, class N>
struct LayerStack : BlockProducts<T> {
    using W = typename WordOf<T>::type;
    const Stack& s;
    const TimesFactor<T> to_residual;
    const long size, width, x_stride, attended_stride, gated_stride;
    const std::vector<Item> items, last_items;

    explicit LayerStack(const Stack& s)
        : BlockProducts<T>{s.bytes, s.row_scales, byte_stride_of(s)},
          s(s),
          to_residual{s.residual_multiplier},
          size(s.hidden_size),
          width(s.num_heads * s.head_dim),
          x_stride(round_up(size, PAD)),
          attended_stride(round_up(width, PAD)),
          gated_stride(round_up(s.intermediate_size, PAD)),
          items(items_of(step_of(s.layers[0]))),
          last_items(s.kept ? items_of(step_of(s.layers[0]), s.kept, s.num_kept) : items) {}

    void run() const { run_layers<W>(*this); }

    void up_to_attention(long i, const Block& block) const {
        if (i == 0) first_norm(block);
        else after_attention(i - 1, block);
        begin(s.layers[i], block);
    }

    void attend(long i, const Rows<W>& rows) const {
        copy_kv(s.layers[i]);
        attend_items<T>(step_of(s.layers[i]), i + 1 < s.num_layers ? items : last_items, rows);
    }

    void move_kept() const {
        this->move_to_front(s.attended, attended_stride, s.kept, s.num_kept);
        this->move_to_front(s.residual, size, s.kept, s.num_kept);
    }

    // From attention on, up to the norm before the next layer.
    void after_attention(long i, const Block& block) const {
        const Layer& layer = s.layers[i];
        const bool is_last = i + 1 == s.num_layers;
        T *x = this->scratch(s.x, x_stride, block), *out = this->scratch(s.out, size, block);
        this->multiply((const T*)s.attended + block.first * attended_stride, attended_stride, layer.o, out, size,
                       block, to_residual);
        add_norm(out, layer.attention_out_norm, layer.mlp_norm, x, x_stride, block);
        if (s.activation == SILU) run_mlp<Silu<T>>(layer, x, out, block);
        else if (s.activation == GELU_TANH) run_mlp<GeluTanh<T>>(layer, x, out, block);
        else run_mlp<Gelu<T>>(layer, x, out, block);
        if (is_last) add_norm(out, layer.mlp_out_norm, s.last_norm, (T*)s.hidden + block.first * size, size, block);
        else add_norm(out, layer.mlp_out_norm, s.layers[i + 1].input_norm, x, x_stride, block);
    }

  private:
    static long byte_stride_of(const Stack& s) {
        const long widest = std::max({s.hidden_size, s.num_heads * s.head_dim, s.intermediate_size});
        return round_up(widest, BYTE_PAD);
    }

    Step step_of(const Layer& layer) const {
        return {s.q, layer.k_cache, layer.v_cache, s.attended, s.block_tables, s.context_lens, s.cu_seqlens_q,
                nullptr, nullptr, s.num_heads * s.head_dim, round_up(s.num_heads * s.head_dim, PAD), s.num_tokens,
                s.num_seqs, s.table_width, s.num_heads, s.num_kv_heads, s.head_dim, s.block_size, layer.window, 0,
                s.scale, s.soft_cap, s.has_fp8_cache, s.sees_later, s.num_threads};
    }

    void first_norm(const Block& block) const {
        T* x = this->scratch(s.x, x_stride, block);
        for (long row = block.share.begin(block.rows); row < block.share.end(block.rows); row++) {
            const T* residual = (const T*)s.residual + (block.first + row) * size;
            norm_or_copy(residual, s.layers[0].input_norm, x + row * x_stride);
        }
        this->meet(block);
    }

    void norm_or_copy(const T* from, const void* weight, T* to) const {
        if (weight) norm(from, weight, to);
        else memcpy(to, from, size * sizeof(T));
    }

    void norm(const T* from, const void* weight, T* to) const {
        if (s.is_layer_norm) layer_norm_row(from, (const N*)weight, (const N*)nullptr, to, size, s.eps);
        else norm_row(from, (const N*)weight, to, size, s.eps);
    }

    // To the residual stream what is added, and its norm to `to`.
    void add_and_norm(const T* added, T* residual, const void* weight, T* to) const {
        if (!s.is_layer_norm) return add_norm_row(added, residual, (const N*)weight, to, residual, size, s.eps);
        add_row(added, residual, to, size);
        norm(residual, weight, to);
    }

    // Up to attention.
    void begin(const Layer& layer, const Block& block) const {
        const long columns = (s.num_heads + 2 * s.num_kv_heads) * s.head_dim;
        T* qkv = this->scratch(s.qkv, columns, block);
        this->multiply(this->scratch(s.x, x_stride, block), x_stride, layer.qkv, qkv, columns, block, AsItIs());
        const Rotary none = {}, &rotary = layer.rotary < 0 ? none : s.rotaries[layer.rotary];
        const Projection projection = {
            qkv - block.first * columns, layer.qk_norm, rotary.cos, rotary.sin, s.q, layer.k_cache, layer.v_cache,
            s.slots, columns, s.num_tokens, s.num_heads, s.num_kv_heads, s.head_dim, rotary.dim, s.eps,
            s.has_fp8_cache, s.num_threads};
        for (long row = block.share.begin(block.rows); row < block.share.end(block.rows); row++) {
            if (layer.q_norm) norm_projection(layer, qkv + row * columns);
            store_token<T, N>(projection, block.first + row);
        }
    }

    // All queries of a token as one vector, all its keys as another.
    void norm_projection(const Layer& layer, T* qkv) const {
        T* keys = qkv + width;
        norm_row(qkv, (const N*)layer.q_norm, qkv, width, s.eps);
        norm_row(keys, (const N*)layer.k_norm, keys, s.num_kv_heads * s.head_dim, s.eps);
    }

    // Slots that others begin with, after this step's are stored and before anybody attends.
    void copy_kv(const Layer& layer) const {
        if (s.num_copies == 0) return;
        const long row = s.num_kv_heads * s.head_dim * (s.has_fp8_cache ? sizeof(fp8) : sizeof(T));
#pragma omp for schedule(static)
        for (long i = 0; i < s.num_copies; i++)
            for (void* cache : {layer.k_cache, layer.v_cache})
                memcpy((char*)cache + s.kv_copies[s.num_copies + i] * row, (char*)cache + s.kv_copies[i] * row, row);
    }

    // To the residual stream comes what a block has computed, with a norm of its own if there is one.
    void add_norm(T* out, const void* out_norm, const void* weight, T* to, long stride, const Block& block) const {
        for (long row = block.share.begin(block.rows); row < block.share.end(block.rows); row++) {
            T *added = out + row * size, *residual = (T*)s.residual + (block.first + row) * size;
            if (out_norm) norm(added, out_norm, added);
            if (weight) add_and_norm(added, residual, weight, to + row * stride);
            else add_row(added, residual, to + row * stride, size);
        }
        this->meet(block);
    }

    template <class Gate>
    void run_mlp(const Layer& layer, const T* x, T* out, const Block& block) const {
        T* gated = this->scratch(s.gated, gated_stride, block);
        this->with_operand(x, x_stride, layer.gate_up, block, [&](const Operand& rows, auto words) {
            multiply_gated<decltype(words)>(rows, layer.gate_up, gated, gated_stride, block.rows, s.intermediate_size,
                                            block.share, GateTimesUp<T, Gate>());
        });
        this->meet(block);
        this->multiply(gated, gated_stride, layer.down, out, size, block, to_residual);
    }
};

EXPORT_LAYOUT(Matrix, scale_bytes)
EXPORT_LAYOUT(Layer, rotary)
EXPORT_LAYOUT(Rotary, dim)
EXPORT_LAYOUT(Stack, num_threads)
extern "C" void layer_stack_float32_float32(const Stack* s) { LayerStack<float, float>(*s).run(); }
#ifdef __AVX512BF16__
extern "C" void layer_stack_bfloat16_float32(const Stack* s) { LayerStack<bf16, float>(*s).run(); }
extern "C" void layer_stack_bfloat16_bfloat16(const Stack* s) { LayerStack<bf16, bf16>(*s).run(); }
#endif
