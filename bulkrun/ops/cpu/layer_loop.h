// Layers over a step in one call and one parallel region: what decoders and encoders have in common. Knows no layer.
//
// Of few tokens threads share each product's columns and go through a layer together. Of many each thread takes some,
// block by block, from where one layer has mixed its tokens up to where the next one does, and all meet for that alone:
// attention, or what stands in its place. Of the last layer, or of the last one that makes keys of its own, most tokens
// may be needed for others to mix with, and no more: only those that are kept go on.

#pragma once

#include <cstdlib>

#include "attention_items.h"
#include "block_products.h"

// `layers` has the call's struct as `s`, and does the work: `up_to_mixing(i, block)`, `mix(i, memory)` with all threads
// in memory of their own, `move_kept(i)` after layer `last_full()` and those behind, and `after_mixing(i, block)`.
template <class W, class Layers>
void run_layers(const Layers& layers) {
    const auto& s = layers.s;
#pragma omp parallel num_threads(s.num_threads)
    {
        char* memory = (char*)aligned_alloc(64, round_up(Rows<W>::bytes(s.head_dim), 64));
        const TileSetup tiles;
        const std::vector<Block> all = blocks_of(s.num_tokens), kept = blocks_of(s.num_kept);
        for (long i = 0; i < s.num_layers; i++) {
            for (const Block& block : i <= layers.last_full() ? all : kept) layers.up_to_mixing(i, block);
#pragma omp barrier
            layers.mix(i, memory);
            if (s.kept && i >= layers.last_full()) {
#pragma omp single
                layers.move_kept(i);
            }
        }
        for (const Block& block : kept) layers.after_mixing(s.num_layers - 1, block);
        free(memory);
    }
}
