// Mamba 2's state space as an op. Contract: ops/linear_attention/state_space.py.

#include "state_space.h"

#include "struct_layout.h"

template <class T>
static void advance_heads(const StateSpace& s) {
    carry_states<T>(s, [&](float* state, long head, long first, long end) {
        advance_head<T>(s, state, head, first, end);
    });
}

EXPORT_LAYOUT(StateSpace, num_threads)
extern "C" void state_space_float32(const StateSpace* s) { advance_heads<float>(*s); }
extern "C" void state_space_bfloat16(const StateSpace* s) { advance_heads<bf16>(*s); }
