// Rows times a packed weight as an op. Contract: panel_linear.py.

#include "panels.h"

// x [rows, size], with room for whole sixteens of rows; out [rows, columns].
template <class T>
static void panel_linear(const T* x, const Matrix& matrix, T* out, long rows, long size, long columns, int threads) {
    with_words<T>(matrix, [&](auto words) {
        using W = decltype(words);
#pragma omp parallel num_threads(threads)
        {
            const TileSetup tiles;
            for (const Block& block : blocks_of(rows))
                project<W>(operand<W>(x + block.first * size, size), matrix, out + block.first * columns, block.rows,
                           columns, block.share, AsItIs());
        }
    });
}

// Every PANEL rows of a weight [rows, words] become a panel, in the memory they have. By one thread: others are reading
// the next weights, and threads that wait for the next product would take their time.
extern "C" void pack_panels(uint32_t* weight, int64_t rows, int64_t words) {
    std::vector<uint32_t> plain(PANEL * words);
    for (uint32_t* panel = weight; panel < weight + rows * words; panel += PANEL * words) {
        memcpy(plain.data(), panel, sizeof(uint32_t) * PANEL * words);
        int64_t word = 0;
        for (; word + LANES <= words; word += LANES)
            for (int64_t row = 0; row < PANEL; row += LANES)
                transpose(plain.data() + row * words + word, words, panel + word * PANEL + row, PANEL);
        for (; word < words; word++)
            for (int64_t row = 0; row < PANEL; row++) panel[word * PANEL + row] = plain[row * words + word];
    }
}

#ifdef __AVX2__
extern "C" void panel_linear_float32(const Matrix* matrix, const float* x, float* out, int64_t rows, int64_t size,
                                     int64_t columns, int32_t num_threads) {
    panel_linear(x, *matrix, out, rows, size, columns, num_threads);
}
#endif
#ifdef __AVX512BF16__
extern "C" void panel_linear_bfloat16(const Matrix* matrix, const bf16* x, bf16* out, int64_t rows, int64_t size,
                                      int64_t columns, int32_t num_threads) {
    panel_linear(x, *matrix, out, rows, size, columns, num_threads);
}
#endif
