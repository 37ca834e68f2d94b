// The products of attention by m8n8k4, four of 8 × 8 × 4 at once: two by two they are tiles of 16 × 16. A warp has one or two tiles of
// queries, so that what a lane reads of keys and values serves all of them.
//
// Lane l takes part in product l % 16 / 4, whose bit 0 says which eight rows of a tile it has, and bit 1, `column group`, which eight
// columns. As operand A the lane has row l % 8 + 8 (l / 16), as accumulators two rows: the even or the odd two of the four that its
// product's lanes of this half have as operands. Lanes l and l ^ 2 have the same two, and neighbouring columns.
#pragma once
#include "atoms/mma.cuh"
#include "atoms/mma_m8n8k4.cuh"
#include "mainloop/attention_keys.cuh"

static_assert(QG_KV == DTYPE_F16, "m8n8k4 takes f16");

constexpr u32 TILE = 16;
constexpr u32 WARP_ROWS = QG_ROWS * 32 / QG_THREADS, ROW_TILES = WARP_ROWS / TILE, LANE_ROWS = 2 * ROW_TILES;
// Tiles of accumulators for each row tile, all of the first before those of the second, and accumulators of a lane in one: twice two
// neighbours of each of two rows.
constexpr u32 KEY_TILES = QG_KEYS / TILE, FEATURE_TILES = QG_V / TILE, TILE_SUMS = 8;
static_assert(FEATURE_TILES % 2 == 0, "what a lane loads of a value is of two tiles");
// Bytes from a row to the next. Sixteen more than it has: eight rows of queries then lie in different banks.
constexpr u32 QK_PITCH = QG_QK * 2 + 16, V_PITCH = QG_V * 2 + 16;

// Two numbers, rounded to the operands' type.
QG_DEVICE u32 rounded_pair(float low, float high) {
    return f32_to_f16(low) | f32_to_f16(high) << 16;
}

// Which of a warp's rows, a tile's keys and the features a lane's accumulators are of.
struct Fragments {
    QG_DEVICE u32 column_group(u32 lane) {
        return lane / 8 % 2;
    }
    // The lane's first row, and how far below it the others are.
    QG_DEVICE u32 first_row(u32 lane) {
        return lane / 16 * 8 + lane % 8 / 4 * 4 + lane % 2;
    }
    QG_DEVICE u32 rows_below(u32 row) {
        return row / 2 * TILE + row % 2 * 2;
    }
    // The row, of the lane's, of accumulator `i` of tile `n`, where a row tile has TILES: of every four accumulators two are of the next row.
    template <u32 TILES>
    QG_DEVICE u32 row_of(u32 n, u32 i) {
        return n / TILES * 2 + i / 2 % 2;
    }
    // The first key of tile `n` of scores, and that of an accumulator.
    QG_DEVICE u32 first_key(u32 n) {
        return n % KEY_TILES * TILE;
    }
    QG_DEVICE u32 key_of(u32 n, u32 i, u32 lane) {
        return first_key(n) + column_group(lane) * 8 + i / 4 * 4 + (lane & 2u) + i % 2;
    }
    // The feature of an accumulator of tile `n` of results. Two tiles have 32 features: of each sixteen those of the first tile are every
    // other four.
    QG_DEVICE u32 feature_of(u32 n, u32 i, u32 lane) {
        const u32 tile = n % FEATURE_TILES;
        return tile / 2 * 32 + column_group(lane) * 16 + i / 4 * 8 + tile % 2 * 4 + (lane & 2u) + i % 2;
    }
    // Lanes that differ in these bits have the same rows, one of which stores what a row has one of.
    static constexpr u32 SAME_ROWS[2] = {2, 8};
};

// Where a lane finds the operands of its warp in shared memory.
struct Operands {
    const u8 *q_rows, *k_rows, *v_rows;

    QG_DEVICE void find(Operands& operands, const u8* q, const u8* k, const u8* v, u32 warp, u32 lane) {
        const u32 group = Fragments::column_group(lane), half = lane / 16;
        operands.q_rows = q + (warp * WARP_ROWS + half * 8 + lane % 8) * QK_PITCH;
        operands.k_rows = k + (group * 8 + half * 4 + lane % 4) * QK_PITCH;
        operands.v_rows = v + (group * 8 + lane % 4) * V_PITCH + group * 32 + half * 16;
    }
};

