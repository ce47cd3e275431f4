// Attention over the paged KV cache as an op. Contract: ops/attention/paged_attention.py.

#include "attention_items.h"
#include "struct_layout.h"

#include <cstdlib>

template <class T>
void attend_item(const Step& step, const std::vector<Item>& items, size_t index,
                 const Rows<typename WordOf<T>::type>& rows) {
    const size_t next = index + step.num_threads;
    const Item* following = next < items.size() ? &items[next] : nullptr;
    with_cache<T>(step.cache_format, [&](auto number) {
        Attention<T, decltype(number)>(step, items[index], following, rows).run();
    });
}

template void attend_item<float>(const Step&, const std::vector<Item>&, size_t, const Rows<WordOf<float>::type>&);
template void attend_item<bf16>(const Step&, const std::vector<Item>&, size_t, const Rows<WordOf<bf16>::type>&);

template <class T>
static void attend(const Step& step) {
    using W = typename WordOf<T>::type;
    const std::vector<Item> items = items_of(step);
    const long owned = step.cu_seqlens_q[step.num_seqs], row = step.num_heads * step.value_dim;
    memset((T*)step.out + owned * row, 0, (step.num_tokens - owned) * row * sizeof(T));
#pragma omp parallel num_threads(step.num_threads) if (items.size() > 1)
    {
        char* memory = (char*)aligned_alloc(64, round_up(Rows<W>::bytes(step.head_dim), 64));
        Rows<W> rows(memory, step.head_dim, step.value_dim);
        const TileSetup tiles;
        attend_items<T>(step, items, rows);
        free(memory);
    }
}

EXPORT_LAYOUT(Step, num_threads)
extern "C" int64_t max_heads_per_kv_head() { return MAX_ROWS; }
extern "C" void paged_attention_float32(const Step* step) { attend<float>(*step); }
extern "C" void paged_attention_bfloat16(const Step* step) { attend<bf16>(*step); }
