// The first half of a gated MLP in one go: gates and ups, and their product. Knows panels; knows no model.
#pragma once

#include "panels.h"
#include "row_ops.h"

// gated [rows, inner] = gate(x gates) * (x ups). Panels of gates, then panels of as many ups; a half's last one may hold
// columns beyond `inner`. Strides are numbers between rows.
template <class T, class Gate>
inline void multiply_gated(const T* x, long x_stride, const Matrix& gate_up, T* gated, long gated_stride, long rows,
                           long inner, Share share) {
    using W = typename WordOf<T>::type;
    const long count = (inner + PANEL - 1) / PANEL;
    const T* bias = (const T*)gate_up.bias;
    multiply_panels(x, gate_up, rows, x_stride / W::per_word, 2 * count, share,
                    [&](long row, long panel, const float* gates) {
                        const float* ups = gates + BLOCK * PANEL;
                        const long first = panel * PANEL, end = std::min<long>(PANEL, inner - first);
                        T* to = gated + row * gated_stride + first;
                        for (long i = 0; i < end; i += LANES) {
                            f32x16 gate = rounded<T>(biased(gates + i, bias, first + i));
                            f32x16 up = rounded<T>(biased(ups + i, bias, count * PANEL + first + i));
                            store(to + i, rounded<T>(Gate()(gate)) * up, end - i);
                        }
                    });
}
