// How attention over a step is cut into the work items that threads take.

#pragma once

#include <vector>

#include "paged_attention.h"

// How many key heads of one query go together: all that fit, where there are queries enough for all threads.
inline int32_t heads_together(const Step& step, long num_queries) {
    const int64_t together = MAX_ROWS / rows_per_kv_head(step.num_heads / step.num_kv_heads);
    const int64_t pieces = num_queries == 1 ? step.num_threads : (2 * step.num_threads - 1) / num_queries + 1;
    return std::min({step.num_kv_heads, together, (step.num_kv_heads - 1) / pieces + 1});
}

inline void add_items(std::vector<Item>& items, const Step& step, int32_t seq, int32_t first, int32_t end,
                      int32_t heads) {
    for (int32_t head = 0; head < step.num_kv_heads; head += heads)
        items.push_back({seq, first, end - first, head, std::min<int32_t>(heads, step.num_kv_heads - head)});
}

// Longest first, so that threads end together: late chunks of prompts, decode at the end.
inline std::vector<Item> items_of(const Step& step) {
    std::vector<Item> items;
    if (step.num_seqs == 0) return items;
    const int32_t per_item = std::max<int32_t>(1, MAX_ROWS / (step.num_heads / step.num_kv_heads));
    const int32_t decoding = heads_together(step, step.num_seqs);
    for (int32_t seq = step.num_seqs - 1; seq >= 0; seq--) {
        const int32_t num_queries = step.cu_seqlens_q[seq + 1] - step.cu_seqlens_q[seq];
        for (int32_t end = num_queries; end > 0; end -= per_item)
            add_items(items, step, seq, std::max(0, end - per_item), end, num_queries == 1 ? decoding : 1);
    }
    return items;
}

// Those of some tokens, in ascending order, each for itself.
inline std::vector<Item> items_of(const Step& step, const int64_t* tokens, long count) {
    std::vector<Item> items;
    const int32_t heads = count ? heads_together(step, count) : 1;
    for (int32_t seq = step.num_seqs - 1; count > 0; count--) {
        const int64_t token = tokens[count - 1];
        while (token < step.cu_seqlens_q[seq]) seq--;
        const int32_t query = token - step.cu_seqlens_q[seq];
        add_items(items, step, seq, query, query + 1, heads);
    }
    return items;
}

// One of a list whose items threads take in turn. Defined with the op (paged_attention.cpp), compiled once.
template <class T>
void attend_item(const Step& step, const std::vector<Item>& items, size_t index,
                 const Rows<typename WordOf<T>::type>& rows);

// All of them, by the threads of a parallel region; `finish(item)`: what is done with each while it is in the cache.
template <class T, class F>
inline void attend_items(const Step& step, const std::vector<Item>& items, const Rows<typename WordOf<T>::type>& rows,
                         const F& finish) {
#pragma omp for schedule(dynamic, 1)
    for (size_t i = 0; i < items.size(); i++) {
        attend_item<T>(step, items, i, rows);
        finish(items[i]);
    }
}

template <class T>
inline void attend_items(const Step& step, const std::vector<Item>& items, const Rows<typename WordOf<T>::type>& rows) {
    attend_items<T>(step, items, rows, [](const Item&) {});
}
