// Small matrix products for one thread, over words: what a lane multiplies at once, one float or a pair of bf16.
// Every sum goes over words in order, whatever the number of rows: a row's result depends on that row alone.
#pragma once

#include <algorithm>
#include <type_traits>

#include "fp8.h"
#include "tiles.h"
#include "transpose.h"
#include "wide.h"

inline long round_up(long n, long to) { return (n + to - 1) / to * to; }

// So many rows and vectors at most have their sums in registers together, beside the columns and one number. Of more rows
// than BLOCK_FEW_ROWS vectors go one by one where there is no room for all.
#if defined(__AVX512F__)
constexpr int BLOCK_ROWS = 6, BLOCK_VECTORS = 4, BLOCK_FEW_ROWS = 6;
#elif defined(__AVX__)
constexpr int BLOCK_ROWS = 6, BLOCK_VECTORS = 2, BLOCK_FEW_ROWS = 2;
#else
constexpr int BLOCK_ROWS = 2, BLOCK_VECTORS = 2, BLOCK_FEW_ROWS = 2;
#endif

// Sixteen words of memory, from number `first` of a vector of `size` on; zeros behind its end.
template <class C>
inline u32x16 load_line(const C* p, long first, long size) {
    const long left = (size - first) * (long)sizeof(C);
    if (left >= (long)sizeof(u32x16)) return load_words((const uint32_t*)(p + first));
    uint32_t x[LANES] = {};
    if (left > 0) memcpy(x, p + first, left);
    return load_words(x);
}

// How many words the numbers are that one word of memory holds.
template <class W, class C>
constexpr int UNPACKED = sizeof(uint32_t) / (W::per_word * sizeof(C));

// One float per word: exact products, on any processor.
struct FloatWords {
    // items: words of a row that meet one of the columns; steps: multiply-adds that they take; rows: of a block.
    static constexpr int per_word = 1, items = 1, steps = 1, rows = BLOCK_ROWS;

    // What of a row's and the columns' words is multiplied in a step.
    static float number(const uint32_t* a, int) {
        float number;
        memcpy(&number, a, sizeof number);
        return number;
    }
    static wide_words column(wide_words b, int) { return b; }

    // UNPACKED vectors of words: the first numbers of sixteen words of memory, then the next ones.
    static void unpack(const float*, u32x16 x, u32x16* words) { words[0] = x; }
    static void unpack(const bf16*, u32x16 x, u32x16* words) { words[0] = x << 16, words[1] = x & 0xffff0000; }
    static void unpack(const fp8*, u32x16 x, u32x16* words) {
        for (int i = 0; i < 4; i++) words[i] = (u32x16)numbers_of(x >> 8 * i & 0xff);
    }

    // Sixteen words of a vector of `size` numbers, from word `first`; zeros behind its end.
    template <class T>
    static u32x16 words(const T* p, long first, long size) {
        return first < size ? (u32x16)load(p + first, size - first) : u32x16{};
    }

    // Words across `per_word` vectors of `size` dimensions, one for each of 32 from `first` on; null stands for zeros.
    template <class T>
    static void mix(const T* const* vectors, long first, long size, u32x16& front, u32x16& back) {
        front = vectors[0] ? words(vectors[0], first, size) : u32x16{};
        back = vectors[0] ? words(vectors[0], first + LANES, size) : u32x16{};
    }

    static void store_numbers(uint32_t* p, long first, f32x16 x) { store_words(p + first, (u32x16)x); }

    // Sixteen words, each of `per_word` numbers: the first of all, and so on.
    static u32x16 joined(const f32x16* numbers) { return (u32x16)numbers[0]; }

    static wide multiply_add(float a, wide_words b, wide c) { return a * (wide)b + c; }
};

// Columns of bf16 in pairs, rows of floats: the products and sums of the floats that the bf16 are, from half the memory.
struct NarrowWords {
    static constexpr int per_word = 2, items = 2, steps = 2, rows = BLOCK_ROWS;

    static float number(const uint32_t* a, int) { return FloatWords::number(a, 0); }
    static wide_words column(wide_words b, int step) { return step ? b & 0xffff0000 : b << 16; }
    static u32x16 joined(const f32x16*) { __builtin_trap(); }  // nobody gets here: codes become floats
    static wide multiply_add(float a, wide_words b, wide c) { return FloatWords::multiply_add(a, b, c); }
};

// The same, unpacked before: two lines of floats for a word, all columns side by side.
struct UnpackedWords : FloatWords {
    static constexpr int per_word = 2, items = 2, steps = 2, columns = 64;
};

