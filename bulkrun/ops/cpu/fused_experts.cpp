// Experts of a mixture over the tokens they got, in one parallel region. Contract: ops/experts/moe.py.
//
// A token's row stands once for each of its experts, expert by expert. Work is cut into items, rows of one expert by
// columns of its weight, that threads take in turn: few tokens keep all threads busy, and many do too where one expert
// got most of them. Where weights are bytes, rows become bytes before each product. A row's bits depend on that row alone.

#include <vector>

#include "gated.h"
#include "struct_layout.h"

struct Experts {
    Matrix gate_up, down;  // of all experts, one's after another's
    const void* x;         // [T, E]
    const float* weights;  // [T, k]
    const int64_t* ids;    // [T, k]
    void *gathered, *gated, *rows;  // scratch: room for whole sixteens of each expert's rows
    void *bytes, *row_scales;       // the same, of what is multiplied where weights are bytes; else `gathered`
    void* out;                      // [T, E]
    int64_t num_tokens, top_k, num_experts, hidden_size, intermediate_size;
    float alpha, limit;  // of ClampedSwiglu; limit 0: the gates are SiLUs or GELUs
    int32_t is_gelu;
    int32_t num_threads;
};

struct ExpertRows {
    long expert, first, rows;
    Share share;  // of columns
};

template <class T>
struct Mixture {
    const Experts& e;
    const long size, inner;
    const bool in_bytes;
    std::vector<long> places;  // of each (token, choice): its row
    std::vector<ExpertRows> items;

    explicit Mixture(const Experts& e)
        : e(e), size(e.hidden_size), inner(e.intermediate_size), in_bytes(e.gate_up.in_bytes()) {
        std::vector<long> counts(e.num_experts), starts(e.num_experts);
        const long pairs = e.num_tokens * e.top_k;
        for (long i = 0; i < pairs; i++) counts[e.ids[i]]++;
        const long active = std::count_if(counts.begin(), counts.end(), [](long count) { return count > 0; });
        const long shares = active ? std::min<long>((8 * e.num_threads - 1) / active + 1, inner / PANEL) : 1;
        for (long expert = 0, start = 0; expert < e.num_experts; expert++) {
            starts[expert] = start;
            for (long first = 0; first < counts[expert]; first += THREAD_ROWS)
                for (long i = 0; i < shares; i++)
                    items.push_back({expert, start + first, std::min<long>(THREAD_ROWS, counts[expert] - first),
                                     {i, shares}});
            start += round_up(counts[expert], LANES);
        }
        places.resize(pairs);
        for (long i = 0; i < pairs; i++) places[i] = starts[e.ids[i]]++;
    }

    void run() const {
#pragma omp parallel num_threads(e.num_threads)
        {
            const TileSetup tiles;
#pragma omp for schedule(static)
            for (long token = 0; token < e.num_tokens; token++) gather(token);
#pragma omp for schedule(dynamic, 1)
            for (size_t i = 0; i < items.size(); i++) gate(items[i]);
#pragma omp for schedule(static)
            for (size_t i = 0; i < (in_bytes ? places.size() : 0); i++)
                quantize((const T*)e.gated + places[i] * inner, inner, places[i]);
#pragma omp for schedule(dynamic, 1)
            for (size_t i = 0; i < items.size(); i++) finish(items[i]);
#pragma omp for schedule(static)
            for (long token = 0; token < e.num_tokens; token++) sum_choices(token);
        }
    }

  private:
    // To a token's row for each of its experts.
    void gather(long token) const {
        const long* place = &places[token * e.top_k];
        const T* x = (const T*)e.x + token * size;
        if (in_bytes) quantize(x, size, place[0]);
        for (long choice = 0; choice < e.top_k; choice++)
            if (!in_bytes) memcpy((T*)e.gathered + place[choice] * size, x, size * sizeof(T));
            else if (choice > 0) copy_quantized(place[0], place[choice]);
    }

    void quantize(const T* row, long width, long place) const {
        ((float*)e.row_scales)[place] = quantize_row(row, width, (uint8_t*)e.bytes + place * width);
    }

    void copy_quantized(long from, long to) const {
        ((float*)e.row_scales)[to] = ((float*)e.row_scales)[from];
        memcpy((uint8_t*)e.bytes + to * size, (uint8_t*)e.bytes + from * size, size);
    }

    template <class W>
    Operand operand_of(const void* numbers, long width, const ExpertRows& item) const {
        if (W::per_word != ByteWords::per_word) return operand<W>((const T*)numbers + item.first * width, width);
        const long words = width / ByteWords::per_word;
        return {(const uint32_t*)e.bytes + item.first * words, words, (const float*)e.row_scales + item.first};
    }

    Matrix matrix_of(const Matrix& all, long expert, long columns, long numbers) const {
        const long first = expert * columns, plain_bits = all.is_narrow ? 16 : 8 * sizeof(T);
        const long bits = all.codebook ? 4 : in_bytes ? 8 : plain_bits;
        const long first_group = all.codebook ? first * (numbers / all.group_size) : 0;
        const auto from = [](auto* numbers, long at) { return numbers ? numbers + at : nullptr; };
        return {(const char*)all.panels + first * numbers * bits / 8, from((const T*)all.bias, first),
                from(all.scales, first), from(all.zeros, first), all.codebook,
                from((const char*)all.group_scales, first_group * all.scale_bytes), from(all.group_zeros, first_group),
                from(all.byte_factors, first), all.group_size, all.scale_bytes, all.is_narrow};
    }

    void gate(const ExpertRows& item) const {
        if (e.limit > 0) gate_with(item, ClampedSwiglu<T>{e.alpha, e.limit});
        else if (e.is_gelu) gate_with(item, GateTimesUp<T, GeluTanh<T>>());
        else gate_with(item, GateTimesUp<T, Silu<T>>());
    }

    template <class Combine>
    void gate_with(const ExpertRows& item, const Combine& combine) const {
        const Matrix matrix = matrix_of(e.gate_up, item.expert, 2 * inner, size);
        T* gated = (T*)e.gated + item.first * inner;
        with_words<T>(matrix, [&](auto words) {
            using W = decltype(words);
            const Operand x = operand_of<W>(e.gathered, size, item);
            multiply_gated<W>(x, matrix, gated, inner, item.rows, inner, item.share, combine);
        });
    }

    void finish(const ExpertRows& item) const {
        const Matrix matrix = matrix_of(e.down, item.expert, size, inner);
        T* rows = (T*)e.rows + item.first * size;
        with_words<T>(matrix, [&](auto words) {
            using W = decltype(words);
            project<W>(operand_of<W>(e.gated, inner, item), matrix, rows, item.rows, size, item.share, AsItIs());
        });
    }

    void sum_choices(long token) const {
        const long* place = &places[token * e.top_k];
        const float* weight = e.weights + token * e.top_k;
        for (long i = 0; i < size; i += LANES) {
            f32x16 total = {};
            for (long choice = 0; choice < e.top_k; choice++)
                total += load((const T*)e.rows + place[choice] * size + i) * weight[choice];
            store((T*)e.out + token * size + i, total);
        }
    }
};

EXPORT_LAYOUT(Experts, num_threads)
#ifdef __AVX2__
extern "C" void fused_experts_float32(const Experts* e) { Mixture<float>(*e).run(); }
// Of int8 weights alone where there is no product of bf16.
extern "C" void fused_experts_bfloat16(const Experts* e) { Mixture<bf16>(*e).run(); }
#endif
