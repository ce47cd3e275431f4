// How attention over a step is cut into the work items that threads take.

#pragma once

#include <vector>

#include "paged_attention.h"

// Longest first, so that threads end together: late chunks of prompts, decode at the end.
inline std::vector<Item> items_of(const Step& step) {
    std::vector<Item> items;
    if (step.num_seqs == 0) return items;
    const int32_t group = step.num_heads / step.num_kv_heads, kv_heads = step.num_kv_heads;
    const int32_t per_item = std::max(1, MAX_ROWS / group);
    // key heads together where there are sequences enough for all threads
    const int32_t together = std::min<int32_t>(kv_heads, MAX_ROWS / rows_per_kv_head(group));
    const int32_t pieces = step.num_seqs == 1 ? step.num_threads : (2 * step.num_threads - 1) / step.num_seqs + 1;
    const int32_t decoding = std::min(together, (kv_heads - 1) / pieces + 1);
    for (int32_t seq = step.num_seqs - 1; seq >= 0; seq--) {
        const int32_t num_queries = step.cu_seqlens_q[seq + 1] - step.cu_seqlens_q[seq];
        const int32_t heads = num_queries == 1 ? decoding : 1;
        for (int32_t end = num_queries; end > 0; end -= per_item)
            for (int32_t head = 0; head < kv_heads; head += heads) {
                const int32_t first = std::max(0, end - per_item);
                items.push_back({seq, first, end - first, head, std::min(heads, kv_heads - head)});
            }
    }
    return items;
}
