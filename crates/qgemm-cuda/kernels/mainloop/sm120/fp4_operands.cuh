// FP4 W operands of FP4 MMA, for `block_scaled_product.cuh`.
// A step is a k-tile of 64 columns.
//
// Per 32 columns, lane t of a row's four has one word.
// Its nibble 2j + o is column 16 o + {2t, 2t+8, 2t+1, 2t+9}[j]
// (qgemm-formats/src/prepack.rs).
// The MMA needs column 8t + i in nibble i of lane t.
// So column pairs become bytes, and four lanes transpose them:
// each keeps a quarter and receives the others'.
#pragma once
#include "atoms/numeric.cuh"
#include "atoms/warp.cuh"
#include "dequant/k_tile.cuh"

static_assert(QG_SUB_BLOCK == 32 || QG_SUB_BLOCK == 16, "a scale for 32 columns (UE8M0) or 16 (UE4M3)");
static_assert(KTile::Codes0::BITS == 4, "codes are FP4");
// Bytes of a row's scales in a k-tile.
constexpr u32 SCALE_BYTES = QG_K_TILE / QG_SUB_BLOCK;

// B operands of a step, and scales of the row tiles.
// Lanes 0 and 2 of four hold row g, lanes 1 and 3 row g + 8.
struct WOperand {
    u32 code[N_TILES][2];
    u32 scale[ROW_TILES];
};

// The lane's offsets in a k-tile, and the byte selectors of
// the permutation.
struct WOrder {
    u32 codes, scale, own, given, order;
    bool upper;

    QG_DEVICE WOrder of_lane(u32 lane) {
        const bool upper = lane & 2, odd = lane & 1;
        const u32 order = upper ? (odd ? 0x0426 : 0x4062) : (odd ? 0x2604 : 0x6240);
        return {opaque_register(QgCodePlane<0>::OFFSET + lane * 16),
                opaque_register(QgScalePlane<0>::OFFSET + (lane / 4 * 2 + lane % 2) * SCALE_BYTES),
                opaque_register(odd ? 0x7531 : 0x6420),
                opaque_register(odd ? 0x6420 : 0x7531),
                opaque_register(order),
                upper};
    }
};

// Permutes the words of 2 × 32 columns to column order, across
// the lanes of a row.
QG_DEVICE void order_columns(const u32 (&word)[2], u32 (&ordered)[2], const WOrder& order) {
    // Bytes of columns 2t, 2t+1, and of these plus eight:
    // first word, then second word.
    const u32 evens = prmt(word[0], word[1], 0x5410), odds = prmt(word[0], word[1], 0x7632);
    const u32 low = (evens & 0x0f0f0f0fu) | (odds & 0x0f0f0f0fu) << 4;
    const u32 high = (evens >> 4 & 0x0f0f0f0fu) | (odds & 0xf0f0f0f0u);
    // Lanes 2 and 3 get the upper 16 columns.
    // Then odd lanes get the upper eight of those.
    const u32 kept = order.upper ? high : low, received = shfl_xor_u32(order.upper ? low : high, 2);
    const u32 own = prmt(kept, received, order.own);
    const u32 others = shfl_xor_u32(prmt(kept, received, order.given), 1);
    // Bytes ordered by source lane.
    ordered[0] = prmt(own, others, order.order);
    ordered[1] = prmt(own, others, order.order + 0x1111);
}

// The warp's row tiles in a stage.
struct WStage {
    const u8* row_tiles;

    QG_DEVICE void load(WStage& w, const u8* row_tiles, const WOrder&) { w.row_tiles = row_tiles; }

    QG_DEVICE void operand(const WStage& w, WOperand& operand, u32 step, const WOrder& order) {
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++) {
            const u8* k_tile = w.row_tiles + rt * W_STAGE_BYTES + step * QG_K_TILE_BYTES;
            const u32x4 v = ld_shared(reinterpret_cast<const u32x4*>(k_tile + order.codes));
            order_columns({v.x, v.y}, operand.code[rt * 2], order);
            order_columns({v.z, v.w}, operand.code[rt * 2 + 1], order);
            const u8* scale = k_tile + order.scale;
            operand.scale[rt] = SCALE_BYTES == 4 ? FromShared::word(scale) : FromShared::half(scale);
        }
    }
};

// D += A · B for one instruction. `pair_a` selects the
// lane pair that holds A's scales, `lane_b` the lane
// of a pair for B's.
QG_DEVICE void mma_step(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], u32 scale_a, u32 pair_a, u32 scale_b, u32 lane_b, u32 step) {
    if constexpr (QG_SUB_BLOCK == 16)
        mma_m16n8k64_nvf4(d, a, b, scale_a, {0, pair_a}, scale_b, {0, lane_b});
    else
        mma_m16n8k64_mxf4(d, a, b, scale_a, {step * 2, pair_a}, scale_b, {0, lane_b});
}
