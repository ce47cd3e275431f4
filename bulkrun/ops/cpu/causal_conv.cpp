// A short convolution as an op. Contract: ops/linear_attention/causal_conv.py.

#include "causal_conv.h"

#include "struct_layout.h"

template <class T>
static void run(const Convolution& c) {
#pragma omp parallel num_threads(c.num_threads)
    convolve<T>(c);
    const long real = c.cu_seqlens[c.num_seqs];
    std::fill((T*)c.out + real * c.num_channels, (T*)c.out + c.num_tokens * c.num_channels, T{});
}

EXPORT_LAYOUT(Convolution, num_threads)
extern "C" void causal_conv_float32(const Convolution* c) { run<float>(*c); }
extern "C" void causal_conv_bfloat16(const Convolution* c) { run<bf16>(*c); }