#ifdef __AVX512BF16__
// Two bf16 per word, summed in float32 by one instruction.
struct PairWords {
    static constexpr int per_word = 2, items = 1, steps = 1, rows = BLOCK_ROWS;

    static wide_words number(const uint32_t* a, int) { return wide_words{} + *a; }
    static wide_words column(wide_words b, int) { return b; }

    static u32x16 words(const bf16* p, long first, long size) { return load_line(p, 2 * first, size); }

    static void unpack(const bf16*, u32x16 x, u32x16* words) { words[0] = x; }
    static void unpack(const fp8*, u32x16 x, u32x16* words) {
        // of each four vectors: their first pairs, then their second ones
        const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
        to_bf16(_mm512_shuffle_epi8((__m512i)x, _mm512_broadcast_i32x4(order)), words[0], words[1]);
    }

    static void mix(const bf16* const* vectors, long first, long size, u32x16& front, u32x16& back) {
        const __m512i a = (__m512i)numbers(vectors[0], first, size), b = (__m512i)numbers(vectors[1], first, size);
        // numbers i of both, side by side: the second vector's are 32 to 63 in a permutation of two
        front = (u32x16)_mm512_permutex2var_epi16(a, (__m512i)(IOTA | (IOTA + 32) << 16), b);
        back = (u32x16)_mm512_permutex2var_epi16(a, (__m512i)(IOTA + 16 | (IOTA + 48) << 16), b);
    }

    static void mix(const fp8* const* vectors, long first, long size, u32x16& front, u32x16& back) {
        to_bf16(mixed(numbers(vectors[0], first, size), numbers(vectors[1], first, size)), front, back);
    }

    static void store_numbers(uint32_t* p, long first, f32x16 x) { store((bf16*)p + first, x); }

    static u32x16 joined(const f32x16* numbers) {
        const __m512i all = (__m512i)_mm512_cvtne2ps_pbh((__m512)numbers[1], (__m512)numbers[0]);
        return (u32x16)_mm512_permutexvar_epi16((__m512i)(IOTA | (IOTA + 16) << 16), all);
    }

    static wide multiply_add(wide_words a, wide_words b, wide c) {
        return (wide)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
    }

  private:
    static u32x16 numbers(const bf16* p, long first, long size) { return p ? load_line(p, first, size) : u32x16{}; }

    // Half of a line: no more is used, nor may more be there.
    static u32x16 numbers(const fp8* p, long first, long size) {
        const long left = p ? size - first : 0;
        if (left >= 2 * LANES) return (u32x16)_mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)(p + first)));
        if (left <= 0) return u32x16{};  // where nothing may be read, a masked load takes as long as a fault
        return (u32x16)_mm512_castsi256_si512(_mm256_maskz_loadu_epi8(~0u >> (2 * LANES - left), p + first));
    }
};
#endif

template <class T>
struct WordOf {
    using type = FloatWords;
};
#ifdef __AVX512BF16__
template <>
struct WordOf<bf16> {
    using type = PairWords;
};
#endif

// All words across vectors. `out`: padded to 32.
template <class W, class T>
inline void interleave(const T* const* vectors, long size, uint32_t* out) {
    for (long i = 0; i < size; i += 2 * LANES) {
        u32x16 front, back;
        W::mix(vectors, i, size, front, back);
        store_words(out + i, front);
        store_words(out + i + LANES, back);
    }
}

// The same from one place to another. Strides in words.
inline void transpose(const uint32_t* from, long from_stride, uint32_t* to, long to_stride) {
    u32x16 square[LANES];
    for (int i = 0; i < LANES; i++) square[i] = load_words(from + i * from_stride);
    transpose(square);
    for (int i = 0; i < LANES; i++) store_words(to + i * to_stride, square[i]);
}

// Columns of a product: vectors side by side, two and two; pairs of them lie `apart`.
template <class T>
struct Columns {
    T* first;
    long stride, apart;

    T* at(long row, long vector) const { return first + row * stride + vector / 2 * apart + vector % 2 * LANES; }
    T* wide_at(long row, long n) const { return at(row, n / PER_VECTOR) + n % PER_VECTOR * WIDTH; }
};

// What is asked for while something is multiplied: from two places on, so many bytes of each per word.
struct Ahead {
    const char *here, *there;
    long step;
};

