// Linear attention in chunks:
// operands of a chunk in shared memory,
// two bf16 numbers each (bf16x3).
#pragma once
#include "atoms/ldmatrix.cuh"
#include "atoms/mma.cuh"
#include "dequant/bf16_split.cuh"
#include "recurrence/chunked.cuh"
#include "recurrence/query_and_key.cuh"

// Features of queries and keys,
// and of a row of the matrices.
// Eight more columns avoid bank conflicts.
constexpr u32 MOST_DIM = 128, WIDE = MOST_DIM + 8, NARROW = CHUNK + 8;

// A matrix of 16-bit elements, [CHUNK][PITCH]: hi, then lo.
template <u32 PITCH>
struct Plane {
    alignas(16) u16 parts[2][CHUNK][PITCH];

    QG_DEVICE void put_pair(Plane& plane, u32 row, u32 column, float first, float second) {
        u32 hi, lo;
        split_bf16x2(hi, lo, f32_to_bits(first), f32_to_bits(second));
        st_shared(reinterpret_cast<u32*>(&plane.parts[0][row][column]), hi);
        st_shared(reinterpret_cast<u32*>(&plane.parts[1][row][column]), lo);
    }

    QG_DEVICE void put_eight(Plane& plane, u32 row, u32 column, const float (&v)[8], float factor) {
        u32 hi[4], lo[4];
#pragma unroll
        for (u32 j = 0; j < 4; j++)
            split_bf16x2(hi[j], lo[j], f32_to_bits(scaled(v[j * 2], factor)), f32_to_bits(scaled(v[j * 2 + 1], factor)));
        st_shared(reinterpret_cast<u32x4*>(&plane.parts[0][row][column]), u32x4{hi[0], hi[1], hi[2], hi[3]});
        st_shared(reinterpret_cast<u32x4*>(&plane.parts[1][row][column]), u32x4{lo[0], lo[1], lo[2], lo[3]});
    }

    QG_DEVICE const u8* address(const Plane& plane, u32 part, u32 row, u32 column) {
        return reinterpret_cast<const u8*>(&plane.parts[part][row][column]);
    }
};

struct ChunkPlanes {
    // Keys and queries that decay from the chunk's
    // begin, and keys that decay to its end.
    Plane<WIDE> key, query, key_of_state;
    Plane<NARROW> inverse, outputs;
    // Decay of the chunk, of each feature.
    float decay[MOST_DIM];
};

// An A operand: 16 × 16 accumulators as two bf16 numbers each.
struct SplitA {
    u32 hi[4], lo[4];

    // Of two accumulator tiles that are adjacent along K.
    QG_DEVICE SplitA of(const float (&first)[4], const float (&second)[4]) {
        SplitA a;
        split(a, 0, first[0], first[1]);
        split(a, 1, first[2], first[3]);
        split(a, 2, second[0], second[1]);
        split(a, 3, second[2], second[3]);
        return a;
    }
    QG_DEVICE void split(SplitA& a, u32 i, float first, float second) {
        split_bf16x2(a.hi[i], a.lo[i], f32_to_bits(first), f32_to_bits(second));
    }
};

QG_DEVICE void add_product(float (&acc)[4], const SplitA& a, const u32 (&hi)[4], const u32 (&lo)[4], u32 half) {
    const u32 of_hi[2] = {hi[half * 2], hi[half * 2 + 1]}, of_lo[2] = {lo[half * 2], lo[half * 2 + 1]};
    mma_m16n8k16_bf16(acc, a.lo, of_hi);
    mma_m16n8k16_bf16(acc, a.hi, of_lo);
    mma_m16n8k16_bf16(acc, a.hi, of_hi);
}

// acc += A · Bᵀ for 16 rows of B, which is [row][K].
template <u32 PITCH>
QG_DEVICE void multiply_rows(float (&first)[4], float (&second)[4], const SplitA& a, const Plane<PITCH>& b, u32 row,
                             u32 column, u32 lane) {
    const u32 r = row + lane / 16 * 8 + lane % 8, c = column + lane / 8 % 2 * 8;
    u32 hi[4], lo[4];
    ldmatrix_x4(hi, Plane<PITCH>::address(b, 0, r, c));
    ldmatrix_x4(lo, Plane<PITCH>::address(b, 1, r, c));
    add_product(first, a, hi, lo, 0);
    add_product(second, a, hi, lo, 1);
}

// acc += A · B for 16 columns of B, which is [K][column].
template <u32 PITCH>
QG_DEVICE void multiply_columns(float (&first)[4], float (&second)[4], const SplitA& a, const Plane<PITCH>& b, u32 row,
                                u32 column, u32 lane) {
    const u32 r = row + lane % 16, c = column + lane / 16 * 8;
    u32 hi[4], lo[4];
    ldmatrix_x4_trans(hi, Plane<PITCH>::address(b, 0, r, c));
    ldmatrix_x4_trans(lo, Plane<PITCH>::address(b, 1, r, c));
    add_product(first, a, hi, lo, 0);
    add_product(second, a, hi, lo, 1);
}

