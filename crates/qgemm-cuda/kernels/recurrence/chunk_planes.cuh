// Linear attention in chunks: operands of a
// chunk in shared memory, and products with them
// in bf16 numbers (bf16x3).
#pragma once
#include "atoms/ldmatrix.cuh"
#include "atoms/mma.cuh"
#include "dequant/bf16_split.cuh"
#include "recurrence/chunked.cuh"

// Features of queries and keys, and of a row of
// the matrices. Eight more columns avoid bank
// conflicts.
constexpr u32 MOST_DIM = 128, WIDE = MOST_DIM + 8, NARROW = CHUNK + 8;

// bf16 numbers of an element: hi and lo. A
// stored bf16 number is its own hi, unless a
// decay of its feature is a factor.
constexpr u32 PARTS = QG_X_DTYPE == DTYPE_BF16 && !QG_DECAY_FEATURES ? 1 : 2;

// A matrix of bf16 numbers, [CHUNK][PITCH], in
// `COUNT` parts.
template <u32 PITCH, u32 COUNT>
struct Plane {
    alignas(16) u16 parts[COUNT][CHUNK][PITCH];

    QG_DEVICE void put_pair(Plane& plane, u32 row, u32 column, float first, float second) {
        u32 hi, lo;
        split_finite_bf16x2(hi, lo, first, second);
        st_shared(reinterpret_cast<u32*>(&plane.parts[0][row][column]), hi);
        if constexpr (COUNT == 2) st_shared(reinterpret_cast<u32*>(&plane.parts[COUNT - 1][row][column]), lo);
    }

    // Stores eight numbers as they are, or as two
    // bf16 numbers each.
    QG_DEVICE void put_eight(Plane& plane, u32 row, u32 column, const Eight<QG_X_DTYPE>& stored) {
        if constexpr (COUNT == 1) {
            put_words(plane, 0, row, column, stored.words);
        } else {
            u32 hi[4], lo[4];
#pragma unroll
            for (u32 j = 0; j < 4; j++)
                split_finite_bf16x2(hi[j], lo[j], Eight<QG_X_DTYPE>::number(stored, j * 2),
                                    Eight<QG_X_DTYPE>::number(stored, j * 2 + 1));
            put_words(plane, 0, row, column, hi);
            put_words(plane, COUNT - 1, row, column, lo);
        }
    }
    QG_DEVICE void put_words(Plane& plane, u32 part, u32 row, u32 column, const u32 (&words)[4]) {
        st_shared(reinterpret_cast<u32x4*>(&plane.parts[part][row][column]),
                  u32x4{words[0], words[1], words[2], words[3]});
    }

    QG_DEVICE const u8* address(const Plane& plane, u32 part, u32 row, u32 column) {
        return reinterpret_cast<const u8*>(&plane.parts[part][row][column]);
    }
};

// Matrices of a chunk, and factors of its
// tokens.
struct ChunkNumbers {
    Plane<NARROW, 2> matrices[CHUNK_MATRICES];
#if !QG_DECAY_FEATURES
    TokenFactors factors[CHUNK];
#endif
};

struct ChunkPlanes {
    Plane<WIDE, PARTS> key, query;
#if QG_DECAY_FEATURES
    // Keys that decay to the chunk's end. Keys and
    // queries decay from its begin.
    Plane<WIDE, PARTS> key_of_state;
    // Decay of the chunk, of each feature.
    float decay[MOST_DIM];
#endif
};

// An A operand: 16 × 16 accumulators as two bf16
// numbers each.
struct SplitA {
    u32 hi[4], lo[4];

    // Of two accumulator tiles that are adjacent
    // along K.
    QG_DEVICE SplitA of(const float (&first)[4], const float (&second)[4]) {
        SplitA a;
        split(a, 0, first[0], first[1]);
        split(a, 1, first[2], first[3]);
        split(a, 2, second[0], second[1]);
        split(a, 3, second[2], second[3]);
        return a;
    }
    QG_DEVICE void split(SplitA& a, u32 i, float first, float second) {
        split_finite_bf16x2(a.hi[i], a.lo[i], first, second);
    }
};

// Without A_HAS_LOW, A's lo is 0.
template <bool A_HAS_LOW, u32 COUNT>
QG_DEVICE void add_product(float (&acc)[4], const SplitA& a, const u32 (&b)[COUNT][4], u32 half) {
    const u32 hi[2] = {b[0][half * 2], b[0][half * 2 + 1]};
    if constexpr (A_HAS_LOW) mma_m16n8k16_bf16(acc, a.lo, hi);
    if constexpr (COUNT == 2) {
        const u32 lo[2] = {b[1][half * 2], b[1][half * 2 + 1]};
        mma_m16n8k16_bf16(acc, a.hi, lo);
    }
    mma_m16n8k16_bf16(acc, a.hi, hi);
}

// acc += A · Bᵀ for 16 rows of B, which is
// [row][K].
template <bool A_HAS_LOW = true, u32 PITCH, u32 COUNT>
QG_DEVICE void multiply_rows(float (&first)[4], float (&second)[4], const SplitA& a, const Plane<PITCH, COUNT>& b,
                             u32 row, u32 column, u32 lane) {
    const u32 r = row + lane / 16 * 8 + lane % 8, c = column + lane / 8 % 2 * 8;
    u32 of_b[COUNT][4];
#pragma unroll
    for (u32 part = 0; part < COUNT; part++) ldmatrix_x4(of_b[part], Plane<PITCH, COUNT>::address(b, part, r, c));
    add_product<A_HAS_LOW>(first, a, of_b, 0);
    add_product<A_HAS_LOW>(second, a, of_b, 1);
}

// acc += A · B for 16 columns of B, which is
// [K][column].
template <u32 PITCH, u32 COUNT>
QG_DEVICE void multiply_columns(float (&first)[4], float (&second)[4], const SplitA& a, const Plane<PITCH, COUNT>& b,
                                u32 row, u32 column, u32 lane) {
    const u32 r = row + lane % 16, c = column + lane / 16 * 8;
    u32 of_b[COUNT][4];
#pragma unroll
    for (u32 part = 0; part < COUNT; part++) ldmatrix_x4_trans(of_b[part], Plane<PITCH, COUNT>::address(b, part, r, c));
    add_product<true>(first, a, of_b, 0);
    add_product<true>(second, a, of_b, 1);
}
