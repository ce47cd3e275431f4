// A matrix in panels, of whatever numbers. Knows no product. Mirror: panel_matrix.py.
//
// A panel is PANEL columns, word by word (see matrix.h), so that it is read from memory in one go.
#pragma once

#include "int8_words.h"

constexpr int PANEL = 32;    // columns
constexpr int AHEAD = 1024;  // bytes between what is worked on and what is asked for: memory answers slowly

// All but the panels have one number per column of a panel, or one per group of inputs and column.
struct Matrix {
    const void *panels, *bias;  // bias: or null
    const float* scales;        // where bytes are multiplied, else null: one of them is so much
    const int32_t* zeros;       // and what the zeros of a row add to a sum
    const float* codebook;      // where the panels hold codes, else null: what each of the sixteen stands for
    const void* group_scales;   // what a number is times so much, less its zero point: float32, or bf16
    const uint8_t* group_zeros;  // null: none
    const float* byte_factors;   // where codes are multiplied as bytes: times so much they are rounded to one
    int64_t group_size;          // inputs
    int64_t scale_bytes;         // of one of the groups': 4, or 2
    int64_t is_narrow;           // whether the panels hold bf16, whatever they are multiplied with

    bool in_bytes() const { return scales != nullptr; }

    f32x16 scales_at(long first) const {
        return scale_bytes == sizeof(bf16) ? load((const bf16*)group_scales + first)
                                           : load((const float*)group_scales + first);
    }
};
