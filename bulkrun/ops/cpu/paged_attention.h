// Attention over the paged KV cache, read where it lies: how a thread does one work item.
//
// One work item is a few queries of one sequence and one key head, or one query and several key heads, which lie side
// by side in memory; its rows are those queries times the query heads of a key head. Keys go by in tiles at fixed
// positions (multiples of TILE); a tile is laid out for the vector unit once, then scored against all rows, with the
// online softmax of FlashAttention (Dao et al. 2022). A row's numbers depend on nothing but its own query and keys: not
// on the batch, nor on which queries are computed with it.
//
// One query's few rows are bound by how fast its keys come from memory, which answers best when lines are asked for in
// the order they lie in: half a tile goes by with all its heads before the next, and the tile unit reads keys in place.

#pragma once

#include <cfloat>

#include "attention_rows.h"
#include "cache_format.h"
#include "few_rows.h"

constexpr int HALF = TILE / 2;
constexpr float MUCH = 8;  // weights are up to 2^8: what they are rounded to knows no size

struct Step {
    const void *q, *k_cache, *v_cache;
    void* out;
    const int32_t *block_tables, *context_lens, *cu_seqlens_q;
    const float* sinks;  // of each head: a score without a value; null: none
    const float* distance_bias;  // of each head, added to a score by how far key and query are apart; null: none
    int64_t q_stride, out_stride, num_tokens, num_seqs, table_width;
    int64_t num_heads, num_kv_heads, head_dim, block_size;
    int64_t value_dim;  // of a value head; below head_dim values are the last dimensions of their keys
    int64_t window;  // a query sees those less than so many positions away; below 0: of its own chunk of so many; 0: all
    int64_t max_distance;    // of the biases, of which a head has 2 max_distance + LANES: for distance 0 in the middle
    float scale, soft_cap;  // soft_cap 0: none, as with biases
    int32_t cache_format;   // a CacheFormat
    int32_t sees_later;     // 0: a query sees its own position and those before it; else those after it too
    int32_t num_threads;
};

struct Item {
    int32_t seq, first_query, num_queries, kv_head, num_kv_heads;
};

// The positions that some query of an item sees.
struct Keys {
    long first, end;
};

// One work item over queries of T and a cache of C.
template <class T, class C>
struct Attention {
    using W = typename WordOf<T>::type;
    const Step& step;
    const Item& item;
    const Item* following;  // what this thread will likely do next: its first keys are asked for at the end; or null
    const Rows<W>& scratch;
    const long group, count;  // query heads of one key head; rows of one key head
    const long first_token, position;  // of the first query
    const Keys keys;
    const bool is_few;

    Attention(const Step& step, const Item& item, const Item* following, const Rows<W>& scratch)
        : step(step),
          item(item),
          following(following),
          scratch(scratch),
          group(step.num_heads / step.num_kv_heads),
          count(item.num_queries * group),
          first_token(step.cu_seqlens_q[item.seq] + item.first_query),
          position(step.context_lens[item.seq] - (step.cu_seqlens_q[item.seq + 1] - first_token)),
          keys{std::max(0L, first_seen(position)),
               last_seen(position + item.num_queries - 1) + 1},
          is_few(count <= LANES) {}

    void run() const {
        if (is_few) set_tiles(count);
        each_head([&](const Rows<W>& rows, long head) { begin(rows, head); });
        for (long tile = keys.first / TILE * TILE; tile < keys.end; tile += TILE) {
            const long num_keys = round_up(std::min<long>(TILE, keys.end - tile), LANES * W::per_word);
            each_part((const C*)step.k_cache, tile, num_keys, [&](const Rows<W>& rows, const Part<C>& part, long head) {
                if (reads_in_place()) score_in_place(rows, part, head);
                else score(rows, part, head);
            });
            each_head([&](const Rows<W>& rows, long head) {
                for (long row = 0; row < count; row++) weigh(rows, row, head, tile, num_keys);
            });
            each_part((const C*)step.v_cache, tile, num_keys, [&](const Rows<W>& rows, const Part<C>& part, long head) {
                add_values(rows, part, head);
            });
        }
        each_head([&](const Rows<W>& rows, long head) { finish(rows, head); });
        if (is_few) set_tiles(LANES);
    }

  private:
    // The first position that a query sees; below 0: position 0.
    long first_seen(long query) const {
        if (step.window < 0) return query - query % -step.window;
        return step.window ? query - step.window + 1 : 0;
    }

    // The last position that a query sees.
    long last_seen(long query) const {
        if (!step.sees_later) return query;
        const long last = step.context_lens[item.seq] - 1;
        return step.window ? std::min(last, query + step.window - 1) : last;
    }

