// Has the kernel find memory for pages before somebody writes there. Contract: touch_pages.py.

#include <cstdint>

// The least page there is. Of a larger one the first touch does it and the others cost next to nothing.
static const int64_t PAGE_BYTES = 4096;

// Each thread has ranges of its own: within one they would wait for each other at every huge page.
extern "C" void touch_pages(char* const* ranges, int64_t num_ranges, int64_t first, int64_t end, int num_threads) {
#pragma omp parallel for num_threads(num_threads) schedule(dynamic)
    for (int64_t range = 0; range < num_ranges; range++)
        for (int64_t at = first; at < end; at += PAGE_BYTES)
            __atomic_fetch_or(ranges[range] + at, 0, __ATOMIC_RELAXED);  // a write that leaves what is there
}
