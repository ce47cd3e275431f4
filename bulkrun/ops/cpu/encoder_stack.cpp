// Every layer of an encoder over a step's texts, in one call (layer_loop.h). Contract: encoder_stack.py.
//
// Each token sees its whole text. Norms come after what is added, so what goes into a product is the residual stream
// itself. Values are rounded where the reference rounds them.

#include "layer_loop.h"
#include "norm_rotary_store.h"
#include "row_ops.h"
#include "struct_layout.h"

struct EncoderLayer {
    Matrix qkv, o, up, down;
    const void *attention_norm, *attention_norm_bias, *mlp_norm, *mlp_norm_bias;
};

struct EncoderStack {
    const EncoderLayer* layers;
    const float* distance_bias;       // see paged_attention.h
    void *x;                          // [T, E], with room for whole sixteens of rows: embeddings, then what comes out
    void *k_cache, *v_cache;          // of one layer: each has read its own when the next one writes
    void *q, *attended;               // scratch: a row per token
    void *qkv, *out, *up;             // scratch: THREAD_ROWS per thread
    void *bytes, *row_scales;         // the same, of what is multiplied where weights are bytes
    const int64_t *slots, *kept;      // kept: null for all tokens
    const int32_t *block_tables, *context_lens, *cu_seqlens_q;
    int64_t num_layers, num_tokens, num_seqs, table_width, num_kept;
    int64_t hidden_size, intermediate_size, num_heads, head_dim, block_size, max_distance;
    float eps, scale;
    int32_t is_gelu_tanh, num_threads;
};

template <class T>
struct Encoder : BlockProducts<T> {
    using W = typename WordOf<T>::type;
    const EncoderStack& s;
    const long size, width;
    const Step step;
    const std::vector<Item> items, last_items;

    explicit Encoder(const EncoderStack& s)
        : BlockProducts<T>{s.bytes, s.row_scales,
                           round_up(std::max({s.hidden_size, s.num_heads * s.head_dim, s.intermediate_size}), BYTE_PAD)},
          s(s),
          size(s.hidden_size),
          width(s.num_heads * s.head_dim),
          step{s.q, s.k_cache, s.v_cache, s.attended, s.block_tables, s.context_lens, s.cu_seqlens_q, nullptr,
               s.distance_bias, width, width, s.num_tokens, s.num_seqs, s.table_width, s.num_heads, s.num_heads,
               s.head_dim, s.block_size, s.head_dim, 0, s.max_distance, s.scale, 0.0f, 0, 1, s.num_threads},
          items(items_of(step)),
          last_items(s.kept ? items_of(step, s.kept, s.num_kept) : items) {}

    void run() const { run_layers<W>(*this); }

    void up_to_mixing(long i, const Block& block) const {
        if (i > 0) after_mixing(i - 1, block);
        begin(s.layers[i], block);
    }

    long last_full() const { return s.num_layers - 1; }

    void mix(long i, char* memory) const {
        attend_items<T>(step, i < last_full() ? items : last_items, Rows<W>(memory, s.head_dim, s.head_dim));
    }

    void move_kept(long) const {
        this->move_to_front(s.attended, width, s.kept, s.num_kept);
        this->move_to_front(s.x, size, s.kept, s.num_kept);
    }

    void after_mixing(long i, const Block& block) const {
        const EncoderLayer& layer = s.layers[i];
        T *out = this->scratch(s.out, size, block), *up = this->scratch(s.up, s.intermediate_size, block);
        this->multiply((const T*)s.attended + block.first * width, width, layer.o, out, size, block, AsItIs());
        add_norm(out, layer.attention_norm, layer.attention_norm_bias, block);
        if (s.is_gelu_tanh) run_up<GeluTanh<T>>(layer, up, block);
        else run_up<Gelu<T>>(layer, up, block);
        this->multiply(up, s.intermediate_size, layer.down, out, size, block, AsItIs());
        add_norm(out, layer.mlp_norm, layer.mlp_norm_bias, block);
    }

  private:
    // Up to attention.
    void begin(const EncoderLayer& layer, const Block& block) const {
        const long columns = 3 * width;
        T* qkv = this->scratch(s.qkv, columns, block);
        this->multiply((T*)s.x + block.first * size, size, layer.qkv, qkv, columns, block, AsItIs());
        const Projection projection = {qkv - block.first * columns, nullptr, nullptr, nullptr, s.q, s.k_cache,
                                       s.v_cache, s.slots, columns, s.num_tokens, s.num_heads, s.num_heads, s.head_dim,
                                       0, s.eps, 0, 0, 0, s.num_threads};
        for (long row = block.share.begin(block.rows); row < block.share.end(block.rows); row++)
            store_token<T, T>(projection, block.first + row);
    }

    void add_norm(const T* out, const void* weight, const void* bias, const Block& block) const {
        for (long row = block.share.begin(block.rows); row < block.share.end(block.rows); row++) {
            T* x = (T*)s.x + (block.first + row) * size;
            add_row(out + row * size, x, x, size);
            layer_norm_row(x, (const T*)weight, (const T*)bias, x, size, s.eps);
        }
        this->meet(block);
    }

    template <class Activation>
    void run_up(const EncoderLayer& layer, T* up, const Block& block) const {
        this->multiply((const T*)s.x + block.first * size, size, layer.up, up, s.intermediate_size, block,
                       [](f32x16 number) { return Activation()(rounded<T>(number)); });
    }
};

EXPORT_LAYOUT(EncoderLayer, mlp_norm_bias)
EXPORT_LAYOUT(EncoderStack, num_threads)
#ifdef __AVX2__
extern "C" void encoder_stack_float32(const EncoderStack* s) { Encoder<float>(*s).run(); }
#endif
#ifdef __AVX512BF16__
extern "C" void encoder_stack_bfloat16(const EncoderStack* s) { Encoder<bf16>(*s).run(); }
#endif
