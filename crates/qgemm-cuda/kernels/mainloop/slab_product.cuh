// The product of a warp's slabs and their columns of X, both in shared memory. Codes are the operands and scales act on the
// f32 sums of each sub-block, so that no weight is rounded. Registers hold a span of X, as they can for few tokens, and
// sums of one tile of rows are under way at a time.
#pragma once
#include "mainloop/row_tiles.cuh"
#include "mainloop/sub_block_sum.cuh"
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

// The B operands of a span.
struct SpanOfX {
    u32 b[TOKEN_TILES][SPAN_STEPS][2];

    QG_DEVICE void load(SpanOfX& x, const XStage* chunks, const XCursor& cursor) {
#pragma unroll
        for (u32 step = 0; step < SPAN_STEPS; step++) {
            const XStage& stage = chunks[step / STEPS];
            if constexpr (TOKEN_TILES == 1) {
                if (step % 2 != 0) continue;
                u32 b[2][2];
                XCursor::load_two_steps(cursor, stage, step % STEPS, b);
                x.b[0][step][0] = b[0][0], x.b[0][step][1] = b[0][1];
                x.b[0][step + 1][0] = b[1][0], x.b[0][step + 1][1] = b[1][1];
            } else {
#pragma unroll
                for (u32 tt = 0; tt < TOKEN_TILES; tt += 2) {
                    u32 b[2][2];
                    XCursor::load_two_tiles(cursor, stage, step % STEPS, tt, b);
                    x.b[tt][step][0] = b[0][0], x.b[tt][step][1] = b[0][1];
                    x.b[tt + 1][step][0] = b[1][0], x.b[tt + 1][step][1] = b[1][1];
                }
            }
        }
    }
};

// acc += slab · x over sum `sum` of span `span`.
QG_DEVICE void multiply_sum(float (&acc)[TOKEN_TILES][4], const Slab& slab, u32 span, u32 sum, const SpanOfX& x,
                            const SumOfX (&x_sums)[TOKEN_TILES]) {
    SubBlockSum part[TOKEN_TILES];
#pragma unroll
    for (u32 tt = 0; tt < TOKEN_TILES; tt++) part[tt] = SubBlockSum::begin(x_sums[tt], sum);
#pragma unroll
    for (u32 i = 0; i < SUM_STEPS; i++) {
        const u32 step = sum * SUM_STEPS + i;
        u32 a[4];
        load_operand(a, slab, span, step);
#pragma unroll
        for (u32 tt = 0; tt < TOKEN_TILES; tt++) {
            if constexpr (Operands::HAS_SCALE)
                SubBlockSum::multiply(part[tt], a, x.b[tt][step], step);
            else
                mma_step(acc[tt], a, x.b[tt][step]);
        }
    }
    if constexpr (Operands::HAS_SCALE) {
        const SumFactors factors = SumFactors::of(slab, span, sum);
#pragma unroll
        for (u32 tt = 0; tt < TOKEN_TILES; tt++) SubBlockSum::add_to(acc[tt], part[tt], factors, x_sums[tt], sum);
    }
}

// sums += w · x over a slab, whose columns of X are the chunks from `x` on.
QG_DEVICE void multiply_slab(Sums& sums, const u8 (&w)[ROW_TILES][QG_SLAB_BYTES], const XStage* x,
                             const XCursor& cursor, u32 lane) {
    Slab slabs[ROW_TILES];
#pragma unroll
    for (u32 span = 0; span < SPANS; span++) {
        // All loads first: with one block an SM, their latency shows (measured on an H200, 16 tokens: 15.6 for 21.1 us).
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++) {
#pragma unroll
            for (u32 i = 0; i < SPAN_CHUNKS; i++)
                Slab::load_codes<FromShared>(slabs[rt], w[rt], span * SPAN_CHUNKS + i, lane);
            if (span == 0) Slab::load_scales<FromShared>(slabs[rt], w[rt], lane);
        }
        SpanOfX operands;
        SpanOfX::load(operands, x + span * SPAN_CHUNKS, cursor);
#pragma unroll
        for (u32 sum = 0; sum < SPAN_SUMS; sum++) {
            SumOfX x_sums[TOKEN_TILES];
#pragma unroll
            for (u32 tt = 0; tt < TOKEN_TILES; tt++) x_sums[tt] = SumOfX::of(operands.b[tt], sum);
#pragma unroll
            for (u32 rt = 0; rt < ROW_TILES; rt++)
                multiply_sum(sums.value[rt], slabs[rt], span, sum, operands, x_sums);
        }
    }
}

// Calls `visit(row in the warp's rows, token, value)` for every sum that this lane holds, in units of the operands.
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
