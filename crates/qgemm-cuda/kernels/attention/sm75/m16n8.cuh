// Attention products with m16n8k16, or two m16n8k8 on
// Turing. A warp has 16 queries, a lane two of them.
#pragma once
#include "atoms/ldmatrix.cuh"
#include "atoms/mma.cuh"
#include "attention/problem.cuh"
#include "dequant/halves.cuh"

constexpr u32 WARP_ROWS = 16, ROW_TILES = 1, LANE_ROWS = 2;
constexpr u32 MMA_K = 16, MMA_N = 8;
// MMA tiles, and accumulator registers per tile and
// lane: two adjacent columns of each of two rows.
constexpr u32 KEY_TILES = QG_KEYS / MMA_N, FEATURE_TILES = QG_V / MMA_N, TILE_SUMS = 4;
// Row pitch in bytes. 16 bytes of padding put
// eight rows of a matrix into different banks.
constexpr u32 QK_PITCH = QG_QK * 2 + 16, V_PITCH = QG_V * 2 + 16;

QG_DEVICE void multiply_add(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if QG_VARIANT >= 80
    const u32 b[2] = {b0, b1};
    if constexpr (QG_KV == DTYPE_BF16)
        mma_m16n8k16_bf16(d, a, b);
    else
        mma_m16n8k16_f16(d, a, b);
#else
    const u32 low[2] = {a[0], a[1]}, high[2] = {a[2], a[3]};
    mma_m16n8k8_f16(d, low, b0);
    mma_m16n8k8_f16(d, high, b1);
#endif
}

// Rounds two numbers to the operand type.
QG_DEVICE u32 rounded_pair(float low, float high) {
    return f32_to_halves<QG_KV>(low, high);
}

// Fragment layout: rows, keys and
// features of a lane's accumulators.
struct Fragments {
    // First row of the lane, and the
    // offset of its row number `row`.
    QG_DEVICE u32 first_row(u32 lane) {
        return lane / 4;
    }
    QG_DEVICE u32 rows_below(u32 row) {
        return 8 * row;
    }
    // Row number (0 or 1) of accumulator register `i`.
    template <u32 TILES>
    QG_DEVICE u32 row_of(u32, u32 i) {
        return i / 2;
    }
    // First key of score tile `n`, and the key of a register.
    QG_DEVICE u32 first_key(u32 n) {
        return n * MMA_N;
    }
    QG_DEVICE u32 key_of(u32 n, u32 i, u32 lane) {
        return n * MMA_N + lane % 4 * 2 + i % 2;
    }
    // Feature of an accumulator register of output tile `n`.
    QG_DEVICE u32 feature_of(u32 n, u32 i, u32 lane) {
        return n * MMA_N + lane % 4 * 2 + i % 2;
    }
    // Lanes that share rows differ in these bits. One
    // of them stores the values that exist once a row.
    static constexpr u32 SAME_ROWS[2] = {1, 2};
};

// Shared-memory pointers of a lane's operands.
struct Operands {
    u32 q_rows, k_rows;
    const u8* v_rows;

    QG_DEVICE void find(Operands& operands, const u8* q, const u8* k, const u8* v, u32 warp, u32 lane) {
        operands.q_rows = shared_address(q) + (warp * WARP_ROWS + lane % 16) * QK_PITCH + lane / 16 * 16;
        operands.k_rows = shared_address(k) + (lane / 16 * 8 + lane % 8) * QK_PITCH + lane / 8 % 2 * 16;
        operands.v_rows = v + lane % 16 * V_PITCH + lane / 16 * 16;
    }
};

// S += Q · Kᵀ
QG_DEVICE void multiply_keys(float (&scores)[KEY_TILES][TILE_SUMS], const Operands& operands) {
#pragma unroll
    for (u32 k = 0; k < QG_QK / MMA_K; k++) {
        u32 a[4];
        ldmatrix_x4(a, operands.q_rows + k * MMA_K * 2);
#pragma unroll
        for (u32 n = 0; n < KEY_TILES; n += 2) {
            u32 b[4];
            ldmatrix_x4(b, operands.k_rows + n * MMA_N * QK_PITCH + k * MMA_K * 2);
            multiply_add(scores[n], a, b[0], b[1]);
            multiply_add(scores[n + 1], a, b[2], b[3]);
        }
    }
}

// O += P · V. The accumulators of
// two tiles form one operand A.
QG_DEVICE void multiply_values(float (&sums)[FEATURE_TILES][TILE_SUMS], const float (&weights)[KEY_TILES][TILE_SUMS],
                               const Operands& operands, u32) {
#pragma unroll
    for (u32 k = 0; k < QG_KEYS / MMA_K; k++) {
        const float(&low)[4] = weights[2 * k];
        const float(&high)[4] = weights[2 * k + 1];
        const u32 a[4] = {rounded_pair(low[0], low[1]), rounded_pair(low[2], low[3]), rounded_pair(high[0], high[1]),
                          rounded_pair(high[2], high[3])};
#pragma unroll
        for (u32 n = 0; n < FEATURE_TILES; n += 2) {
            u32 b[4];
            ldmatrix_x4_trans(b, operands.v_rows + k * MMA_K * V_PITCH + n * MMA_N * 2);
            multiply_add(sums[n], a, b[0], b[1]);
            multiply_add(sums[n + 1], a, b[2], b[3]);
        }
    }
}
