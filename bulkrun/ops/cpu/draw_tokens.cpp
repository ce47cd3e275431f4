// A token of each row: the likeliest, or one drawn from what temperature, min_p, top_k and top_p leave.
// Contract: ops/sampling/draw_tokens.py; the noise is that of ops/sampling/sampling.py.
//
// Nothing as long as the vocabulary is written, and nothing is sorted. Noise has two logarithms, but is never above
// -log(u): only tokens that could win by that bound get theirs. What filters may leave is collected first.

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
        return (as_floats((i32x16)bits_of(token)) + 0.5f) * 0x1p-31f;
    }

    float gumbel(uint32_t token) const {
        const float u = std::min(((float)(int32_t)bits_of(token) + 0.5f) * 0x1p-31f, 1.0f - 0x1p-24f);
        return -std::log(-std::log1p(-u));
    }
};

// No less than the noise of these uniform numbers: by their exponents alone.
static f32x16 bound_of(f32x16 uniform) {
    return as_floats(127 - ((i32x16)uniform >> 23)) * LN_2;
}

// The best token so far, logit and noise together; of equals the first.
struct Winner {
    float x = LOWEST;
    int64_t token = 0;

    void meet(float other, int64_t other_token) {
        if (other > x || (other == x && other_token < token)) x = other, token = other_token;
    }

    // Below it nobody wins, whatever rounding did to a bound.
    float least() const { return x == LOWEST ? LOWEST : x - 1e-3f - 1e-6f * std::fabs(x); }
};

// One of the tokens whose scaled logit is at least `least`; whether all logits are valid is found out on the way.
template <class T>
static int64_t draw_from(const T* row, long size, float temperature, float least, const Noise& noise,
                         bool* is_valid) {
    const float inverse = 1.0f / temperature;
    Winner winner;
    f32x16 most = broadcast(LOWEST);
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

// Tokens whose logit is at least `bound`, of those at least `least` when scaled, whose scaled logit lies less than
// `near` and at most `far` below the likeliest one's, in order.
template <class T>
static std::vector<Candidate> collect(const T* row, long size, float highest, float temperature, float bound,
                                      float least, float near, float far) {
    std::vector<Candidate> found;
    for (long i = 0; i < size; i += LANES) {
        const f32x16 logit = numbers(row, i, size), below = (highest - logit) * (1.0f / temperature);
        const i32x16 may_be_in = (logit >= bound) & (below > near) & (below <= far);
        if (!any(may_be_in)) continue;
        const f32x16 x = logit / temperature, weight = exp2_of<float>(below * -LOG2_E);
        const i32x16 is_in = may_be_in & (x >= least) & (x != LOWEST);
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

// Depths below the likeliest token, in scaled logits, and what the tokens down to each weigh.
struct Levels {
    static constexpr int NUM = 6;
    float depth[NUM];
    double weight[NUM], total;
};

// Weighs the tokens that are at most `deepest` below the likeliest one.
template <class T>
static void weigh(const T* row, long size, float highest, float temperature, float deepest, Levels& levels) {
    constexpr long RUN = 64 * LANES;  // numbers summed in float
    const float inverse = 1.0f / temperature;
    levels.total = 0;
    for (double& one : levels.weight) one = 0;
    for (long first = 0; first < size; first += RUN) {
        f32x16 all = {}, within[Levels::NUM] = {};
        for (long i = first; i < std::min(first + RUN, size); i += LANES) {
            const f32x16 below = (highest - numbers(row, i, size)) * inverse;
            const f32x16 weight = select(below <= deepest, exp2_of<float>(below * -LOG2_E), f32x16{});
            all += weight;
            for (int level = 0; level < Levels::NUM; level++)
                within[level] += select(below <= levels.depth[level], weight, f32x16{});
        }
        levels.total += sum(all);
        for (int level = 0; level < Levels::NUM; level++) levels.weight[level] += sum(within[level]);
    }
}

// The scaled logit of the last token of the nucleus, of the tokens that min_p leaves. Where it lies is narrowed down by
// weighing; the few tokens around it are then looked at one by one.
template <class T>
static float least_of_nucleus(const T* row, long size, float highest, const Filters& f, float least) {
    const float deepest = f.min_p > 0.0f ? -std::log(f.min_p) : -LOWEST;
    Levels levels = {{1, 2, 4, 6, 9, 13}, {}, 0};
    weigh(row, size, highest, f.temperature, deepest, levels);
    const double limit = std::max(levels.total * f.top_p, 1e-30);
    // whatever lies deeper than `far` weighs less than 1 - p together
    float near = -1, far = (float)(std::log((double)size / ((1.0 - f.top_p) * levels.total)) + 1e-3);
    double above = 0, down_to_far = levels.total;
    for (int round = 0;; round++) {
        for (int level = 0; level < Levels::NUM && levels.depth[level] < far; level++) {
            if (levels.weight[level] >= limit) {
                far = levels.depth[level], down_to_far = levels.weight[level];
                break;
            }
            near = levels.depth[level], above = levels.weight[level];
        }
        const double most_between = (down_to_far - above) * std::exp(far);  // tokens, if all were the lightest
        if (round == 3 || most_between <= size / 64.0) break;
        for (int level = 0; level < Levels::NUM; level++)
            levels.depth[level] = near + (far - near) * (float)(level + 1) / (Levels::NUM + 1);
        weigh(row, size, highest, f.temperature, deepest, levels);
    }
    std::vector<Candidate> some = collect(row, size, highest, f.temperature, LOWEST, least, near, far);
    if (some.empty()) return highest / f.temperature - far;  // rounding, in a nucleus of all there is
    return least_within(some.data(), some.data() + some.size(), limit - above);
}

// One of the k likeliest tokens, or of the nucleus of these.
template <class T>
static int64_t draw_of_likeliest(const T* row, long size, float highest, const Filters& f, float least,
                                 const Noise& noise, bool* is_valid) {
    const float bound = bound_of_kth(row, size, f.top_k);
    std::vector<Candidate> some = collect(row, size, highest, f.temperature, bound, least, LOWEST, -LOWEST);
    Candidate *first = some.data(), *last = first + some.size();
    least = LOWEST;
    if ((long)some.size() > f.top_k) {
        std::nth_element(first, first + f.top_k - 1, last, [](auto& a, auto& b) { return a.x > b.x; });
        least = first[f.top_k - 1].x;
    }
    if (f.top_p < 1.0f) {
        const double total = weight_of(first, first + std::min<long>(f.top_k, some.size()));
        least = std::max(least, least_within(first, last, std::max(total * f.top_p, 1e-30)));
    }
    if ((long)some.size() > size / 64) {  // then sixteen at a time is faster
        float smallest = highest / f.temperature;
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
    const bool has_k = f.top_k > 0 && f.top_k < size, has_p = f.top_p < 1.0f, has_min = f.min_p > 0.0f;
    if (f.temperature != 0.0f && !has_k && !has_p && !has_min)
        return draw_from(row, size, f.temperature, LOWEST, noise, is_valid);
    const Highest highest = highest_of(row, size);
    *is_valid = highest.is_valid;
    if (!highest.is_valid) return 0;
    if (f.temperature == 0.0f) return first_place(row, size, highest.number);
    float least = has_min ? highest.number / f.temperature + std::log(f.min_p) : LOWEST;
    if (has_k) return draw_of_likeliest(row, size, highest.number, f, least, noise, is_valid);
    if (has_p) least = std::max(least, least_of_nucleus(row, size, highest.number, f, least));
    return draw_from(row, size, f.temperature, least, noise, is_valid);
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
