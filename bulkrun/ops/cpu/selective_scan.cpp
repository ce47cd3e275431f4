// Mamba's selective state space as an op. Contract: ops/linear_attention/selective_scan.py.

#include "selective_scan.h"

#include "struct_layout.h"

template <class T>
static void scan_heads(const SelectiveScan& s) {
    carry_states<T>(s, [&](float* state, long head, long first, long end) {
        scan_head<T>(s, state, head, first, end);
    });
}

EXPORT_LAYOUT(SelectiveScan, num_threads)
extern "C" void selective_scan_float32(const SelectiveScan* s) { scan_heads<float>(*s); }
extern "C" void selective_scan_bfloat16(const SelectiveScan* s) { scan_heads<bf16>(*s); }
