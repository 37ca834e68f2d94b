// MMA main loop for few tokens: W k-tiles times X, both
// in shared memory.
// Codes are the operands. Scales act on the f32 accumulators
// of each sub-block, so no weight is rounded.
// Registers hold a span of X (affordable for few tokens) and
// the partial accumulators of one row tile.
#pragma once
#include "mainloop/scale_table.cuh"
#include "mainloop/super_block_minimums.cuh"
#include "mainloop/x_ring.cuh"

constexpr u32 TOKEN_TILES = QG_TILE_M / MMA_TOKENS;
static_assert(TOKEN_TILES * MMA_TOKENS == QG_TILE_M, "tokens fill instructions");

// value[rt][tt]: D registers of one instruction.
struct Accumulators {
    float value[ROW_TILES][TOKEN_TILES][4];  // [row tile][token tile][register]
};

// B operands of a span.
struct XSpan {
    u32 b[TOKEN_TILES][SPAN_K_STEPS][2];  // [token tile][k-step][register]

    QG_DEVICE void load(XSpan& x, const XStage* k_blocks, const XCursor& cursor) {
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

// acc += W · X over partial `partial` of span `span`.
QG_DEVICE void multiply_partial(float (&acc)[TOKEN_TILES][4], const KTile& k_tile, u32 span, u32 partial,
                                const XSpan& x, const XBlockSum (&x_sums)[TOKEN_TILES],
                                const SubBlockFactors& factors) {
    SubBlockAccumulators part[TOKEN_TILES];
#pragma unroll
    for (u32 tt = 0; tt < TOKEN_TILES; tt++) part[tt] = SubBlockAccumulators::begin(x_sums[tt], partial);
#pragma unroll
    for (u32 i = 0; i < PARTIAL_K_STEPS; i++) {
        const u32 k_step = partial * PARTIAL_K_STEPS + i;
        u32 a[4];
        load_operand(a, k_tile, span, k_step);
#pragma unroll
        for (u32 tt = 0; tt < TOKEN_TILES; tt++) {
            if constexpr (Operands::HAS_SCALE)
                SubBlockAccumulators::multiply(part[tt], a, x.b[tt][k_step], k_step);
            else
                mma_k_step(acc[tt], a, x.b[tt][k_step]);
        }
    }
    if constexpr (Operands::HAS_SCALE) {
#pragma unroll
        for (u32 tt = 0; tt < TOKEN_TILES; tt++)
            SubBlockAccumulators::add_to(acc[tt], part[tt], factors, x_sums[tt], partial);
    }
}

// acc += W · X over a k-tile. `x` is its first k-block of X.
// `table` is private to the warp.
// `x_sum_of(operands, tt, partial, sub)` returns X block sums
// of token tile `tt` over a partial of a span.
// `sub` numbers the partial in the k-tile.
template <class XSumOf>
QG_DEVICE void multiply_k_tile(Accumulators& acc, const u8 (&w)[ROW_TILES][QG_K_TILE_BYTES], const XStage* x, const XCursor& cursor,
                               ScaleTableOfWarp& table, u32 lane, XSumOf x_sum_of) {
    ScaleTableOfWarp::make(table, w, lane);
    if (HAS_SCALE_TABLE) warp_barrier();
    KTile k_tiles[ROW_TILES];
    ScaleUnit scales;
    XBlockSums x_sums_of_k_tile[TOKEN_TILES] = {};
#pragma unroll
    for (u32 span = 0; span < SPANS; span++) {
        // Loads come first: with one CTA per SM their
        // latency is exposed.
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++) {
#pragma unroll
            for (u32 i = 0; i < SPAN_K_BLOCKS; i++)
                KTile::load_codes<FromShared>(k_tiles[rt], w[rt], span * SPAN_K_BLOCKS + i, lane);
            if (span == 0 && (!HAS_SCALE_TABLE || SUPER_BLOCK_MINIMUMS))
                KTile::load_scales<FromShared>(k_tiles[rt], w[rt], lane);
        }
        XSpan operands;
        XSpan::load(operands, x + span * SPAN_K_BLOCKS, cursor);
        if constexpr (SUPER_BLOCK_MINIMUMS) {
#pragma unroll
            for (u32 k_step = 0; k_step < SPAN_K_STEPS; k_step += 2)
#pragma unroll
                for (u32 tt = 0; tt < TOKEN_TILES; tt++)
                    XBlockSums::add(x_sums_of_k_tile[tt], span * SPAN_K_STEPS + k_step, operands.b[tt][k_step],
                                    operands.b[tt][k_step + 1], lane);
        }
#pragma unroll
        for (u32 partial = 0; partial < SPAN_PARTIALS; partial++) {
            const u32 sub = span * SPAN_PARTIALS + partial;
            if (HAS_SCALE_TABLE && sub % 4 == 0) ScaleUnit::load(scales, table, sub / 4, lane);
            XBlockSum x_sums[TOKEN_TILES];
#pragma unroll
            for (u32 tt = 0; tt < TOKEN_TILES; tt++) x_sums[tt] = x_sum_of(operands, tt, partial, sub);
#pragma unroll
            for (u32 rt = 0; rt < ROW_TILES; rt++) {
                SubBlockFactors factors;
                if constexpr (HAS_SCALE_TABLE)
                    factors = SubBlockFactors::of_scales({scales.value[rt][0][sub % 4], scales.value[rt][1][sub % 4]});
                else
                    factors = SubBlockFactors::of(k_tiles[rt], span, partial);
                multiply_partial(acc.value[rt], k_tiles[rt], span, partial, operands, x_sums, factors);
            }
        }
    }
    if constexpr (SUPER_BLOCK_MINIMUMS)
        add_super_block_minimums<Operands::Format>(acc.value, k_tiles, x_sums_of_k_tile, lane);
}

// `multiply_k_tile` with X block sums that the warp computes.
QG_DEVICE void multiply_k_tile(Accumulators& acc, const u8 (&w)[ROW_TILES][QG_K_TILE_BYTES], const XStage* x,
                               const XCursor& cursor, const Constants& constants, ScaleTableOfWarp& table, u32 lane) {
    multiply_k_tile(acc, w, x, cursor, table, lane, [&](const XSpan& operands, u32 tt, u32 partial, u32) {
        return XBlockSum::of(constants, operands.b[tt], partial);
    });
}

// Calls `visit(row, token, value)` for this lane's accumulators.
// Values are in units of the operands; rows count
// from the warp's.
template <class Visit>
QG_DEVICE void for_each_accumulator(const Accumulators& acc, u32 lane, Visit visit) {
#pragma unroll
    for (u32 rt = 0; rt < ROW_TILES; rt++)
#pragma unroll
        for (u32 tt = 0; tt < TOKEN_TILES; tt++)
#pragma unroll
            for (u32 i = 0; i < 4; i++)
                visit(rt * QG_TILE_ROWS + lane / 4 + i / 2 * 8, tt * MMA_TOKENS + lane % 4 * 2 + i % 2,
                      acc.value[rt][tt][i]);
}
