// E4M3 or E2M1 W operands of byte MMA, for
// `block_scaled_product.cuh`.
// A step is half a k-tile: 32 columns with one scale.
//
// Four lanes t hold a row. Lane t has columns
// {2t, 2t+8, 2t+1, 2t+9} of each 16
// (qgemm-formats/src/prepack.rs).
// E2M1 has 32 columns a word, 16 of them in the low nibbles.
// The MMA needs columns 4t..4t+3 in lane t.
// Two lanes hold these bytes.
// So a lane loads both words.
// E2M1 elements occupy bits 2..5 of a byte.
#pragma once
#include "atoms/numeric.cuh"
#include "dequant/k_tile.cuh"

static_assert(QG_SUB_BLOCK == 32, "a scale for the columns of an instruction");
constexpr bool W_E2M1 = KTile::Codes0::BITS == 4;
static_assert(W_E2M1 || KTile::Codes0::BITS == 8, "codes are E2M1 or E4M3");

// B operands of a step, and scales of the row tiles.
// Lanes 0 and 2 of four hold row g, lanes 1 and 3 row g + 8.
struct WOperand {
    u32 code[N_TILES][2];
    u32 scale[ROW_TILES];
};

// The lane's offsets in a k-tile, and the byte selector for
// two lanes' words.
struct WOrder {
    u32 codes, scale, bytes;

    QG_DEVICE WOrder of_lane(u32 lane) {
        // Words of lanes 2t and 2t + 1 (mod 4) have this lane's columns.
        // Lanes 0 and 1 use the lower eight columns.
        return {opaque_register(QgCodePlane<0>::OFFSET + (lane / 4 * 4 + lane % 2 * 2) * 16),
                opaque_register(QgScalePlane<0>::OFFSET + (lane / 4 * 2 + lane % 2) * 2), opaque_register(lane & 2 ? 0x7531 : 0x6420)};
    }
};

// The warp's row tiles in a stage.
struct WStage {
    // Columns in order: a word has 32 columns (E2M1) or 16 columns
    // (E4M3) of eight rows.
    static constexpr u32 WORDS = W_E2M1 ? 2 : 4;
    u32 code[N_TILES][WORDS];
    u32 scale[ROW_TILES];

    QG_DEVICE void load(WStage& w, const u8* row_tiles, const WOrder& order) {
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++) {
            const u8* k_tile = row_tiles + rt * W_STAGE_BYTES;
            const u8* first = k_tile + order.codes;
            // Rows g, then rows g + 8; one load has both for E2M1.
            constexpr u32 LOADS = W_E2M1 ? 1 : 2;
#pragma unroll
            for (u32 i = 0; i < LOADS; i++) {
                const u32x4 low = FromShared::v4(first + i * 512), high = FromShared::v4(first + i * 512 + 16);
                const u32 words[4] = {prmt(low.x, high.x, order.bytes), prmt(low.y, high.y, order.bytes),
                                      prmt(low.z, high.z, order.bytes), prmt(low.w, high.w, order.bytes)};
#pragma unroll
                for (u32 j = 0; j < 4; j++) w.code[rt * 2 + (i * 4 + j) / WORDS][j % WORDS] = words[j];
            }
            w.scale[rt] = FromShared::half(k_tile + order.scale);
        }
    }

    QG_DEVICE void operand(const WStage& w, WOperand& operand, u32 step, const WOrder&) {
#pragma unroll
        for (u32 nt = 0; nt < N_TILES; nt++) {
            if constexpr (W_E2M1) {
                operand.code[nt][0] = (w.code[nt][step] & 0x0f0f0f0fu) << 2;
                operand.code[nt][1] = w.code[nt][step] >> 2 & 0x3c3c3c3cu;
            } else {
                operand.code[nt][0] = w.code[nt][step * 2];
                operand.code[nt][1] = w.code[nt][step * 2 + 1];
            }
        }
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++) operand.scale[rt] = w.scale[rt];
    }
};

// D += A · B for one instruction. `pair_a` selects the
// lane pair that holds A's scales, `lane_b` the lane
// of a pair for B's.
QG_DEVICE void mma_step(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], u32 scale_a, u32 pair_a, u32 scale_b, u32 lane_b, u32 step) {
    mma_m16n8k32_mxf8<W_E2M1>(d, a, b, scale_a, {step, pair_a}, scale_b, {step, lane_b});
}