// c [R, 16 V] (+)= a [R, words] b [words, 16 V]: the sums stay in registers. a_stride: in items.
template <class W, int R, int V>
void multiply_block(const uint32_t* a, long a_stride, Columns<const uint32_t> b, Columns<float> c, long words,
                    bool accumulate, Ahead ahead) {
    constexpr int N = V * PER_VECTOR;
    constexpr bool is_unpacked = std::is_same<W, UnpackedWords>::value;
    if (is_unpacked) b = {b.first, UnpackedWords::columns, UnpackedWords::columns / 2};  // the compiler knows them now
    wide sums[R][N];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) sums[r][n] = accumulate ? load_wide(c.wide_at(r, n)) : wide{};
    for (long word = 0; word < words; word++, ahead.here += ahead.step, ahead.there += ahead.step) {
        __builtin_prefetch(ahead.here, 0, 2);
        __builtin_prefetch(ahead.there, 0, 2);
#pragma GCC unroll 2
        for (int step = 0; step < W::steps; step++) {
            const uint32_t* row = a + word * W::items + (W::items > 1 ? step : 0);
            const long line = is_unpacked ? word * W::steps + step : word;
            wide_words columns[N];
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) columns[n] = W::column(load_wide_words(b.wide_at(line, n)), step);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const auto number = W::number(row + r * a_stride, step);
#pragma GCC unroll 8
                for (int n = 0; n < N; n++) sums[r][n] = W::multiply_add(number, columns[n], sums[r][n]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) store_wide(c.wide_at(r, n), sums[r][n]);
}

template <class W, int V = BLOCK_VECTORS, int R = (V > 1 ? BLOCK_FEW_ROWS : W::rows)>
void multiply_up_to(long rows, long vectors, const uint32_t* a, long a_stride, Columns<const uint32_t> b,
                    Columns<float> c, long words, bool accumulate, Ahead ahead) {
    if constexpr (V > 1)
        if (vectors < V) return multiply_up_to<W, V - 1>(rows, vectors, a, a_stride, b, c, words, accumulate, ahead);
    if constexpr (R > 1)
        if (rows < R) return multiply_up_to<W, V, R - 1>(rows, vectors, a, a_stride, b, c, words, accumulate, ahead);
    multiply_block<W, R, V>(a, a_stride, b, c, words, accumulate, ahead);
}

// The same for any number of rows, cut in even pieces: sums of few rows alone wait for each other.
template <class W>
void multiply_columns(long rows, long vectors, const uint32_t* a, long a_stride, Columns<const uint32_t> b,
                      Columns<float> c, long words, bool accumulate, Ahead ahead) {
    if (BLOCK_FEW_ROWS < W::rows && rows > BLOCK_FEW_ROWS && vectors > 1) {
        ahead.step /= vectors;
        for (long vector = 0; vector < vectors; vector++) {
            multiply_columns<W>(rows, 1, a, a_stride, {b.at(0, vector), b.stride, 0}, {c.at(0, vector), c.stride, 0},
                                words, accumulate, ahead);
            ahead.here += words * ahead.step, ahead.there += words * ahead.step;
        }
        return;
    }
    const unsigned pieces = (rows + W::rows - 1) / W::rows, least = rows / std::max(pieces, 1u);
    long extra = rows - least * pieces;
    ahead.step = (ahead.step + pieces - 1) / std::max(pieces, 1u);
    for (long first = 0, here; first < rows; first += here) {
        here = least + (extra-- > 0);
        multiply_up_to<W>(here, vectors, a + first * a_stride, a_stride, b, {c.at(first, 0), c.stride, c.apart}, words,
                          accumulate, ahead);
        ahead.here += words * ahead.step, ahead.there += words * ahead.step;
    }
}

// c [rows, columns] (+)= a [rows, words] b [words, columns]. Strides in words and floats. columns, and words of pairs:
// multiples of 16. There must be room for 16 rows where there are fewer: what stands there may be used and changed.
template <class W>
void multiply(const uint32_t* a, long a_stride, const uint32_t* b, long b_stride, float* c, long c_stride, long rows,
              long words, long columns, bool accumulate) {
#ifdef __AMX_BF16__
    if (W::per_word == 2 && has_tiles())
        return multiply_tiles(a, a_stride, b, b_stride, c, c_stride, rows, words, columns, accumulate);
#endif
    constexpr int width = BLOCK_VECTORS * LANES;
    for (long column = 0; column < columns; column += width)
        multiply_columns<W>(rows, std::min<long>(columns - column, width) / LANES, a, a_stride,
                            {b + column, b_stride, 2 * LANES}, {c + column, c_stride, 2 * LANES}, words, accumulate,
                            {(const char*)a, (const char*)a, 0});
}
