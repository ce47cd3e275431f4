// Norms and gated activations: one pass over rows that lie one after another. Contracts: bulkrun/ops/rms_norm.py,
// silu_mul.py, gelu_mul.py. Arithmetic is float32; values are rounded where the references round them.

#include <cmath>

#include "vector.h"

static const long FEW = 32768;  // numbers that one thread is through with before others would wake up

template <class T, class W>
static void scale_row(const T* x, const W* weight, T* out, long size, float square_sum, float eps) {
    const float scale = 1.0f / std::sqrt(square_sum / size + eps);
    for (long i = 0; i < size; i += LANES) {
        f32x16 normed = rounded<W>(load(x + i, size - i) * scale);
        store(out + i, normed * load(weight + i, size - i), size - i);
    }
}

template <class T, class W>
static void rms_norm(const T* x, const W* weight, T* out, int64_t rows, int64_t size, float eps, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (rows * size > FEW)
    for (long row = 0; row < rows; row++) {
        const T* from = x + row * size;
        f32x16 squares = {};
        for (long i = 0; i < size; i += LANES) {
            f32x16 number = load(from + i, size - i);
            squares += number * number;
        }
        scale_row(from, weight, out + row * size, size, sum(squares), eps);
    }
}

template <class T, class W>
static void add_rms_norm(const T* x, const T* residual, const W* weight, T* out, T* total, int64_t rows, int64_t size,
                         float eps, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (rows * size > FEW)
    for (long row = 0; row < rows; row++) {
        const T *from = x + row * size, *onto = residual + row * size;
        T* to = total + row * size;
        f32x16 squares = {};
        for (long i = 0; i < size; i += LANES) {
            f32x16 number = rounded<T>(load(from + i, size - i) + load(onto + i, size - i));
            store(to + i, number, size - i);
            squares += number * number;
        }
        scale_row(to, weight, out + row * size, size, sum(squares), eps);
    }
}

struct Silu {
    f32x16 operator()(f32x16 x) const { return x * sigmoid(x); }
};

struct GeluTanh {
    f32x16 operator()(f32x16 x) const { return x * sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x)); }
};

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

#define NORMS(T, T_NAME, W, W_NAME)                                                                                  \
    extern "C" void rms_norm_##T_NAME##_##W_NAME(const T* x, const W* weight, T* out, int64_t rows, int64_t size,   \
                                                 float eps, int num_threads) {                                      \
        rms_norm(x, weight, out, rows, size, eps, num_threads);                                                     \
    }                                                                                                               \
    extern "C" void add_rms_norm_##T_NAME##_##W_NAME(const T* x, const T* residual, const W* weight, T* out,        \
                                                     T* total, int64_t rows, int64_t size, float eps,               \
                                                     int num_threads) {                                             \
        add_rms_norm(x, residual, weight, out, total, rows, size, eps, num_threads);                                \
    }

NORMS(float, float32, float, float32)
NORMS(bf16, bfloat16, float, float32)
NORMS(bf16, bfloat16, bf16, bfloat16)

#define GATES(T, T_NAME)                                                                                            \
    extern "C" void silu_mul_##T_NAME(const T* gate_up, T* out, int64_t rows, int64_t size, int num_threads) {      \
        gate<Silu>(gate_up, out, rows, size, num_threads);                                                          \
    }                                                                                                               \
    extern "C" void gelu_mul_##T_NAME(const T* gate_up, T* out, int64_t rows, int64_t size, int num_threads) {      \
        gate<GeluTanh>(gate_up, out, rows, size, num_threads);                                                      \
    }

GATES(float, float32)
GATES(bf16, bfloat16)
