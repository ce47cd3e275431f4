// The gated delta rule as an op. Contract: ops/linear_attention/gated_delta_rule.py.

#include "gated_delta_rule.h"

#include "struct_layout.h"

template <class T>
static void correct_heads(const DeltaRule& r) {
    carry_states<T>(r, [&](float* state, long head, long first, long end) {
        correct_head<T>(r, state, head, first, end);
    });
}

EXPORT_LAYOUT(DeltaRule, num_threads)
extern "C" int64_t max_state_size() { return MAX_SIZE; }
extern "C" void gated_delta_rule_float32(const DeltaRule* r) { correct_heads<float>(*r); }
extern "C" void gated_delta_rule_bfloat16(const DeltaRule* r) { correct_heads<bf16>(*r); }
