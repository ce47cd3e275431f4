// A token of each row: the likeliest, or one drawn from what temperature, min_p, top_k and top_p leave.
// Contract: bulkrun/ops/draw_tokens.py; the noise is that of bulkrun/ops/sampling.py.
//
// Nothing as long as the vocabulary is written, and nothing is sorted. Noise has two logarithms, but is never above
// -log(u): only tokens that could win by that bound get theirs. What filters may leave is collected first.

#include <vector>

#include "logits.h"

constexpr float LN_2 = 0.693147180559945309f;

struct Filters {
    float temperature;
    float min_p;    // 0: none
    int64_t top_k;  // 0 or below: none
    float top_p;    // 1: none
};

struct Candidate {
    float x;       // its logit, divided by the temperature
    float weight;  // e^x, relative to the likeliest token's
    int32_t token;
};

static uint64_t mix64(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

// The noise of one row.
struct Noise {
    uint32_t low, high;

    Noise(int64_t seed, int64_t position) {
        const uint64_t key = mix64(mix64(seed) ^ (uint64_t)position);
        low = (uint32_t)key, high = (uint32_t)(key >> 32);
    }

    template <class U>
    U bits_of(U token) const {
        U bits = (token * 0x9e3779b9u) ^ low;
        bits = (bits ^ (bits >> 16)) * 0x85ebca6bu + high;
        bits = (bits ^ (bits >> 13)) * 0xc2b2ae35u;
        return (bits ^ (bits >> 16)) & 0x7fffffffu;
    }

    f32x16 uniform(u32x16 token) const {
        const f32x16 x = __builtin_convertvector((i32x16)bits_of(token), f32x16);
        return (x + 0.5f) * 0x1p-31f;
    }

    float gumbel(uint32_t token) const {
        const float u = std::min(((float)(int32_t)bits_of(token) + 0.5f) * 0x1p-31f, 1.0f - 0x1p-24f);
        return -std::log(-std::log1p(-u));
    }
};

// No less than the noise of these uniform numbers: by their exponents alone.
static f32x16 bound_of(f32x16 uniform) {
    return __builtin_convertvector(127 - ((i32x16)uniform >> 23), f32x16) * LN_2;
}

// The best token so far, logit and noise together; of equals the first.
struct Winner {
    float x = LEAST;
    int64_t token = 0;

    void meet(float other, int64_t other_token) {
        if (other > x || (other == x && other_token < token)) x = other, token = other_token;
    }

    // Below it nobody wins, whatever rounding did to a bound.
    float least() const { return x == LEAST ? LEAST : x - 1e-3f - 1e-6f * std::fabs(x); }
};

// One of the tokens whose scaled logit is at least `least`; whether all logits are valid is found out on the way.
template <class T>
static int64_t draw_from(const T* row, long size, float temperature, float least, const Noise& noise,
                         bool* is_valid) {
    const float inverse = 1.0f / temperature;
    Winner winner;
    f32x16 most = broadcast(LEAST);
    i32x16 is_nan = {};
    for (long i = 0; i < size; i += LANES) {
        const f32x16 x = numbers(row, i, size);
        most = larger(most, x);
        is_nan |= x != x;
        const f32x16 reach = x * inverse + bound_of(noise.uniform((u32x16)(IOTA + (int32_t)i)));
        if (!any(reach > winner.least())) continue;
        for (long token = i; token < std::min(i + LANES, size); token++) {
            const float scaled = x[token - i] / temperature;
            if (reach[token - i] > winner.least() && scaled >= least)
                winner.meet(scaled + noise.gumbel((uint32_t)token), token);
        }
    }
    *is_valid = std::isfinite(largest(most)) && !any(is_nan);
    return winner.token;
}

// No more than the k-th largest number: of more than k groups of numbers the k-th largest maximum.
template <class T>
static float bound_of_kth(const T* row, long size, long k) {
    const long vectors = (size + LANES - 1) / LANES, chunks = std::min(vectors, 4 * k / LANES + 1);
    std::vector<float> maxima(chunks * LANES);
    for (long chunk = 0; chunk < chunks; chunk++) {
        f32x16 most = broadcast(LEAST);
        for (long v = vectors * chunk / chunks; v < vectors * (chunk + 1) / chunks; v++)
            most = larger(most, numbers(row, v * LANES, size));
        store(&maxima[chunk * LANES], most);
    }
    if (k > (long)maxima.size()) return LEAST;
    std::nth_element(maxima.begin(), maxima.begin() + k - 1, maxima.end(), std::greater<float>());
    return maxima[k - 1];
}

// What the tokens weigh, and those at most so far below the likeliest one.
struct Mass {
    static constexpr int LEVELS = 6;
    static constexpr float DEPTHS[LEVELS] = {1, 2, 4, 6, 9, 13};
    double total = 0, within[LEVELS] = {};

    // How far below the likeliest token the last ones of the nucleus may lie.
    float depth_of_nucleus(long size, float top_p) const {
        for (int level = 0; level < LEVELS; level++)
            if (within[level] > total * top_p * (1 + 1e-5)) return DEPTHS[level];
        // all tokens beyond weigh less than 1 - p together
        return (float)(std::log((double)size / ((1.0 - top_p) * total)) + 1e-3);
    }
};
constexpr float Mass::DEPTHS[];

// Of tokens that are `least` or more above the likeliest one, in the scaled logits.
template <class T>
static Mass mass_of(const T* row, long size, float highest, float inverse, float least) {
    constexpr long RUN = 64 * LANES;  // numbers summed in float
    Mass mass;
    for (long first = 0; first < size; first += RUN) {
        f32x16 part = {}, within[Mass::LEVELS] = {};
        for (long i = first; i < std::min(first + RUN, size); i += LANES) {
            const f32x16 x = (numbers(row, i, size) - highest) * inverse;
            const f32x16 weight = x >= least ? exp2_of<float>(x * LOG2_E) : f32x16{};
            part += weight;
            for (int level = 0; level < Mass::LEVELS; level++)
                within[level] += x >= -Mass::DEPTHS[level] ? weight : f32x16{};
        }
        mass.total += sum(part);
        for (int level = 0; level < Mass::LEVELS; level++) mass.within[level] += sum(within[level]);
    }
    return mass;
}

// Tokens whose logit is at least `bound` and at least `least` when scaled, in order.
template <class T>
static std::vector<Candidate> collect(const T* row, long size, float highest, float temperature, float bound,
                                      float least) {
    std::vector<Candidate> found;
    for (long i = 0; i < size; i += LANES) {
        const f32x16 logit = numbers(row, i, size);
        if (!any(logit >= bound)) continue;
        const f32x16 x = logit / temperature, weight = exp2_of<float>((logit - highest) / temperature * LOG2_E);
        const i32x16 is_in = (logit >= bound) & (x >= least) & (x != LEAST);
        for (int lane = 0; lane < LANES; lane++)
            if (is_in[lane]) found.push_back({x[lane], weight[lane], (int32_t)i + lane});
    }
    return found;
}

static double weight_of(const Candidate* first, const Candidate* last) {
    double total = 0;
    for (; first < last; first++) total += first->weight;
    return total;
}

// The smallest x above which lies less weight than `limit`; reorders the candidates.
static float least_within(Candidate* first, Candidate* last, double limit) {
    for (double above = 0;;) {
        const float pivot = first[(last - first) / 2].x;
        Candidate* equal = std::partition(first, last, [=](const Candidate& one) { return one.x > pivot; });
        Candidate* smaller = std::partition(equal, last, [=](const Candidate& one) { return one.x == pivot; });
        const double with_larger = above + weight_of(first, equal);
        if (with_larger >= limit && equal > first) {
            last = equal;
            continue;
        }
        above = with_larger + weight_of(equal, smaller);
        if (above >= limit || smaller == last) return pivot;
        first = smaller;
    }
}

// One of the tokens that the filters leave.
template <class T>
static int64_t draw_filtered(const T* row, long size, float highest, const Filters& f, const Noise& noise,
                             bool* is_valid) {
    const bool has_k = f.top_k > 0 && f.top_k < size, has_p = f.top_p < 1.0f;
    const float inverse = 1.0f / f.temperature, top = highest / f.temperature;
    float least = f.min_p > 0.0f ? top + std::log(f.min_p) : LEAST, bound = LEAST;
    double total = 0;
    if (has_k) {
        bound = bound_of_kth(row, size, f.top_k);
    } else if (has_p) {
        const Mass mass = mass_of(row, size, highest, inverse, f.min_p > 0.0f ? std::log(f.min_p) : LEAST);
        least = std::max(least, top - mass.depth_of_nucleus(size, f.top_p));
        total = mass.total;
    }
    const float raw = least * f.temperature;
    bound = std::max(bound, raw - 1e-6f * std::fabs(raw) - 1e-6f);
    std::vector<Candidate> some = collect(row, size, highest, f.temperature, bound, least);
    Candidate *first = some.data(), *last = first + some.size();
    if (has_k && (long)some.size() > f.top_k) {
        std::nth_element(first, first + f.top_k - 1, last, [](auto& a, auto& b) { return a.x > b.x; });
        least = std::max(least, first[f.top_k - 1].x);
    }
    if (has_p && !some.empty()) {
        if (has_k) total = weight_of(first, first + std::min<long>(f.top_k, some.size()));
        least = std::max(least, least_within(first, last, std::max(total * f.top_p, 1e-30)));
    }
    if ((long)some.size() > size / 64) {  // then sixteen at a time is faster
        float smallest = top;
        for (const Candidate& one : some) smallest = std::min(smallest, one.x);
        return draw_from(row, size, f.temperature, std::max(least, smallest), noise, is_valid);
    }
    Winner winner;
    for (const Candidate& one : some)
        if (one.x >= least) winner.meet(one.x + noise.gumbel((uint32_t)one.token), one.token);
    return winner.token;
}

template <class T>
static int64_t draw(const T* row, long size, const Filters& f, const Noise& noise, bool* is_valid) {
    const bool is_filtered = f.min_p > 0.0f || (f.top_k > 0 && f.top_k < size) || f.top_p < 1.0f;
    if (f.temperature != 0.0f && !is_filtered) return draw_from(row, size, f.temperature, LEAST, noise, is_valid);
    const Highest highest = highest_of(row, size);
    *is_valid = highest.is_valid;
    if (!highest.is_valid) return 0;
    if (f.temperature == 0.0f) return first_place(row, size, highest.number);
    return draw_filtered(row, size, highest.number, f, noise, is_valid);
}

#define DRAW_TOKENS(T, T_NAME)                                                                                    \
    extern "C" void draw_tokens_##T_NAME(const T* logits, const float* temperature, const float* min_p,           \
                                         const int64_t* top_k, const float* top_p, const int64_t* seed,           \
                                         const int64_t* position, int64_t* tokens, bool* is_valid, int64_t rows,  \
                                         int64_t size, int num_threads) {                                         \
        _Pragma("omp parallel for schedule(dynamic) num_threads(num_threads) if (rows * size > FEW_LOGITS)")      \
        for (long row = 0; row < rows; row++) {                                                                   \
            const Filters filters = {temperature[row], min_p ? min_p[row] : 0.0f, top_k ? top_k[row] : 0,         \
                                     top_p ? top_p[row] : 1.0f};                                                  \
            const Noise noise(seed[row], position[row]);                                                          \
            tokens[row] = draw(logits + row * size, size, filters, noise, is_valid + row);                        \
        }                                                                                                         \
    }

DRAW_TOKENS(float, float32)
DRAW_TOKENS(bf16, bfloat16)
