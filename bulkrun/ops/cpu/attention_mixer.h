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
    int64_t num_kv_heads, head_dim;
    int32_t has_own_keys;                   // 0: there are queries alone, and caches of an earlier layer
    int32_t keys_are_values, norms_values;  // see norm_rotary_store.h
};

// Work items over a step, and over its kept tokens, of layers with so many key heads.
struct ItemLists {
    long num_kv_heads;
    std::vector<Item> all, kept;
};

template <class T, class N>
struct AttentionMixer : BlockProducts<T> {
    using W = typename WordOf<T>::type;
    const Stack& s;
    std::vector<ItemLists> lists;

    AttentionMixer(const Stack& s, const BlockProducts<T>& products) : BlockProducts<T>(products), s(s) {
        for (long i = 0; i < s.num_layers; i++) {
            if (s.layers[i].mixer_kind != ATTENTION) continue;
            const AttentionLayer& layer = *(const AttentionLayer*)s.layers[i].mixer;
            if (find(layer)) continue;
            const Step step = step_of(layer);
            lists.push_back({layer.num_kv_heads, items_of(step), {}});
            if (s.kept) lists.back().kept = items_of(step, s.kept, s.num_kept);
        }
    }

    // Queries to where attention reads them, keys and values to the cache; gates stay in the projection.
    void begin(const AttentionLayer& layer, const T* x, const Block& block) const {
        const long width = width_of(layer), num_gates = s.gates_attention ? width : 0, columns = columns_of(layer);
        T* projected = num_gates ? (T*)s.projected + block.first * columns : this->scratch(s.qkv, columns, block);
        this->multiply(x, s.x_stride(), layer.qkv, projected, columns, block, AsItIs());
        T* qkv = projected + num_gates;
        const Rotary none = {}, &rotary = layer.rotary < 0 ? none : s.rotaries[layer.rotary];
        const Projection projection = {
            qkv - block.first * columns, layer.qk_norm, rotary.cos, rotary.sin, s.q, layer.k_cache, layer.v_cache,
            s.slots, columns, s.num_tokens, s.num_heads, layer.has_own_keys ? layer.num_kv_heads : 0, layer.head_dim,
            rotary.dim, s.eps, layer.norms_values, layer.keys_are_values, s.cache_format, s.num_threads};
        for (long row = block.share.begin(block.rows); row < block.share.end(block.rows); row++) {
            if (layer.q_norm) norm_projection(layer, qkv + row * columns);
            const long token = block.first + row;
            store_token<T, N>(projection, token, s.kept && !layer.has_own_keys ? s.kept[token] : token);
        }
    }

    void mix(const AttentionLayer& layer, bool of_kept, char* memory) const {
        copy_kv(layer);
        const ItemLists& items = *find(layer);
        const Rows<W> rows(memory, layer.head_dim, layer.head_dim);
        attend_items<T>(step_of(layer), of_kept && s.kept ? items.kept : items.all, rows, [&](const Item& item) {
            if (s.gates_attention) gate(layer, item);
        });
    }

    Mixed<T> mixed(const AttentionLayer& layer) const { return {(T*)s.attended, round_up(width_of(layer), PAD)}; }

  private:
    const ItemLists* find(const AttentionLayer& layer) const {
        for (const ItemLists& one : lists)
            if (one.num_kv_heads == layer.num_kv_heads) return &one;
        return nullptr;
    }

    // Of queries, in a row of the projection, and of all of it.
    long width_of(const AttentionLayer& layer) const { return s.num_heads * layer.head_dim; }
    long columns_of(const AttentionLayer& layer) const {
        const long kinds = layer.keys_are_values ? 1 : 2, own = layer.has_own_keys ? kinds * layer.num_kv_heads : 0;
        return width_of(layer) * (s.gates_attention ? 2 : 1) + own * layer.head_dim;
    }

    Step step_of(const AttentionLayer& layer) const {
        const long width = width_of(layer);
        return {s.q, layer.k_cache, layer.v_cache, s.attended, s.block_tables, s.context_lens, s.cu_seqlens_q,
                nullptr, nullptr, width, round_up(width, PAD), s.num_tokens, s.num_seqs, s.table_width, s.num_heads,
                layer.num_kv_heads, layer.head_dim, s.block_size, layer.head_dim, layer.window, 0, s.scale, s.soft_cap,
                s.cache_format, s.sees_later, s.num_threads};
    }

    // All queries of a token as one vector, all its keys as another.
    void norm_projection(const AttentionLayer& layer, T* qkv) const {
        const long width = width_of(layer);
        T* keys = qkv + width;
        norm_row(qkv, (const N*)layer.q_norm, qkv, width, s.eps);
        norm_row(keys, (const N*)layer.k_norm, keys, layer.num_kv_heads * layer.head_dim, s.eps);
    }

    // Slots that others begin with, after this step's are stored and before anybody attends.
    void copy_kv(const AttentionLayer& layer) const {
        if (s.num_copies == 0 || !layer.has_own_keys) return;
        const long number = with_cache<T>(s.cache_format, [](auto number) { return sizeof number; });
        const long row = layer.num_kv_heads * layer.head_dim * number;
#pragma omp for schedule(static)
        for (long i = 0; i < s.num_copies; i++)
            for (void* cache : {layer.k_cache, layer.v_cache})
                memcpy((char*)cache + s.kv_copies[s.num_copies + i] * row, (char*)cache + s.kv_copies[i] * row, row);
    }

    // What was found for an item's queries and heads.
    void gate(const AttentionLayer& layer, const Item& item) const {
        const long width = width_of(layer), columns = columns_of(layer);
        const long head_width = s.num_heads / layer.num_kv_heads * layer.head_dim;
        const long first = item.kv_head * head_width, size = item.num_kv_heads * head_width;
        const long token = s.cu_seqlens_q[item.seq] + item.first_query;
        for (long query = token; query < token + item.num_queries; query++) {
            const T* gates = (const T*)s.projected + query * columns + first;
            sigmoid_gate_row(gates, (T*)s.attended + query * round_up(width, PAD) + first, size);
        }
    }
};
