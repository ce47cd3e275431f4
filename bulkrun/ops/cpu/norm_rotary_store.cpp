// QK-norm, rotary embedding and KV write as an op. Contract: ops/attention/norm_rotary_store.py.

#include "norm_rotary_store.h"

#include "struct_layout.h"

template <class T, class W>
static void store_all(const Projection& p) {
#pragma omp parallel for num_threads(p.num_threads) if (p.num_tokens * p.qkv_stride > 32768)
    for (long token = 0; token < p.num_tokens; token++) store_token<T, W>(p, token);
}

EXPORT_LAYOUT(Projection, num_threads)
extern "C" int64_t max_head_dim() { return MAX_DIM; }
extern "C" void norm_rotary_store_float32_float32(const Projection* p) { store_all<float, float>(*p); }
extern "C" void norm_rotary_store_bfloat16_float32(const Projection* p) { store_all<bf16, float>(*p); }
extern "C" void norm_rotary_store_bfloat16_bfloat16(const Projection* p) { store_all<bf16, bf16>(*p); }
