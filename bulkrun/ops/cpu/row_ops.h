// Norms of one row, and the gates of MLPs. Arithmetic is float32; values are rounded where the references round them.
#pragma once

#include <cmath>

#include "vector.h"

constexpr long FEW = 32768;  // numbers that one thread is through with before others would wake up

template <class X, class T, class W>
inline void scale_row(const X* x, const W* weight, T* out, long size, float square_sum, float eps) {
    const float scale = 1.0f / std::sqrt(square_sum / size + eps);
    for (long i = 0; i < size; i += LANES) {
        f32x16 normed = rounded<W>(load(x + i, size - i) * scale);
        store(out + i, normed * load(weight + i, size - i), size - i);
    }
}

template <class T>
inline float square_sum(const T* x, long size) {
    f32x16 squares = {};
    for (long i = 0; i < size; i += LANES) {
        f32x16 number = load(x + i, size - i);
        squares += number * number;
    }
    return sum(squares);
}

template <class T, class W>
inline void norm_row(const T* x, const W* weight, T* out, long size, float eps) {
    scale_row(x, weight, out, size, square_sum(x, size), eps);
}

// out, residual: x + residual.
template <class T>
inline void add_row(const T* x, T* residual, T* out, long size) {
    for (long i = 0; i < size; i += LANES) {
        f32x16 number = load(x + i, size - i) + load(residual + i, size - i);
        store(residual + i, number, size - i);
        store(out + i, number, size - i);
    }
}

// total: x + residual, and may be where one of them is.
template <class T, class W>
inline void add_norm_row(const T* x, const T* residual, const W* weight, T* out, T* total, long size, float eps,
                         float scale = 1.0f) {
    f32x16 squares = {};
    for (long i = 0; i < size; i += LANES) {
        f32x16 number = rounded<T>(load(x + i, size - i) + load(residual + i, size - i));
        if (scale != 1.0f) number = rounded<T>(number * scale);
        store(total + i, number, size - i);
        squares += number * number;
    }
    scale_row(total, weight, out, size, sum(squares), eps);
}

// out, which may be x: its layer norm; size: whole vectors. bias: null: none.
template <class T, class W>
inline void layer_norm_row(const T* x, const W* weight, const W* bias, T* out, long size, float eps) {
    f32x16 total = {}, squares = {};
    for (long i = 0; i < size; i += LANES) total += load(x + i);
    const float mean = sum(total) / size;
    for (long i = 0; i < size; i += LANES) {
        f32x16 apart = load(x + i) - mean;
        squares += apart * apart;
    }
    const float scale = 1.0f / std::sqrt(sum(squares) / size + eps);
    for (long i = 0; i < size; i += LANES) {
        f32x16 normed = (load(x + i) - mean) * scale * load(weight + i);
        store(out + i, bias ? normed + load(bias + i) : normed);
    }
}

// Of what is to be rounded to T.
template <class T>
struct Silu {
    f32x16 operator()(f32x16 x) const { return x * sigmoid<T>(x); }
};

// See bulkrun/ops/xielu.py. Not of what is rounded to fewer bits: the exponential is nearly all that is taken from it.
struct Xielu {
    float above, below;  // of squares, and of what an exponential is beyond its tangent

    f32x16 operator()(f32x16 x) const {
        const f32x16 beyond = exp2_of<float>(smaller(broadcast(-1e-6f), x) * LOG2_E) - 1.0f - x;
        return select(x > 0.0f, x * x * above, beyond * below) + 0.5f * x;
    }
};

struct ReluSquared {
    f32x16 operator()(f32x16 x) const {
        const f32x16 above = larger(f32x16{}, x);
        return above * above;
    }
};

template <class T>
struct GeluTanh {
    f32x16 operator()(f32x16 x) const { return x * sigmoid<T>(1.5957691216057308f * (x + 0.044715f * x * x * x)); }
};

// With the error function as in Abramowitz and Stegun, 7.1.26: within 1.5e-7, here of the smaller tail.
template <class T>
struct Gelu {
    f32x16 operator()(f32x16 x) const {
        const f32x16 t = 1.0f / (1.0f + 0.3275911f * 0.70710678f * magnitude(x));
        f32x16 p = t * 1.061405429f - 1.453152027f;
        p = p * t + 1.421413741f;
        p = p * t - 0.284496736f;
        p = p * t + 0.254829592f;
        const f32x16 tail = 0.5f * p * t * exp2_of<T>(x * x * (-0.5f * LOG2_E));
        return x * select(x < 0.0f, tail, 1.0f - tail);
    }
};

// out, which may be x: its norm times SiLU of the gates.
template <class T>
inline void norm_gate_row(const T* x, const T* gate, const T* weight, T* out, long size, float eps) {
    norm_row(x, weight, out, size, eps);
    for (long i = 0; i < size; i += LANES)
        store(out + i, load(out + i, size - i) * Silu<float>()(load(gate + i, size - i)), size - i);
}

// out: the norm of x times SiLU of the gates. gated: room for a row.
template <class T>
inline void gate_norm_row(const T* x, const T* gate, const T* weight, T* out, float* gated, long size, float eps) {
    f32x16 squares = {};
    for (long i = 0; i < size; i += LANES) {
        f32x16 number = load(x + i, size - i) * Silu<float>()(load(gate + i, size - i));
        store(gated + i, number, size - i);
        squares += number * number;
    }
    scale_row(gated, weight, out, size, sum(squares), eps);
}

// x times the sigmoid of the gates, in place.
template <class T>
inline void sigmoid_gate_row(const T* gates, T* x, long size) {
    for (long i = 0; i < size; i += LANES) {
        const f32x16 gate = rounded<T>(sigmoid<T>(load(gates + i, size - i)));
        store(x + i, load(x + i, size - i) * gate, size - i);
    }
}
