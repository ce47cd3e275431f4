// The first half of a gated MLP in one go: gates and ups, and their product. Knows panels; knows no model.
#pragma once

#include "panels.h"
#include "row_ops.h"

// What gates and ups make, where only the gate is changed, and rounded before the product.
template <class T, class Gate>
struct GateTimesUp {
    f32x16 operator()(f32x16 gate, f32x16 up) const { return rounded<T>(Gate()(gate)) * up; }
};

// gpt-oss's: see bulkrun/ops/experts/clamped_swiglu.py.
template <class T>
struct ClampedSwiglu {
    float alpha, limit;

    f32x16 operator()(f32x16 gate, f32x16 up) const {
        const f32x16 most = broadcast(limit), gated = smaller(most, gate);  // in this order no number stays none
        return gated * sigmoid<T>(alpha * gated) * (larger(-most, smaller(most, up)) + 1.0f);
    }
};

// gated [rows, inner] = combine(x gates, x ups). Panels of gates, then panels of as many ups; a half's last one may hold
// columns beyond `inner`. The stride is in numbers between rows.
template <class W, class T, class Combine>
inline void multiply_gated(const Operand& x, const Matrix& gate_up, T* gated, long gated_stride, long rows, long inner,
                           Share share, const Combine& combine) {
    const long count = (inner + PANEL - 1) / PANEL;
    multiply_panels<W>(x, gate_up, rows, 2 * count, share, [&](long row, long panel, const float* gates, long apart) {
        const float* ups = gates + apart;
        const long first = panel * PANEL, end = std::min<long>(PANEL, inner - first);
        T* to = gated + row * gated_stride + first;
        for (long i = 0; i < end; i += LANES) {
            f32x16 gate = rounded<T>(finished<W, T>(gates + i, x, row, gate_up, first + i));
            f32x16 up = rounded<T>(finished<W, T>(ups + i, x, row, gate_up, count * PANEL + first + i));
            store(to + i, combine(gate, up), end - i);
        }
    });
}
