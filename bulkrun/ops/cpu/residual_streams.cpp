// Several residual streams of a token, and gates of which few are above zero. Contracts: ops/residual_streams.py,
// cut_gates.py. Streams lie one behind the other, each with a row for every token; a row's bits depend on that row.

#include "row_ops.h"

constexpr int MOST = 8;  // streams

static float of_modes(const float* modes, const float* weight, int64_t num) {
    float product = 0.0f;
    for (int n = 0; n < num; n++) product += modes[n] * weight[n];
    return product;
}

template <class T>
static void predict_streams(const T* streams, const float* modes, const float* weight, T* out, int64_t num,
                            int64_t tokens, int64_t size, int num_threads) {
    const long stride = tokens * size;
#pragma omp parallel for num_threads(num_threads) if (num * stride > FEW)
    for (long token = 0; token < tokens; token++) {
        float coefs[MOST * MOST];
        for (int n = 0; n < num * num; n++) coefs[n] = of_modes(modes + token * num, weight + n * num, num);
        for (long i = 0; i < size; i += LANES) {
            const long at = token * size + i, left = size - i;
            f32x16 streams_N[MOST];
            for (int m = 0; m < num; m++) streams_N[m] = load(streams + m * stride + at, left);
            for (int n = 0; n < num; n++) {
                f32x16 predicted = streams_N[n];
                for (int m = 0; m < num; m++) predicted += coefs[n * num + m] * streams_N[m];
                store(out + n * stride + at, predicted, left);
            }
        }
    }
}

template <class T>
static void correct_streams(const T* predicted, const T* computed, const float* modes, const float* weight, T* out,
                            int64_t num, int64_t tokens, int64_t size, int num_threads) {
    const long stride = tokens * size;
#pragma omp parallel for num_threads(num_threads) if (num * stride > FEW)
    for (long token = 0; token < tokens; token++) {
        float gains[MOST];
        for (int n = 0; n < num; n++) gains[n] = of_modes(modes + token * num, weight + n * num, num) + 1.0f;
        for (long i = 0; i < size; i += LANES) {
            const long at = token * size + i, left = size - i;
            const f32x16 news = load(computed + at, left) - load(predicted + at, left);
            for (int n = 0; n < num; n++)
                store(out + n * stride + at, load(predicted + n * stride + at, left) + gains[n] * news, left);
        }
    }
}

// like: so many rows, for those of x again and again.
template <class T>
static void with_rms_of(const T* x, const T* like, T* out, int64_t rows, int64_t tokens, int64_t size,
                        float min_mean_square, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (rows * size > FEW)
    for (long row = 0; row < rows; row++) {
        const T* own = x + row * size;
        const float found = std::fmax(square_sum(own, size) / size, min_mean_square);
        const float scale = std::sqrt(square_sum(like + row % tokens * size, size) / size / found);
        for (long i = 0; i < size; i += LANES) store(out + row * size + i, load(own + i, size - i) * scale, size - i);
    }
}

template <class T>
static void cut_gates(T* gates, int64_t rows, int64_t stride, int64_t size, float num_deviations, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (rows * size > FEW)
    for (long row = 0; row < rows; row++) {
        T* own = gates + row * stride;
        f32x16 total = {}, squares = {};
        for (long i = 0; i < size; i += LANES) total += load(own + i, size - i);
        const float mean = sum(total) / size;
        for (long i = 0; i < size; i += LANES) {
            f32x16 apart = load(own + i, size - i) - mean;
            if (size - i < LANES) apart = select(IOTA < (int)(size - i), apart, f32x16{});
            squares += apart * apart;
        }
        const float cut = num_deviations * std::sqrt(sum(squares) / size);
        for (long i = 0; i < size; i += LANES)
            store(own + i, larger(f32x16{}, load(own + i, size - i) - mean - cut), size - i);
    }
}

#define STREAMS(T, T_NAME)                                                                                          \
    extern "C" void predict_streams_##T_NAME(const T* streams, const float* modes, const float* weight, T* out,     \
                                             int64_t num, int64_t tokens, int64_t size, int num_threads) {          \
        predict_streams(streams, modes, weight, out, num, tokens, size, num_threads);                               \
    }                                                                                                               \
    extern "C" void correct_streams_##T_NAME(const T* predicted, const T* computed, const float* modes,             \
                                             const float* weight, T* out, int64_t num, int64_t tokens,              \
                                             int64_t size, int num_threads) {                                       \
        correct_streams(predicted, computed, modes, weight, out, num, tokens, size, num_threads);                   \
    }                                                                                                               \
    extern "C" void with_rms_of_##T_NAME(const T* x, const T* like, T* out, int64_t rows, int64_t tokens,           \
                                         int64_t size, float min_mean_square, int num_threads) {                    \
        with_rms_of(x, like, out, rows, tokens, size, min_mean_square, num_threads);                                \
    }                                                                                                               \
    extern "C" void cut_gates_##T_NAME(T* gates, int64_t rows, int64_t stride, int64_t size, float num_deviations,  \
                                       int num_threads) {                                                           \
        cut_gates(gates, rows, stride, size, num_deviations, num_threads);                                          \
    }

STREAMS(float, float32)
STREAMS(bf16, bfloat16)
