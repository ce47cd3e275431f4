// Sixteen numbers in the registers of a processor that has none for sixteen floats, with the operators of GCC's vector
// extensions: a vector of theirs that takes several registers GCC keeps in memory, each time it changes.
// WIDTH is how many floats a register holds. Knows no number formats but those of C.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "width.h"

template <class E>
struct Sixteen {
    typedef E Part __attribute__((vector_size(4 * WIDTH)));
    static constexpr int PARTS = 16 / WIDTH;

    Part part[PARTS];

    E operator[](int lane) const { return part[lane / WIDTH][lane % WIDTH]; }

    // The same bits as numbers of another kind.
    template <class F>
    explicit operator Sixteen<F>() const {
        return each<F>([&](int i) { return (typename Sixteen<F>::Part)part[i]; });
    }

    // Made of its parts, each of which `of` gives by its number.
    template <class F = E, class Of>
    static Sixteen<F> each(Of of) {
        Sixteen<F> made;
#pragma GCC unroll 4
        for (int i = 0; i < PARTS; i++) made.part[i] = of(i);
        return made;
    }
};

typedef Sixteen<float> f32x16;
typedef Sixteen<int32_t> i32x16;
typedef Sixteen<uint32_t> u32x16;

template <class S>
using OfScalar = std::enable_if_t<std::is_arithmetic_v<S>, int>;

#define BINARY(OP)                                                                             \
    template <class E>                                                                         \
    inline Sixteen<E> operator OP(Sixteen<E> a, Sixteen<E> b) {                                \
        return Sixteen<E>::each([&](int i) { return a.part[i] OP b.part[i]; });                \
    }                                                                                          \
    template <class E, class S, OfScalar<S> = 0>                                               \
    inline Sixteen<E> operator OP(Sixteen<E> a, S b) {                                         \
        return Sixteen<E>::each([&](int i) { return a.part[i] OP (E)b; });                     \
    }                                                                                          \
    template <class E, class S, OfScalar<S> = 0>                                               \
    inline Sixteen<E> operator OP(S a, Sixteen<E> b) {                                         \
        return Sixteen<E>::each([&](int i) { return (typename Sixteen<E>::Part{} + (E)a) OP b.part[i]; }); \
    }                                                                                          \
    template <class E, class B>                                                                \
    inline Sixteen<E>& operator OP##=(Sixteen<E>& a, B b) {                                    \
        return a = a OP b;                                                                     \
    }

#define COMPARISON(OP)                                                                         \
    template <class E, class B>                                                                \
    inline i32x16 operator OP(Sixteen<E> a, B b) {                                             \
        return compared(a, b, [](auto x, auto y) { return (i32x16::Part)(x OP y); });          \
    }

template <class E, class Compare>
inline i32x16 compared(Sixteen<E> a, Sixteen<E> b, Compare compare) {
    return i32x16::each([&](int i) { return compare(a.part[i], b.part[i]); });
}

template <class E, class S, class Compare, OfScalar<S> = 0>
inline i32x16 compared(Sixteen<E> a, S b, Compare compare) {
    return i32x16::each([&](int i) { return compare(a.part[i], typename Sixteen<E>::Part{} + (E)b); });
}

BINARY(+) BINARY(-) BINARY(*) BINARY(/) BINARY(&) BINARY(|) BINARY(^) BINARY(<<) BINARY(>>)
COMPARISON(<) COMPARISON(<=) COMPARISON(>) COMPARISON(>=) COMPARISON(==) COMPARISON(!=)

#undef BINARY
#undef COMPARISON

template <class E>
inline Sixteen<E> operator-(Sixteen<E> a) { return Sixteen<E>::each([&](int i) { return -a.part[i]; }); }

// Of each pair the first where the mask holds.
template <class E>
inline Sixteen<E> select(i32x16 mask, Sixteen<E> a, Sixteen<E> b) {
    return Sixteen<E>::each([&](int i) { return mask.part[i] ? a.part[i] : b.part[i]; });
}

// As wide as an array; memory of any alignment.
template <class E>
inline Sixteen<E> load_parts(const void* p) {
    return Sixteen<E>::each([&](int i) {
        typename Sixteen<E>::Part part;
        memcpy(&part, (const char*)p + i * sizeof part, sizeof part);
        return part;
    });
}

template <class E>
inline void store_parts(void* p, Sixteen<E> x) {
#pragma GCC unroll 4
    for (int i = 0; i < x.PARTS; i++) memcpy((char*)p + i * sizeof x.part[i], &x.part[i], sizeof x.part[i]);
}

// Of smaller numbers in memory, each as one of E.
template <class E, class S>
inline Sixteen<E> load_converted(const S* p) {
    typedef S Narrow __attribute__((vector_size(sizeof(S) * WIDTH)));
    return Sixteen<E>::each([&](int i) {
        Narrow narrow;
        memcpy(&narrow, p + i * WIDTH, sizeof narrow);
        return __builtin_convertvector(narrow, typename Sixteen<E>::Part);
    });
}

// Each as a smaller number, which it fits.
template <class S, class E>
inline void store_converted(S* p, Sixteen<E> x) {
    typedef S Narrow __attribute__((vector_size(sizeof(S) * WIDTH)));
#pragma GCC unroll 4
    for (int i = 0; i < x.PARTS; i++) {
        const Narrow narrow = __builtin_convertvector(x.part[i], Narrow);
        memcpy(p + i * WIDTH, &narrow, sizeof narrow);
    }
}

template <class F, class E>
inline Sixteen<F> converted(Sixteen<E> x) {
    return Sixteen<F>::each([&](int i) { return __builtin_convertvector(x.part[i], typename Sixteen<F>::Part); });
}

// All parts in one, by an operation on two.
template <class E, class Fold>
inline typename Sixteen<E>::Part folded(Sixteen<E> x, Fold fold) {
    auto all = x.part[0];
#pragma GCC unroll 4
    for (int i = 1; i < x.PARTS; i++) all = fold(all, x.part[i]);
    return all;
}
