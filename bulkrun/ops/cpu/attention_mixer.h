// Attention as a layer's mixer (layer_stack.cpp): from normed rows to what the output projection multiplies.
#pragma once

#include "attention_items.h"
#include "block_products.h"
#include "layer_stack.h"
#include "norm_rotary_store.h"
#include "row_ops.h"

struct AttentionLayer {
    Matrix qkv;                             // behind gates, where there are any
    const void *qk_norm, *q_norm, *k_norm;  // of each head by itself, or of all heads as one; null: none
    void *k_cache, *v_cache;
    int64_t window, rotary;  // 0: none; -1: none
};

template <class T, class N>
struct AttentionMixer : BlockProducts<T> {
    using W = typename WordOf<T>::type;
    const Stack& s;
    const long width, num_gates, columns;  // of queries; in a row of the projection; of all of it
    const std::vector<Item> items, last_items;

    AttentionMixer(const Stack& s, const BlockProducts<T>& products)
        : BlockProducts<T>(products),
          s(s),
          width(s.num_heads * s.head_dim),
          num_gates(s.gates_attention ? width : 0),
          columns(num_gates + width + 2 * s.num_kv_heads * s.head_dim),
          items(items_of(step_of({}))),
          last_items(s.kept ? items_of(step_of({}), s.kept, s.num_kept) : items) {}

    // Queries to where attention reads them, keys and values to the cache; gates stay in the projection.
    void begin(const AttentionLayer& layer, const T* x, const Block& block) const {
        T* projected = num_gates ? (T*)s.projected + block.first * columns : this->scratch(s.qkv, columns, block);
        this->multiply(x, s.x_stride(), layer.qkv, projected, columns, block, AsItIs());
        T* qkv = projected + num_gates;
        const Rotary none = {}, &rotary = layer.rotary < 0 ? none : s.rotaries[layer.rotary];
        const Projection projection = {
            qkv - block.first * columns, layer.qk_norm, rotary.cos, rotary.sin, s.q, layer.k_cache, layer.v_cache,
            s.slots, columns, s.num_tokens, s.num_heads, s.num_kv_heads, s.head_dim, rotary.dim, s.eps,
            0, s.has_fp8_cache, s.num_threads};
        for (long row = block.share.begin(block.rows); row < block.share.end(block.rows); row++) {
            if (layer.q_norm) norm_projection(layer, qkv + row * columns);
            store_token<T, N>(projection, block.first + row);
        }
    }

    void mix(const AttentionLayer& layer, bool is_last, const Rows<W>& rows) const {
        copy_kv(layer);
        attend_items<T>(step_of(layer), is_last ? last_items : items, rows, [&](const Item& item) {
            if (num_gates) gate(item);
        });
    }

    Mixed<T> mixed(const AttentionLayer&) const { return {(T*)s.attended, round_up(width, PAD)}; }

  private:
    Step step_of(const AttentionLayer& layer) const {
        return {s.q, layer.k_cache, layer.v_cache, s.attended, s.block_tables, s.context_lens, s.cu_seqlens_q,
                nullptr, nullptr, width, round_up(width, PAD), s.num_tokens, s.num_seqs, s.table_width, s.num_heads,
                s.num_kv_heads, s.head_dim, s.block_size, layer.window, 0, s.scale, s.soft_cap, s.has_fp8_cache,
                s.sees_later, s.num_threads};
    }

    // All queries of a token as one vector, all its keys as another.
    void norm_projection(const AttentionLayer& layer, T* qkv) const {
        T* keys = qkv + width;
        norm_row(qkv, (const N*)layer.q_norm, qkv, width, s.eps);
        norm_row(keys, (const N*)layer.k_norm, keys, s.num_kv_heads * s.head_dim, s.eps);
    }

    // Slots that others begin with, after this step's are stored and before anybody attends.
    void copy_kv(const AttentionLayer& layer) const {
        if (s.num_copies == 0) return;
        const long row = s.num_kv_heads * s.head_dim * (s.has_fp8_cache ? sizeof(fp8) : sizeof(T));
#pragma omp for schedule(static)
        for (long i = 0; i < s.num_copies; i++)
            for (void* cache : {layer.k_cache, layer.v_cache})
                memcpy((char*)cache + s.kv_copies[s.num_copies + i] * row, (char*)cache + s.kv_copies[i] * row, row);
    }

    // What was found for an item's queries and heads.
    void gate(const Item& item) const {
        const long head_width = s.num_heads / s.num_kv_heads * s.head_dim;
        const long first = item.kv_head * head_width, size = item.num_kv_heads * head_width;
        const long token = s.cu_seqlens_q[item.seq] + item.first_query;
        for (long query = token; query < token + item.num_queries; query++) {
            const T* gates = (const T*)s.projected + query * columns + first;
            sigmoid_gate_row(gates, (T*)s.attended + query * round_up(width, PAD) + first, size);
        }
    }
};
