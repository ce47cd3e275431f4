// Rows times a packed weight as an op, on the tile unit alone. Contract: panel_linear.py.

#include "panels.h"

extern "C" int has_tile_unit() { return has_tiles(); }

#ifdef __AMX_BF16__
// x [rows, 2 words], with room for whole sixteens of rows; out [rows, columns].
extern "C" void panel_linear(const bf16* x, const void* panels, const void* bias, bf16* out, int64_t rows,
                             int64_t words, int64_t columns, int32_t num_threads) {
    const Matrix matrix = {panels, bias};
#pragma omp parallel num_threads(num_threads)
    {
        const TileSetup tiles;
        for (const Block& block : blocks_of(rows))
            project(x + block.first * 2 * words, matrix, out + block.first * columns, block.rows, words, columns, 1.0f,
                    block.share);
    }
}
#endif
