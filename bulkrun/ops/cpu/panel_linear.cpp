// Rows times a packed weight as an op. Contract: panel_linear.py.

#include "panels.h"

// x [rows, per_word * words], with room for whole sixteens of rows; out [rows, columns].
template <class T>
static void panel_linear(const T* x, const Matrix& matrix, T* out, long rows, long words, long columns, int threads) {
    using W = typename WordOf<T>::type;
    const long size = words * W::per_word;
#pragma omp parallel num_threads(threads)
    {
        const TileSetup tiles;
        for (const Block& block : blocks_of(rows))
            project<W>(operand(x + block.first * size, size), matrix, out + block.first * columns, block.rows, columns,
                       1.0f, block.share);
    }
}

// Every PANEL rows of a weight [rows, words] become a panel, in the memory they have. By one thread: others are reading
// the next weights, and threads that wait for the next product would take their time.
extern "C" void pack_panels(uint32_t* weight, int64_t rows, int64_t words) {
    std::vector<uint32_t> plain(PANEL * words);
    for (uint32_t* panel = weight; panel < weight + rows * words; panel += PANEL * words) {
        memcpy(plain.data(), panel, sizeof(uint32_t) * PANEL * words);
        for (int64_t word = 0; word < words; word += LANES)
            for (int64_t row = 0; row < PANEL; row += LANES)
                transpose(plain.data() + row * words + word, words, panel + word * PANEL + row, PANEL);
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
