// What a KV cache holds, beside activations of some type.
#pragma once

#include <type_traits>

#include "fp8.h"

enum CacheFormat : int32_t { OWN_CACHE, FP8_CACHE, BF16_CACHE };  // own: numbers as those of the activations

// What `use` does with a number of the cache, over activations of T.
template <class T, class F>
inline auto with_cache(int32_t format, const F& use) {
    if (format == FP8_CACHE) return use(fp8());
    if constexpr (std::is_same_v<T, float>)
        if (format == BF16_CACHE) return use(bf16());
    return use(T());
}
