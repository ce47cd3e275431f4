// Log-probabilities of a token of each row and of its likeliest ones. Contract: ops/sampling/token_logprobs.py.
//
// Nothing as long as the vocabulary is written, and nothing is sorted but the few that may be among the likeliest.

#include <vector>

#include "logits.h"

struct Likely {
    float logit;
    int32_t token;

    bool operator<(const Likely& other) const {
        return logit > other.logit || (logit == other.logit && token < other.token);
    }
};

// The k largest numbers, largest first; of equals the first.
template <class T>
static std::vector<Likely> likeliest(const T* row, long size, long k) {
    const float bound = bound_of_kth(row, size, k);
    std::vector<Likely> found;
    for (long i = 0; i < size; i += LANES) {
        const f32x16 x = numbers(row, i, size);
        if (!any(x >= bound)) continue;
        for (long lane = 0; lane < std::min<long>(LANES, size - i); lane++)
            if (x[lane] >= bound) found.push_back({x[lane], (int32_t)(i + lane)});
    }
    std::partial_sort(found.begin(), found.begin() + k, found.end());
    return found;
}

// The sum of e^(x - highest).
template <class T>
static double mass_of(const T* row, long size, float highest) {
    constexpr long RUN = 64 * LANES;  // numbers summed in float
    double mass = 0;
    for (long first = 0; first < size; first += RUN) {
        f32x16 some = {};
        for (long i = first; i < std::min(first + RUN, size); i += LANES)
            some += exp2_of<float>((numbers(row, i, size) - highest) * LOG2_E);
        mass += sum(some);
    }
    return mass;
}

template <class T>
static void row_logprobs(const T* row, long size, int64_t token, long k, float* chosen, float* values, int64_t* ids) {
    const Highest highest = highest_of(row, size);
    if (!highest.is_valid) {
        *chosen = NAN;
        std::fill_n(values, k, NAN);
        std::fill_n(ids, k, 0);
        return;
    }
    const double all = highest.number + std::log(mass_of(row, size, highest.number));
    *chosen = (float)(load(row + token, 1)[0] - all);
    if (k == 0) return;
    const std::vector<Likely> found = likeliest(row, size, k);
    for (long i = 0; i < k; i++) values[i] = (float)(found[i].logit - all), ids[i] = found[i].token;
}

#define TOKEN_LOGPROBS(T, T_NAME)                                                                                 \
    extern "C" void token_logprobs_##T_NAME(const T* logits, const int64_t* tokens, float* chosen, float* values, \
                                            int64_t* ids, int64_t rows, int64_t size, int64_t k,                  \
                                            int num_threads) {                                                    \
        _Pragma("omp parallel for num_threads(num_threads) if (rows * size > FEW_LOGITS)")                        \
        for (long row = 0; row < rows; row++)                                                                     \
            row_logprobs(logits + row * size, size, tokens[row], k, chosen + row, values + row * k, ids + row * k); \
    }

TOKEN_LOGPROBS(float, float32)
TOKEN_LOGPROBS(bf16, bfloat16)