// Queries and keys of a chunk
// whose decays are a number a token.
QG_DEVICE void load_rows(ChunkPlanes& planes, const ChunkedParams& p, const Segment& segment, u32 begin, u32 count) {
    const u32 groups = p.attention.shape.qk_dim / 8;
#pragma unroll 1
    for (u32 at = thread_index(); at < CHUNK * groups; at += QG_THREADS) {
        const u32 i = at / groups, column = at % groups * 8;
        float q[8] = {}, k[8] = {};
        f32x4 factors = {};
        if (i < count) {
            QueryAndKey::load_eight_of(p.attention, segment.key_head, segment.first + begin + i, column, q, k);
            factors = ld_global_cg_f32x4(factors_of(p, row_of(p, segment, begin + i)));
        }
        Plane<WIDE>::put_eight(planes.query, i, column, q, factors.x);
        Plane<WIDE>::put_eight(planes.key, i, column, k, factors.y);
        Plane<WIDE>::put_eight(planes.key_of_state, i, column, k, factors.z);
    }
}

// Queries and keys whose features decay by
// themselves: a thread has two features.
QG_DEVICE void load_features(ChunkPlanes& planes, const ChunkedParams& p, const Segment& segment, u32 begin, u32 count) {
    const LinearAttentionParams& attention = p.attention;
    const u32 feature = thread_index() * 2, first = segment.first + begin;
    if (feature >= attention.shape.qk_dim) return;
    const u32 index = segment.head * attention.shape.qk_dim + feature;
    Decays all[2] = {Decays::none(), Decays::none()};
#pragma unroll 1
    for (u32 i = 0; i < count; i++)
#pragma unroll
        for (u32 j = 0; j < 2; j++)
            Decays::add(all[j], i, log_decay_of(attention, first + i, segment.head, index + j));
#pragma unroll
    for (u32 j = 0; j < 2; j++)
        st_shared(&planes.decay[feature + j], decay_from_begin(all[j].resets, CHUNK - 1, all[j].sum));
    Decays own[2] = {Decays::none(), Decays::none()};
    // The sums are made again:
    // there are no registers for all of them.
#pragma unroll 1
    for (u32 i = 0; i < CHUNK; i++) {
        float query[2] = {}, key[2] = {}, of_state[2] = {};
        if (i < count) {
            const u64 q = (first + i) * attention.at.q_token + segment.key_head * attention.at.q_head + feature;
            const u64 k = (first + i) * attention.at.k_token + segment.key_head * attention.at.k_head + feature;
            const f32x4 factors = ld_global_cg_f32x4(factors_of(p, row_of(p, segment, begin + i)));
#pragma unroll
            for (u32 j = 0; j < 2; j++) {
                Decays::add(own[j], i, log_decay_of(attention, first + i, segment.head, index + j));
                const float from_begin = decay_from_begin(own[j].resets, i, own[j].sum);
                const float to_end = decay_between(all[j].resets, i, CHUNK - 1, own[j].sum, all[j].sum);
                const float stored = load_dense(QG_X_DTYPE, attention.at.k, k + j);
                query[j] = scaled(load_dense(QG_X_DTYPE, attention.at.q, q + j) * factors.x, from_begin);
                key[j] = scaled(stored * factors.y, from_begin);
                of_state[j] = scaled(stored * factors.z, to_end);
            }
        }
        Plane<WIDE>::put_pair(planes.query, i, feature, query[0], query[1]);
        Plane<WIDE>::put_pair(planes.key, i, feature, key[0], key[1]);
        Plane<WIDE>::put_pair(planes.key_of_state, i, feature, of_state[0], of_state[1]);
    }
}

// The matrices of a chunk. Rows beyond `count` are zeros.
QG_DEVICE void load_matrices(ChunkPlanes& planes, const ChunkedParams& p, u64 first_row, u32 count) {
    const bool delta = p.attention.shape.flags & QG_FLAG_DELTA;
#pragma unroll 1
    for (u32 at = thread_index(); at < CHUNK * (CHUNK / 4); at += QG_THREADS) {
        const u32 i = at / (CHUNK / 4), column = at % (CHUNK / 4) * 4;
        const float* row = matrix_row(p, first_row + i) + column;
        f32x4 inverse = {}, outputs = {};
        if (i < count) {
            if (delta) inverse = ld_global_cg_f32x4(reinterpret_cast<const f32x4*>(row));
            outputs = ld_global_cg_f32x4(reinterpret_cast<const f32x4*>(row + CHUNK));
        }
        Plane<NARROW>::put_pair(planes.inverse, i, column, inverse.x, inverse.y);
        Plane<NARROW>::put_pair(planes.inverse, i, column + 2, inverse.z, inverse.w);
        Plane<NARROW>::put_pair(planes.outputs, i, column, outputs.x, outputs.y);
        Plane<NARROW>::put_pair(planes.outputs, i, column + 2, outputs.z, outputs.w);
    }
}
