// Norms and activations: one pass over rows that lie one after another. Contracts: ops/rms_norm.py,
// silu_mul.py, gelu_mul.py, xielu.py, linear_attention/gated_rms_norm.py.

#include <vector>

#include "row_ops.h"

template <class T, class W>
static void rms_norm(const T* x, const W* weight, T* out, int64_t rows, int64_t size, float eps, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (rows * size > FEW)
    for (long row = 0; row < rows; row++) norm_row(x + row * size, weight, out + row * size, size, eps);
}

template <class T, class W>
static void add_rms_norm(const T* x, const T* residual, const W* weight, T* out, T* total, int64_t rows, int64_t size,
                         float eps, int num_threads, float scale) {
#pragma omp parallel for num_threads(num_threads) if (rows * size > FEW)
    for (long row = 0; row < rows; row++) {
        const long at = row * size;
        add_norm_row(x + at, residual + at, weight, out + at, total + at, size, eps, scale);
    }
}

template <class F, class T>
static void gate(const T* gate_up, T* out, int64_t rows, int64_t size, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (rows * size > FEW)
    for (long row = 0; row < rows; row++) {
        const T *gates = gate_up + 2 * row * size, *ups = gates + size;
        for (long i = 0; i < size; i += LANES) {
            f32x16 gated = rounded<T>(F()(load(gates + i, size - i)));
            store(out + row * size + i, gated * load(ups + i, size - i), size - i);
        }
    }
}

template <class T>
static void xielu(const T* x, T* out, int64_t size, float above, float below, int num_threads) {
    const Xielu activation = {above, below};
#pragma omp parallel for num_threads(num_threads) if (size > FEW)
    for (long i = 0; i < size; i += LANES) store(out + i, activation(load(x + i, size - i)), size - i);
}

// Heads of `size` numbers, those of a token one after another; of gates the tokens are `gate_stride` numbers apart, of
// weights the heads `weight_stride`.
template <class T>
static void gated_rms_norm(const T* x, const T* gate, const T* weight, T* out, int64_t tokens, int64_t heads,
                           int64_t size, int64_t gate_stride, int64_t weight_stride, float eps, int norm_before_gate,
                           int num_threads) {
#pragma omp parallel num_threads(num_threads) if (tokens * heads * size > FEW)
    {
        std::vector<float> gated(norm_before_gate ? 0 : size);
#pragma omp for
        for (long row = 0; row < tokens * heads; row++) {
            const long at = row * size, head = row % heads;
            const T *gates = gate + row / heads * gate_stride + head * size, *weights = weight + head * weight_stride;
            if (norm_before_gate) norm_gate_row(x + at, gates, weights, out + at, size, eps);
            else gate_norm_row(x + at, gates, weights, out + at, gated.data(), size, eps);
        }
    }
}

#define NORMS(T, T_NAME, W, W_NAME)                                                                                  \
    extern "C" void rms_norm_##T_NAME##_##W_NAME(const T* x, const W* weight, T* out, int64_t rows, int64_t size,   \
                                                 float eps, int num_threads) {                                      \
        rms_norm(x, weight, out, rows, size, eps, num_threads);                                                     \
    }                                                                                                               \
    extern "C" void add_rms_norm_##T_NAME##_##W_NAME(const T* x, const T* residual, const W* weight, T* out,        \
                                                     T* total, int64_t rows, int64_t size, float eps,               \
                                                     int num_threads, float scale) {                                \
        add_rms_norm(x, residual, weight, out, total, rows, size, eps, num_threads, scale);                         \
    }

NORMS(float, float32, float, float32)
NORMS(bf16, bfloat16, float, float32)
NORMS(bf16, bfloat16, bf16, bfloat16)

#define GATES(T, T_NAME)                                                                                            \
    extern "C" void silu_mul_##T_NAME(const T* gate_up, T* out, int64_t rows, int64_t size, int num_threads) {      \
        gate<Silu<T>>(gate_up, out, rows, size, num_threads);                                                        \
    }                                                                                                               \
    extern "C" void gelu_mul_##T_NAME(const T* gate_up, T* out, int64_t rows, int64_t size, int num_threads) {      \
        gate<GeluTanh<T>>(gate_up, out, rows, size, num_threads);                                                   \
    }

#define XIELU(T, T_NAME)                                                                                            \
    extern "C" void xielu_##T_NAME(const T* x, T* out, int64_t size, float above, float below, int num_threads) {   \
        xielu(x, out, size, above, below, num_threads);                                                             \
    }

XIELU(float, float32)
XIELU(bf16, bfloat16)

GATES(float, float32)
GATES(bf16, bfloat16)

#define GATED_NORMS(T, T_NAME)                                                                                      \
    extern "C" void gated_rms_norm_##T_NAME(const T* x, const T* gate, const T* weight, T* out, int64_t tokens,     \
                                            int64_t heads, int64_t size, int64_t gate_stride,                       \
                                            int64_t weight_stride, float eps, int norm_before_gate,                 \
                                            int num_threads) {                                                      \
        gated_rms_norm(x, gate, weight, out, tokens, heads, size, gate_stride, weight_stride, eps, norm_before_gate, \
                       num_threads);                                                                                \
    }

GATED_NORMS(float, float32)
GATED_NORMS(bf16, bfloat16)
