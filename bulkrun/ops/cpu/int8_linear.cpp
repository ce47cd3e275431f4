// Rows times an int8 weight as an op. Contract: int8_linear.py.

#include "panels.h"

// x [rows, size]; bytes, scales: scratch for whole sixteens of rows, with `words` words each; out [rows, columns].
template <class T>
static void int8_linear(const T* x, uint32_t* bytes, float* scales, const Matrix& matrix, T* out, long rows, long size,
                        long words, long columns, int threads) {
#pragma omp parallel num_threads(threads)
    {
        const TileSetup tiles;
#pragma omp for schedule(static)
        for (long row = 0; row < rows; row++)
            scales[row] = quantize_row(x + row * size, size, (uint8_t*)(bytes + row * words));
        for (const Block& block : blocks_of(rows))
            project<ByteWords>({bytes + block.first * words, words, scales + block.first}, matrix,
                               out + block.first * columns, block.rows, columns, block.share, AsItIs());
    }
}

#if defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
extern "C" void int8_linear_float32(const Matrix* matrix, const float* x, uint32_t* bytes, float* row_scales,
                                    float* out, int64_t rows, int64_t size, int64_t words, int64_t columns,
                                    int32_t num_threads) {
    int8_linear(x, bytes, row_scales, *matrix, out, rows, size, words, columns, num_threads);
}

extern "C" void int8_linear_bfloat16(const Matrix* matrix, const bf16* x, uint32_t* bytes, float* row_scales,
                                     bf16* out, int64_t rows, int64_t size, int64_t words, int64_t columns,
                                     int32_t num_threads) {
    int8_linear(x, bytes, row_scales, *matrix, out, rows, size, words, columns, num_threads);
}
#endif
