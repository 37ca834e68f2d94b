// The product of a warp's slabs and their columns of X, both in shared memory. Codes are the operands and scales act on the
// f32 sums of each sub-block, so that no weight is rounded. Registers hold a chunk of X, as they can for few tokens, and
// sums of one tile of rows are under way at a time.
#pragma once
#include "mainloop/mma_operand.cuh"
#include "mainloop/row_tiles.cuh"
#include "mainloop/x_ring.cuh"

constexpr u32 TOKEN_TILES = QG_TILE_M / MMA_TOKENS;
static_assert(TOKEN_TILES * MMA_TOKENS == QG_TILE_M, "tokens fill instructions");
static_assert(TOKEN_TILES == 1 || TOKEN_TILES % 2 == 0, "ldmatrix loads two tiles at once");

// value[rt][tt] are the D registers of one instruction.
struct Sums {
    float value[ROW_TILES][TOKEN_TILES][4];
};

QG_DEVICE XCursor slab_cursor(u32 lane) {
    return TOKEN_TILES == 1 ? XCursor::of_lane_in_steps(lane) : XCursor::of_lane(lane);
}

// The B operands of a chunk.
struct ChunkOfX {
    u32 b[STEPS][TOKEN_TILES][2];

    QG_DEVICE void load(ChunkOfX& x, const XStage& stage, const XCursor& cursor) {
        if constexpr (TOKEN_TILES == 1) {
#pragma unroll
            for (u32 step = 0; step < STEPS; step += 2) {
                u32 b[2][2];
                XCursor::load_two_steps(cursor, stage, step, b);
                x.b[step][0][0] = b[0][0], x.b[step][0][1] = b[0][1];
                x.b[step + 1][0][0] = b[1][0], x.b[step + 1][0][1] = b[1][1];
            }
        } else {
#pragma unroll
            for (u32 step = 0; step < STEPS; step++)
#pragma unroll
                for (u32 tt = 0; tt < TOKEN_TILES; tt += 2) {
                    u32 b[2][2];
                    XCursor::load_two_tiles(cursor, stage, step, tt, b);
                    x.b[step][tt][0] = b[0][0], x.b[step][tt][1] = b[0][1];
                    x.b[step][tt + 1][0] = b[1][0], x.b[step][tt + 1][1] = b[1][1];
                }
        }
    }
};

// Each token's Σx over the columns of a sum, in both of the columns that a lane holds; where the minimum needs it.
struct SumsOfX {
    float value[TOKEN_TILES][2];

    QG_DEVICE void compute(SumsOfX& sums, const ChunkOfX& x, u32 sum) {
        const u32 ones[4] = {ONE_PAIR, ONE_PAIR, ONE_PAIR, ONE_PAIR};
#pragma unroll
        for (u32 tt = 0; tt < TOKEN_TILES; tt++) {
            // A matrix of ones yields Σx in every row.
            float d[4] = {};
#pragma unroll
            for (u32 i = 0; i < STEPS_PER_SUM; i++) mma_step(d, ones, x.b[sum * STEPS_PER_SUM + i][tt]);
            sums.value[tt][0] = d[0], sums.value[tt][1] = d[1];
        }
    }
};

// acc += slab · x over sum `sum` of chunk `chunk`.
QG_DEVICE void multiply_sum(float (&acc)[TOKEN_TILES][4], const Slab& slab, u32 chunk, u32 sum, const ChunkOfX& x,
                            [[maybe_unused]] const SumsOfX& x_sums) {
    float part[TOKEN_TILES][4] = {};
#pragma unroll
    for (u32 i = 0; i < STEPS_PER_SUM; i++) {
        const u32 step = sum * STEPS_PER_SUM + i;
        u32 a[4];
#pragma unroll
        for (u32 r = 0; r < 4; r++) a[r] = operand_pair(slab, quad_of(chunk, r % 2, step), r / 2);
#pragma unroll
        for (u32 tt = 0; tt < TOKEN_TILES; tt++) {
            if constexpr (Operands::HAS_SCALE)
                mma_step(part[tt], a, x.b[step][tt]);
            else
                mma_step(acc[tt], a, x.b[step][tt]);
        }
    }
    if constexpr (Operands::HAS_SCALE) {
#pragma unroll
        for (u32 row = 0; row < 2; row++) {
            const float scale = Operands::scale(slab, row, sub_block_of(chunk, sum));
            const float min = Operands::min(slab, row, sub_block_of(chunk, sum));
#pragma unroll
            for (u32 tt = 0; tt < TOKEN_TILES; tt++)
#pragma unroll
                for (u32 i = 0; i < 2; i++) {
                    acc[tt][row * 2 + i] += scale * part[tt][row * 2 + i];
                    if constexpr (Operands::HAS_MIN) acc[tt][row * 2 + i] += min * x_sums.value[tt][i];
                }
        }
    }
}

// sums += w · x over a slab.
QG_DEVICE void multiply_slab(Sums& sums, const u8 (&w)[ROW_TILES][QG_SLAB_BYTES], const XStage (&x)[CHUNKS],
                             const XCursor& cursor, u32 lane) {
    Slab slabs[ROW_TILES];
#pragma unroll
    for (u32 chunk = 0; chunk < CHUNKS; chunk++) {
        // All loads first: with one block an SM, their latency shows (measured on an H200, 16 tokens: 15.6 for 21.1 us).
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++) {
            Slab::load_codes<FromShared>(slabs[rt], w[rt], chunk, lane);
            if (chunk == 0) Slab::load_scales<FromShared>(slabs[rt], w[rt], lane);
        }
        ChunkOfX operands;
        ChunkOfX::load(operands, x[chunk], cursor);
        SumsOfX x_sums[SUMS];
        if constexpr (Operands::HAS_MIN) {
#pragma unroll
            for (u32 sum = 0; sum < SUMS; sum++) SumsOfX::compute(x_sums[sum], operands, sum);
        }
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++)
#pragma unroll
            for (u32 sum = 0; sum < SUMS; sum++)
                multiply_sum(sums.value[rt], slabs[rt], chunk, sum, operands, x_sums[sum]);
    }
}

// Calls `visit(row in the block's rows, token, value)` for every sum that this lane holds.
template <class Visit>
QG_DEVICE void for_each_sum(const Sums& sums, u32 lane, Visit visit) {
#pragma unroll
    for (u32 rt = 0; rt < ROW_TILES; rt++)
#pragma unroll
        for (u32 tt = 0; tt < TOKEN_TILES; tt++)
#pragma unroll
            for (u32 i = 0; i < 4; i++)
                visit(rt * QG_TILE_ROWS + lane / 4 + i / 2 * 8, tt * MMA_TOKENS + lane % 4 * 2 + i % 2,
                      sums.value[rt][tt][i]);
}
