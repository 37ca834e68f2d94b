// Attention products with m8n8k4 on Volta. One
// instruction computes four 8 × 8 × 4 products, which
// form a 16 × 16 tile. A warp has one or two query tiles,
// so that each K and V fragment serves all of them.
//
// Lane l takes part in product l % 16 / 4: bit 0
// selects the eight rows, bit 1 (`column group`) the
// eight columns. As operand A, the lane has row l %
// 8 + 8 (l / 16). As accumulators, it has two rows,
// the even or the odd two among the four operand
// rows of its half of the product. Lanes l and l ^ 2
// have the same two rows and adjacent columns.
#pragma once
#include "atoms/mma.cuh"
#include "atoms/mma_m8n8k4.cuh"
#include "attention/problem.cuh"
#include "dequant/halves.cuh"

static_assert(QG_KV == DTYPE_F16, "m8n8k4 takes f16");

constexpr u32 TILE = 16;
constexpr u32 WARP_ROWS = QG_ROWS * 32 / QG_THREADS, ROW_TILES = WARP_ROWS / TILE, LANE_ROWS = 2 * ROW_TILES;
// MMA tiles of each row tile (row-tile-major),
// and accumulator registers per tile and lane:
// twice two adjacent columns of two rows.
constexpr u32 KEY_TILES = QG_KEYS / TILE, FEATURE_TILES = QG_V / TILE, TILE_SUMS = 8;
static_assert(FEATURE_TILES % 2 == 0, "what a lane loads of a value is of two tiles");
// Row pitch in bytes. 16 bytes of padding
// put eight query rows into different banks.
constexpr u32 QK_PITCH = QG_QK * 2 + 16, V_PITCH = QG_V * 2 + 16;

// Rounds two numbers to the operand type.
QG_DEVICE u32 rounded_pair(float low, float high) {
    return f32_to_halves<DTYPE_F16>(low, high);
}

// Fragment layout: rows, keys and
// features of a lane's accumulators.
struct Fragments {
    QG_DEVICE u32 column_group(u32 lane) {
        return lane / 8 % 2;
    }
    // First row of the lane, and the
    // offset of its row number `row`.
    QG_DEVICE u32 first_row(u32 lane) {
        return lane / 16 * 8 + lane % 8 / 4 * 4 + lane % 2;
    }
    QG_DEVICE u32 rows_below(u32 row) {
        return row / 2 * TILE + row % 2 * 2;
    }
    // Row number of register `i` of tile `n`,
    // with TILES tiles per row tile. Of every
    // four registers, two belong to the next row.
    template <u32 TILES>
    QG_DEVICE u32 row_of(u32 n, u32 i) {
        return n / TILES * 2 + i / 2 % 2;
    }
    // First key of score tile `n`, and the key of a register.
    QG_DEVICE u32 first_key(u32 n) {
        return n % KEY_TILES * TILE;
    }
    QG_DEVICE u32 key_of(u32 n, u32 i, u32 lane) {
        return first_key(n) + column_group(lane) * 8 + i / 4 * 4 + (lane & 2u) + i % 2;
    }
    // Feature of a register of output tile `n`.
    // A pair of tiles covers 32 features: groups
    // of four alternate between the two tiles.
    QG_DEVICE u32 feature_of(u32 n, u32 i, u32 lane) {
        const u32 tile = n % FEATURE_TILES;
        return tile / 2 * 32 + column_group(lane) * 16 + i / 4 * 8 + tile % 2 * 4 + (lane & 2u) + i % 2;
    }
    // Lanes that share rows differ in these bits. One
    // of them stores the values that exist once a row.
    static constexpr u32 SAME_ROWS[2] = {2, 8};
};

// Shared-memory pointers of a lane's operands.
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

// S += Q · Kᵀ. Each 16-byte load feeds two MMA k-steps.
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

// Operand A of two MMA k-steps: eight probabilities
// of one row. A lane has two rows as accumulators; it
// swaps halves with the lane that shares both rows.
QG_DEVICE void operand_row(u32 (&a)[4], const float (&weights)[TILE_SUMS], u32 lane) {
    const bool is_second = lane & 2u;
#pragma unroll
    for (u32 step = 0; step < 2; step++) {
        const u32 first = rounded_pair(weights[4 * step], weights[4 * step + 1]);
        const u32 second = rounded_pair(weights[4 * step + 2], weights[4 * step + 3]);
        const u32 own = is_second ? second : first, came = shfl_xor_u32(is_second ? first : second, 2);
        a[2 * step] = is_second ? came : own;
        a[2 * step + 1] = is_second ? own : came;
    }
}

// O += P · V. Each product needs the probabilities
// of all keys of a tile: first its own eight, then
// the eight of the neighbouring product.
QG_DEVICE void multiply_values(float (&sums)[ROW_TILES * FEATURE_TILES][TILE_SUMS], const float (&weights)[ROW_TILES * KEY_TILES][TILE_SUMS],
                               const Operands& operands, u32 lane) {
    // Row offset from the product's first
    // eight keys to its other keys.
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
