// Masks of allowed tokens and penalties for repetition, in place. Contract: ops/sampling/shape_logits.py.

#include <vector>

#include "logits.h"

static void mask_row(float* row, const int32_t* words, long num_words, long size) {
    for (long i = 0; i < size; i += LANES) {
        const uint32_t word = i / 32 < num_words ? (uint32_t)words[i / 32] >> (i % 32) : 0;
        const i32x16 is_allowed = ((i32x16{} + (int32_t)word) >> IOTA & 1) == 1;
        store(row + i, select(is_allowed, load(row + i, size - i), broadcast(LOWEST)), size - i);
    }
}

extern "C" void apply_token_masks(float* logits, const int32_t* masks, const int64_t* rows, int64_t num_masks,
                                  int64_t size, int64_t num_words, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_masks * size > FEW_LOGITS)
    for (long i = 0; i < num_masks; i++) mask_row(logits + rows[i] * size, masks + i * num_words, num_words, size);
}

struct Penalties {
    float presence, frequency, repetition;
};

// `counts`: a number for each token of the vocabulary, 0 before and after.
static void penalize_row(float* row, const int32_t* tokens, long prompt_len, long total_len, const Penalties& penalty,
                         int32_t* counts) {
    for (long i = 0; i < total_len; i++) {
        counts[tokens[i]] |= 1 << 30;  // it occurs
        counts[tokens[i]] += i >= prompt_len;
    }
    for (long i = 0; i < total_len; i++) {
        const int32_t token = tokens[i], count = counts[token] & ~(1 << 30);
        if (!counts[token]) continue;  // it is done
        counts[token] = 0;
        const float raw = row[token];
        const float penalized = raw > 0 ? raw / penalty.repetition : raw * penalty.repetition;
        row[token] = penalized - (penalty.frequency * count + penalty.presence * (count > 0));
    }
}

extern "C" void apply_penalties(float* logits, const int64_t* rows, const int32_t* tokens, const int64_t* prompt_lens,
                                const int64_t* total_lens, const float* presence, const float* frequency,
                                const float* repetition, int64_t num_rows, int64_t size, int64_t width,
                                int num_threads) {
#pragma omp parallel num_threads(num_threads) if (num_rows * width > FEW_LOGITS)
    {
        std::vector<int32_t> counts(size);
#pragma omp for
        for (long i = 0; i < num_rows; i++) {
            const Penalties penalty = {presence[i], frequency[i], repetition[i]};
            const long total_len = std::min(total_lens[i], width);
            penalize_row(logits + rows[i] * size, tokens + i * width, prompt_lens[i], total_len, penalty,
                         counts.data());
        }
    }
}