    template <class F>
    void each_head(const F& use) const {
        const long per_head = is_few ? count : rows_per_kv_head(count);
        for (long i = 0; i < item.num_kv_heads; i++) use(scratch.from(i * per_head), item.kv_head + i);
    }

    // Parts of a tile of keys, or of their values, with all key heads of the item.
    template <class F>
    void each_part(const C* cache, long tile, long num_keys, const F& use) const {
        const long size = is_few ? HALF : TILE;
        for (long first = 0; first < num_keys; first += size) {
            Part<C> part = {first, std::min(size, num_keys - first)};
            find(cache, tile + first, part.count, part.at);
            find_next(cache, tile + first + part.count, part.count, part.next);
            each_head([&](const Rows<W>& rows, long head) { use(rows, part, (head - item.kv_head) * step.head_dim); });
        }
    }

    // Keys as they lie are what the tile unit multiplies from the left, if they lie there as words and sixteen of them
    // are always one block's.
    bool reads_in_place() const {
        return is_few && W::per_word == 2 && UNPACKED<W, C> == 1 && has_tiles() && step.head_dim % (2 * LANES) == 0 &&
               step.block_size % LANES == 0;
    }

    // The tile unit sums in another order, so its bits are those of all rows or of none.
    bool multiplies_few() const { return count <= FEW_ROWS && !(W::per_word == 2 && has_tiles()); }

    // Queries as rows of words, or as columns where keys are multiplied from the left.
    void begin(const Rows<W>& rows, long kv_head) const {
        const bool columns = reads_in_place();
        for (long row = 0; row < count; row++) {
            const T* q = (const T*)step.q + (first_token + row / group) * step.q_stride +
                         (kv_head * group + row % group) * step.head_dim;
            for (long word = 0; word < rows.words; word += LANES) {
                const u32x16 words = W::words(q, word, step.head_dim);
                if (columns)
                    for (int i = 0; i < LANES; i++) rows.query[(word + i) * count + row] = words[i];
                else
                    store_words(rows.query + row * rows.words + word, words);
            }
            rows.top[row] = -FLT_MAX;
            rows.total[row] = f32x16{};
        }
        memset(rows.out, 0, count * rows.width * sizeof(float));
    }

    void score_in_place(const Rows<W>& rows, const Part<C>& part, long head) const {
        const long stride = step.num_kv_heads * step.head_dim / W::per_word;
        alignas(64) float scores[LANES * LANES];
        for (long key = 0; key < part.count; key += LANES) {
            if (!part.at[key]) continue;
            const C *here = part.at[key] + head, *ahead = part.next[key] ? part.next[key] + head : here;
            multiply_keys((const uint32_t*)here, stride, rows.query, scores, rows.words, count, (const uint32_t*)ahead);
            for (long row = 0; row < count; row++)
                store(rows.scores + row * TILE + part.first + key, load_apart(scores + row, count));
        }
    }

    // Keys are laid out as columns of words first, except for few rows.
    void score(const Rows<W>& rows, const Part<C>& part, long head) const {
        if (multiplies_few())
            return FewRows<W, C>::score(count, rows.query, rows.words, part, head, step.head_dim,
                                        rows.scores + part.first);
        for (long key = 0; key < part.count; key += LANES)
            each_column<W>(part, key, head, rows.words, step.head_dim, [&](long word, u32x16 column) {
                store_words(rows.keys + word * TILE + key, column);
            });
        multiply<W>(rows.query, rows.words, rows.keys, TILE, rows.scores + part.first, TILE, count, rows.words,
                    part.count, false);
    }

    // Values as rows of words, by the weights of their keys.
    void add_values(const Rows<W>& rows, const Part<C>& part, long head) const {
        if (multiplies_few())
            return FewRows<W, C>::add_values(count, rows.weights + part.first / W::per_word, part, head, step.value_dim,
                                             rows.out, rows.width);
        for (long key = 0; key < part.count; key += W::per_word) {
            const C* vectors[W::per_word];
            for (long i = 0; i < W::per_word; i++) {
                vectors[i] = part.at[key + i] ? part.at[key + i] + head : nullptr;
                for (long dim = 0; dim < step.value_dim; dim += 64 / sizeof(C))
                    __builtin_prefetch(part.next[key + i] + head + dim, 0, 2);
            }
            interleave<W>(vectors, step.value_dim, rows.values + key / W::per_word * rows.width);
        }
        multiply<W>(rows.weights + part.first / W::per_word, TILE / W::per_word, rows.values, rows.width, rows.out,
                    rows.width, count, part.count / W::per_word, rows.width, true);
    }

    void find_next(const C* cache, long from, long size, const C** at) const {
        if (from < keys.end || !following) return find(cache, from, size, at);
        const Attention next(step, *following, nullptr, scratch);
        next.find(cache, next.keys.first, size, at);
    }

