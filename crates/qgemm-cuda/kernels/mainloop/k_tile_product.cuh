// The product of a warp's slabs and their columns of X, both in shared memory. Codes are the operands and scales act on the
// f32 sums of each sub-block, so that no weight is rounded. Registers hold a span of X, as they can for few tokens, and
// sums of one tile of rows are under way at a time.
#pragma once
#include "mainloop/super_block_minimums.cuh"
#include "mainloop/scale_table.cuh"
#include "mainloop/x_ring.cuh"

constexpr u32 TOKEN_TILES = QG_TILE_M / MMA_TOKENS;
static_assert(TOKEN_TILES * MMA_TOKENS == QG_TILE_M, "tokens fill instructions");

// value[rt][tt] are the D registers of one instruction.
struct Sums {
    float value[ROW_TILES][TOKEN_TILES][4];
};

// The B operands of a span.
struct SpanOfX {
    u32 b[TOKEN_TILES][SPAN_K_STEPS][2];

    QG_DEVICE void load(SpanOfX& x, const XStage* k_blocks, const XCursor& cursor) {
#pragma unroll
        for (u32 k_step = 0; k_step < SPAN_K_STEPS; k_step += 2)
#pragma unroll
            for (u32 tt = 0; tt < TOKEN_TILES; tt++) {
                u32 b[2][2];
                XCursor::load_two_k_steps(cursor, k_blocks[k_step / K_STEPS], k_step % K_STEPS, tt, b);
#pragma unroll
                for (u32 i = 0; i < 2; i++) x.b[tt][k_step + i][0] = b[i][0], x.b[tt][k_step + i][1] = b[i][1];
            }
    }
};

// acc += slab · x over sum `sum` of span `span`.
QG_DEVICE void multiply_sum(float (&acc)[TOKEN_TILES][4], const KTile& k_tile, u32 span, u32 sum, const SpanOfX& x,
                            const SumOfX (&x_sums)[TOKEN_TILES], const SumFactors& factors) {
    SubBlockSum part[TOKEN_TILES];
#pragma unroll
    for (u32 tt = 0; tt < TOKEN_TILES; tt++) part[tt] = SubBlockSum::begin(x_sums[tt], sum);
#pragma unroll
    for (u32 i = 0; i < PARTIAL_K_STEPS; i++) {
        const u32 k_step = sum * PARTIAL_K_STEPS + i;
        u32 a[4];
        load_operand(a, k_tile, span, k_step);
#pragma unroll
        for (u32 tt = 0; tt < TOKEN_TILES; tt++) {
            if constexpr (Operands::HAS_SCALE)
                SubBlockSum::multiply(part[tt], a, x.b[tt][k_step], k_step);
            else
                mma_k_step(acc[tt], a, x.b[tt][k_step]);
        }
    }
    if constexpr (Operands::HAS_SCALE) {
#pragma unroll
        for (u32 tt = 0; tt < TOKEN_TILES; tt++) SubBlockSum::add_to(acc[tt], part[tt], factors, x_sums[tt], sum);
    }
}

// sums += w · x over a slab, whose columns of X are the chunks from `x` on. `table` is the warp's own memory.
QG_DEVICE void multiply_k_tile(Sums& sums, const u8 (&w)[ROW_TILES][QG_K_TILE_BYTES], const XStage* x,
                             const XCursor& cursor, const Constants& constants, ScaleTableOfWarp& table, u32 lane) {
    ScaleTableOfWarp::make(table, w, lane);
    if (HAS_SCALE_TABLE) warp_barrier();
    KTile k_tiles[ROW_TILES];
    ScaleUnit scales;
    SumsOfX x_sums_of_k_tile[TOKEN_TILES] = {};
#pragma unroll
    for (u32 span = 0; span < SPANS; span++) {
        // All loads first: with one block an SM, their latency shows (measured on an H200, 16 tokens: 15.6 for 21.1 us).
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++) {
#pragma unroll
            for (u32 i = 0; i < SPAN_K_BLOCKS; i++)
                KTile::load_codes<FromShared>(k_tiles[rt], w[rt], span * SPAN_K_BLOCKS + i, lane);
            if (span == 0 && (!HAS_SCALE_TABLE || NESTED_OFFSETS)) KTile::load_scales<FromShared>(k_tiles[rt], w[rt], lane);
        }
        SpanOfX operands;
        SpanOfX::load(operands, x + span * SPAN_K_BLOCKS, cursor);
        if constexpr (NESTED_OFFSETS) {
#pragma unroll
            for (u32 k_step = 0; k_step < SPAN_K_STEPS; k_step += 2)
#pragma unroll
                for (u32 tt = 0; tt < TOKEN_TILES; tt++)
                    SumsOfX::add(x_sums_of_k_tile[tt], span * SPAN_K_STEPS + k_step, operands.b[tt][k_step], operands.b[tt][k_step + 1], lane);
        }
#pragma unroll
        for (u32 sum = 0; sum < SPAN_SUMS; sum++) {
            const u32 sub = span * SPAN_SUMS + sum;
            if (HAS_SCALE_TABLE && sub % 4 == 0) ScaleUnit::load(scales, table, sub / 4, lane);
            SumOfX x_sums[TOKEN_TILES];
#pragma unroll
            for (u32 tt = 0; tt < TOKEN_TILES; tt++) x_sums[tt] = SumOfX::of(constants, operands.b[tt], sum);
#pragma unroll
            for (u32 rt = 0; rt < ROW_TILES; rt++) {
                SumFactors factors;
                if constexpr (HAS_SCALE_TABLE)
                    factors = SumFactors::of_scales({scales.value[rt][0][sub % 4], scales.value[rt][1][sub % 4]});
                else
                    factors = SumFactors::of(k_tiles[rt], span, sum);
                multiply_sum(sums.value[rt], k_tiles[rt], span, sum, operands, x_sums, factors);
            }
        }
    }
    if constexpr (NESTED_OFFSETS) add_offsets<Operands::Format>(sums.value, k_tiles, x_sums_of_k_tile, lane);
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
