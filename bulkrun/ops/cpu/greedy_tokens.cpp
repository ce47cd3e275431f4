// The largest number of each row and where it stands first. Contract: ops/sampling/greedy_tokens.py.

#include "logits.h"

template <class T>
static void greedy_token(const T* row, long size, int64_t* token, bool* is_valid) {
    const Highest highest = highest_of(row, size);
    *is_valid = highest.is_valid;
    *token = highest.is_valid ? first_place(row, size, highest.number) : 0;
}

#define GREEDY_TOKENS(T, T_NAME)                                                                                  \
    extern "C" void greedy_tokens_##T_NAME(const T* logits, int64_t* tokens, bool* is_valid, int64_t rows,        \
                                           int64_t size, int num_threads) {                                       \
        _Pragma("omp parallel for num_threads(num_threads) if (rows * size > FEW_LOGITS)")                        \
        for (long row = 0; row < rows; row++)                                                                     \
            greedy_token(logits + row * size, size, tokens + row, is_valid + row);                                \
    }

GREEDY_TOKENS(float, float32)
GREEDY_TOKENS(bf16, bfloat16)