    // Where each of some keys lies in a cache, from the item's first head on; null beside `keys`. The tile unit reads
    // sixteen keys in place or none of them, so those of a block before the first one are there too.
    void find(const C* cache, long from, long size, const C** at) const {
        const long stride = step.num_kv_heads * step.head_dim, end = std::min(keys.end, from + size);
        const bool in_place = cache == step.k_cache && reads_in_place();
        const long first = in_place ? keys.first / LANES * LANES : keys.first;
        std::fill(at, at + size, nullptr);
        for (long position = std::max(first, from); position < end;) {
            const long together = std::min(step.block_size - position % step.block_size, end - position);
            const C* here = place(cache, position);
            for (long i = 0; i < together; i++, here += stride) at[position++ - from] = here;
        }
    }

    const C* place(const C* cache, long position) const {
        const int32_t* table = step.block_tables + item.seq * step.table_width;
        const int64_t slot = (int64_t)table[position / step.block_size] * step.block_size + position % step.block_size;
        return cache + (slot * step.num_kv_heads + item.kv_head) * step.head_dim;
    }

    // A row's scores, of the keys from `low` to `at`, become weights: 2^(score - top), where `top` is the largest score so far, or a little less: only
    // what grows much brings the output so far under a new one. Scores are in units of ln 2.
    void weigh(const Rows<W>& rows, long row, long kv_head, long tile, long num_keys) const {
        float* scores = rows.scores + row * TILE;
        const long query = position + row / group - tile, low = first_seen(position + row / group) - tile;
        const long at = last_seen(position + row / group) - tile;
        const long first = std::max(low, 0L) / LANES * LANES, end = std::min(num_keys, round_up(at + 1, LANES));
        if (step.soft_cap != 0) cap(scores, first, end);
        if (step.distance_bias) add_bias(scores, kv_head * group + row % group, query, end);
        const float unit = step.distance_bias ? LOG2_E : (step.soft_cap != 0 ? step.soft_cap : step.scale) * LOG2_E;
        f32x16 best = broadcast(-__builtin_inff());
        for (long key = first; key < end; key += LANES) {
            f32x16 score = load(scores + key);
            if (low > key || at < key + LANES - 1) {
                const i32x16 index = IOTA + (int32_t)key;
                score = select((index >= (int32_t)low) & (index <= (int32_t)at), score, broadcast(-__builtin_inff()));
                store(scores + key, score);
            }
            best = larger(score, best);
        }
        const float largest_score = largest(best) * unit;
        if (largest_score > rows.top[row] + MUCH) raise(rows, row, largest_score);
        const float top = rows.top[row];
        f32x16 total = rows.total[row];
        for (long key = 0; key < num_keys; key += LANES) {
            const bool is_seen = first <= key && key < end;
            const f32x16 weight = is_seen ? exp2_of<T>(load(scores + key) * unit - top) : f32x16{};
            total += weight;
            W::store_numbers(rows.weights + row * (TILE / W::per_word), key, weight);
        }
        rows.total[row] = total;
    }

    // Scores, scaled.
    void add_bias(float* scores, long head, long query, long end) const {
        const float* at_zero = step.distance_bias + head * (2 * step.max_distance + LANES) + step.max_distance;
        for (long key = 0; key < end; key += LANES)
            store(scores + key, load(scores + key) * step.scale + load(at_zero + key - query));
    }

    // Scores, in units of the cap.
    void cap(float* scores, long first, long end) const {
        for (long key = first; key < end; key += LANES)
            store(scores + key, tanh_of(load(scores + key) * (step.scale / step.soft_cap)));
    }

    void raise(const Rows<W>& rows, long row, float top) const {
        const float shrink = exp2_of<float>(broadcast(rows.top[row] - top))[0];
        rows.total[row] *= shrink;
        float* out = rows.out + row * rows.width;
        for (long dim = 0; dim < rows.width; dim += LANES) store(out + dim, load(out + dim) * shrink);
        rows.top[row] = top;
    }

    // At most what a float holds: then nothing is left of the others.
    static float sink_weight(float sink, float top) {
        return exp2_of<float>(broadcast(std::min(sink * LOG2_E - top, 126.0f)))[0];
    }

    void finish(const Rows<W>& rows, long kv_head) const {
        for (long row = 0; row < count; row++) {
            const long head = kv_head * group + row % group;
            float total = sum(rows.total[row]);
            if (step.sinks) total += sink_weight(step.sinks[head], rows.top[row]);
            T* out = (T*)step.out + (first_token + row / group) * step.out_stride + head * step.value_dim;
            for (long dim = 0; dim < step.value_dim; dim += LANES) {
                f32x16 mean = load(rows.out + row * rows.width + dim) * (total == 0 ? 0.0f : 1 / total);
                store(out + dim, mean, step.value_dim - dim);
            }
        }
    }
};
