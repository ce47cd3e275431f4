// Every layer of a decoder over a few tokens, in one call and one parallel region. Contract: layer_stack.py.
//
// Threads go through the phases of a layer together and share each one's columns, rows or sequences. Values are rounded
// where the ops of the same names round them.

#include <cstdlib>

#include "norm_rotary_store.h"
#include "paged_attention.h"
#include "panels.h"
#include "row_ops.h"

struct Layer {
    Matrix qkv, o, gate_up, down;
    const void *input_norm, *mlp_norm, *qk_norm;  // qk_norm: null where heads are not normalized
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
    void *x, *qkv, *q, *attended, *out, *gated;      // scratch; rows of what is multiplied padded with zeros
    const int64_t *slots, *kv_copies;                // kv_copies: [2, num_copies]
    const int32_t *block_tables, *context_lens, *cu_seqlens_q;
    int64_t num_layers, num_tokens, num_seqs, table_width, num_copies;
    int64_t hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, block_size;
    float eps, scale, soft_cap, residual_multiplier;
    int32_t is_gelu, num_threads;
};

constexpr int PAD = 32;  // numbers

template <class T, class N>
struct LayerStack {
    using W = typename WordOf<T>::type;
    const Stack& s;
    const long size, width, x_stride, attended_stride, gated_stride;
    std::vector<Item> items;

    explicit LayerStack(const Stack& s)
        : s(s),
          size(s.hidden_size),
          width(s.num_heads * s.head_dim),
          x_stride(round_up(size, PAD)),
          attended_stride(round_up(width, PAD)),
          gated_stride(round_up(s.intermediate_size, PAD)),
          items(items_of(step_of(s.layers[0]))) {}

    void run() const {
#pragma omp parallel num_threads(s.num_threads)
        {
            char* memory = (char*)aligned_alloc(64, round_up(Rows<W>::bytes(s.head_dim), 64));
            const Rows<W> rows(memory, s.head_dim);
            const TileSetup tiles;
            first_norm();
            for (long i = 0; i < s.num_layers; i++) {
                const bool is_last = i + 1 == s.num_layers;
                run_attention(s.layers[i], rows);
                add_norm(s.layers[i].mlp_norm, s.x, x_stride);
                if (s.is_gelu) run_mlp<GeluTanh>(s.layers[i]);
                else run_mlp<Silu>(s.layers[i]);
                add_norm(is_last ? s.last_norm : s.layers[i + 1].input_norm, is_last ? s.hidden : s.x,
                         is_last ? size : x_stride);
            }
            free(memory);
        }
    }

  private:
    Step step_of(const Layer& layer) const {
        return {s.q, layer.k_cache, layer.v_cache, s.attended, s.block_tables, s.context_lens, s.cu_seqlens_q,
                s.num_heads * s.head_dim, round_up(s.num_heads * s.head_dim, PAD), s.num_tokens, s.num_seqs,
                s.table_width, s.num_heads, s.num_kv_heads, s.head_dim, s.block_size, layer.window, s.scale,
                s.soft_cap, s.num_threads};
    }

    Projection projection_of(const Layer& layer) const {
        const Rotary none = {}, &rotary = layer.rotary < 0 ? none : s.rotaries[layer.rotary];
        return {s.qkv, layer.qk_norm, rotary.cos, rotary.sin, s.q, layer.k_cache, layer.v_cache, s.slots,
                (s.num_heads + 2 * s.num_kv_heads) * s.head_dim, s.num_tokens, s.num_heads, s.num_kv_heads,
                s.head_dim, rotary.dim, s.eps, s.num_threads};
    }

    void first_norm() const {
#pragma omp for schedule(static)
        for (long row = 0; row < s.num_tokens; row++)
            norm_row((const T*)s.residual + row * size, (const N*)s.layers[0].input_norm, (T*)s.x + row * x_stride,
                     size, s.eps);
    }

    void add_norm(const void* weight, void* to, long stride) const {
#pragma omp for schedule(static)
        for (long row = 0; row < s.num_tokens; row++) {
            T* residual = (T*)s.residual + row * size;
            add_norm_row((const T*)s.out + row * size, residual, (const N*)weight, (T*)to + row * stride, residual,
                         size, s.eps);
        }
    }

    void run_attention(const Layer& layer, const Rows<W>& rows) const {
        project(s.x, x_stride, layer.qkv, s.qkv, (s.num_heads + 2 * s.num_kv_heads) * s.head_dim, 1.0f);
        const Projection projection = projection_of(layer);
#pragma omp for schedule(static)
        for (long token = 0; token < s.num_tokens; token++) store_token<T, N>(projection, token);
        copy_kv(layer);
        const Step step = step_of(layer);
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < items.size(); i++) Attention<T>(step, items[i], rows).run();
        project(s.attended, attended_stride, layer.o, s.out, size, s.residual_multiplier);
    }

    // Slots that others begin with, after this step's are stored and before anybody attends.
    void copy_kv(const Layer& layer) const {
        if (s.num_copies == 0) return;
        const long row = s.num_kv_heads * s.head_dim;
#pragma omp for schedule(static)
        for (long i = 0; i < s.num_copies; i++)
            for (void* cache : {layer.k_cache, layer.v_cache})
                memcpy((T*)cache + s.kv_copies[s.num_copies + i] * row, (T*)cache + s.kv_copies[i] * row,
                       row * sizeof(T));
    }

    // out [T, columns] = x times the matrix, and times a constant.
    void project(const void* x, long stride, const Matrix& matrix, void* out, long columns, float factor) const {
        multiply_panels((const T*)x, matrix, s.num_tokens, stride / W::per_word, columns,
                        [&](long row, long first, const float* sums) {
                            const long end = std::min<long>(PANEL, columns - first);
                            for (long i = 0; i < end; i += LANES) {
                                f32x16 number = biased(sums + i, (const T*)matrix.bias, first + i);
                                store((T*)out + row * columns + first + i, number * factor, end - i);
                            }
                        });
    }

    // The columns of gates and ups lie in sixteens, one after the other.
    template <class Gate>
    void run_mlp(const Layer& layer) const {
        const long inner = s.intermediate_size;
        multiply_panels((const T*)s.x, layer.gate_up, s.num_tokens, x_stride / W::per_word, 2 * round_up(inner, LANES),
                        [&](long row, long first, const float* sums) {
                            const T* bias = (const T*)layer.gate_up.bias;
                            f32x16 gate = rounded<T>(Gate()(biased(sums, bias, first)));
                            f32x16 up = biased(sums + LANES, bias, first + LANES);
                            T* out = (T*)s.gated + row * gated_stride + first / 2;
                            store(out, gate * up, inner - first / 2);
                        });
        project(s.gated, gated_stride, layer.down, s.out, size, s.residual_multiplier);
    }
};

extern "C" void layer_stack_float32_float32(const Stack* s) { LayerStack<float, float>(*s).run(); }
#ifdef __AVX512BF16__
extern "C" void layer_stack_bfloat16_float32(const Stack* s) { LayerStack<bf16, float>(*s).run(); }
extern "C" void layer_stack_bfloat16_bfloat16(const Stack* s) { LayerStack<bf16, bf16>(*s).run(); }
#endif
