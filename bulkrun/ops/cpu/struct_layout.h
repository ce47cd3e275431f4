// What Python checks its mirror of a struct against when it first loads a function that takes one (structs.py).
#pragma once

#include <cstddef>
#include <cstdint>

#define EXPORT_LAYOUT(STRUCT, LAST_FIELD)                                                  \
    extern "C" int64_t sizeof_##STRUCT() { return sizeof(STRUCT); }                        \
    extern "C" int64_t offset_of_last_in_##STRUCT() { return offsetof(STRUCT, LAST_FIELD); }