QG_DEVICE u32x4 load_operands(const u8* at) {
    return ld_shared(reinterpret_cast<const u32x4*>(at));
}

// scores += Q · Kᵀ. Sixteen bytes of a row are two steps of the instruction.
QG_DEVICE void multiply_keys(float (&scores)[ROW_TILES * KEY_TILES][TILE_SUMS], const Operands& operands) {
#pragma unroll
    for (u32 k = 0; k < QG_QK / 8; k++) {
        u32x4 a[ROW_TILES];
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++) a[rt] = load_operands(operands.q_rows + rt * TILE * QK_PITCH + k * 16);
#pragma unroll
        for (u32 n = 0; n < KEY_TILES; n++) {
            const u32x4 b = load_operands(operands.k_rows + n * TILE * QK_PITCH + k * 16);
            const u32 first[2] = {b.x, b.y}, second[2] = {b.z, b.w};
#pragma unroll
            for (u32 rt = 0; rt < ROW_TILES; rt++) {
                const u32 of_row[2] = {a[rt].x, a[rt].y};
                mma_m8n8k4_f16(scores[rt * KEY_TILES + n], of_row, first);
            }
#pragma unroll
            for (u32 rt = 0; rt < ROW_TILES; rt++) {
                const u32 of_row[2] = {a[rt].z, a[rt].w};
                mma_m8n8k4_f16(scores[rt * KEY_TILES + n], of_row, second);
            }
        }
    }
}

// Operand A of two steps, the eight weights of the lane's row that its product has. Of its two rows as accumulators a lane gives one to the
// lane that has the same two, and gets the other half of its own.
QG_DEVICE void operand_row(u32 (&a)[4], const float (&weights)[TILE_SUMS], u32 lane) {
    const bool is_second = lane & 2u;
#pragma unroll
    for (u32 step = 0; step < 2; step++) {
        const u32 first = rounded_pair(weights[4 * step], weights[4 * step + 1]);
        const u32 second = rounded_pair(weights[4 * step + 2], weights[4 * step + 3]);
        const u32 kept = is_second ? second : first, came = shfl_xor_u32(is_second ? first : second, 2);
        a[2 * step] = is_second ? came : kept;
        a[2 * step + 1] = is_second ? kept : came;
    }
}

// sums += weights · V. Every product needs the weights of all keys of a tile: first it takes its own eight, then those of the product beside
// it.
QG_DEVICE void multiply_values(float (&sums)[ROW_TILES * FEATURE_TILES][TILE_SUMS], const float (&weights)[ROW_TILES * KEY_TILES][TILE_SUMS],
                               const Operands& operands, u32 lane) {
    // From a product's own keys to the others.
    const i32 others = (Fragments::column_group(lane) ? -8 : 8) * (i32)V_PITCH;
#pragma unroll
    for (u32 n = 0; n < KEY_TILES; n++) {
        u32 a[ROW_TILES][4];
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++) operand_row(a[rt], weights[rt * KEY_TILES + n], lane);
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const u8* rows = operands.v_rows + n * TILE * V_PITCH + (half ? others : 0);
#pragma unroll
            for (u32 step = 0; step < 2; step++) {
#pragma unroll
                for (u32 v = 0; v < FEATURE_TILES; v += 2) {
                    const u32x4 b = load_operands(rows + step * 4 * V_PITCH + v * 32);
                    const u32 first[2] = {b.x, b.y}, second[2] = {b.z, b.w};
#pragma unroll
                    for (u32 rt = 0; rt < ROW_TILES; rt++) {
                        const u32 of_row[2] = {a[rt][2 * step], a[rt][2 * step + 1]};
                        mma_m8n8k4_row_row_f16(sums[rt * FEATURE_TILES + v], of_row, first);
                        mma_m8n8k4_row_row_f16(sums[rt * FEATURE_TILES + v + 1], of_row, second);
                    }
                }
            }
            if (half) continue;
#pragma unroll
            for (u32 rt = 0; rt < ROW_TILES; rt++)
#pragma unroll
                for (u32 i = 0; i < 4; i++) a[rt][i] = shfl_xor_u32(a[rt][i], 8);
        }
    }
}
