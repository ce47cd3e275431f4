// Rows times a packed weight as an op. Contract: panel_linear.py.

#include "panels.h"

// x [rows, per_word * words], with room for whole sixteens of rows; out [rows, columns].
template <class T>
static void panel_linear(const T* x, const Matrix& matrix, T* out, long rows, long words, long columns, int threads) {
    const long size = words * WordOf<T>::type::per_word;
#pragma omp parallel num_threads(threads)
    {
        const TileSetup tiles;
        for (const Block& block : blocks_of(rows))
            project(x + block.first * size, matrix, out + block.first * columns, block.rows, words, columns, 1.0f,
                    block.share);
    }
}

#ifdef __AVX512F__
extern "C" void panel_linear_float32(const float* x, const void* panels, const void* bias, float* out, int64_t rows,
                                     int64_t words, int64_t columns, int32_t num_threads) {
    panel_linear(x, {panels, bias}, out, rows, words, columns, num_threads);
}
#endif
#ifdef __AVX512BF16__
extern "C" void panel_linear_bfloat16(const bf16* x, const void* panels, const void* bias, bf16* out, int64_t rows,
                                      int64_t words, int64_t columns, int32_t num_threads) {
    panel_linear(x, {panels, bias}, out, rows, words, columns, num_threads);
}
#endif
