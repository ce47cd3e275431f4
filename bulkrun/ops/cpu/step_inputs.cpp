// What every token of a step is, from the rows of its sequences, and what it adds to them. Contract: ops/step_inputs.py.

#include "struct_layout.h"

#include <algorithm>

struct StepRows {
    const int32_t *token_ids, *block_tables;  // the permanent rows
    const int64_t* sequences;                 // row, start and count of each sequence, one after the other
    int32_t* input_ids;
    int64_t *positions, *slots;
    int32_t *context_lens, *cu_seqlens_q, *tables;
    int64_t* state_rows;
    int64_t length, width, num_seqs, num_tokens, table_stride, table_width, block_size, padding_slot;
};

EXPORT_LAYOUT(StepRows, padding_slot)

extern "C" void step_inputs(const StepRows* step) {
    const StepRows& s = *step;
    const int64_t *rows = s.sequences, *starts = rows + s.num_seqs, *counts = starts + s.num_seqs;
    int64_t token = 0;
    s.cu_seqlens_q[0] = 0;
    for (int64_t seq = 0; seq < s.num_seqs; seq++) {
        const int32_t *ids = s.token_ids + rows[seq] * s.length, *blocks = s.block_tables + rows[seq] * s.width;
        const int64_t start = starts[seq], end = start + counts[seq];
        std::copy_n(blocks, s.table_width, s.tables + seq * s.table_stride);
        for (int64_t position = start; position < end; position++, token++) {
            s.input_ids[token] = ids[position];
            s.positions[token] = position;
            s.slots[token] = blocks[position / s.block_size] * s.block_size + position % s.block_size;
        }
        s.state_rows[seq] = rows[seq];
        s.context_lens[seq] = counts[seq] ? end : 0;
        s.cu_seqlens_q[seq + 1] = token;
    }
    for (int64_t i = 0; token < s.num_tokens; i++, token++) {
        s.input_ids[token] = s.positions[token] = 0;
        s.slots[token] = s.padding_slot + i % s.block_size;
    }
}

extern "C" void append_tokens(int32_t* token_ids, int64_t length, const int64_t* rows, const int64_t* positions,
                              const int64_t* tokens, int64_t num_seqs) {
    for (int64_t seq = 0; seq < num_seqs; seq++) token_ids[rows[seq] * length + positions[seq]] = (int32_t)tokens[seq];
}
