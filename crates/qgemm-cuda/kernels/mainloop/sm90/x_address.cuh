// Location of a lane's columns of X in a stage,
// computed once per tile.
#pragma once
#include "atoms/wgmma.cuh"
#include "mainloop/sm90/consumer_lane.cuh"

// A lane's columns of a stage, in the order of X:
// per k-block, 16 of its first token and 16 of its second.
struct XColumns {
    u32x4 chunk[STAGE_K_BLOCKS][2];  // [k-block][token]

    // Permutes them to the order of W.
    QG_DEVICE XFragments in_order(const XColumns& columns) {
        XFragments x;
#pragma unroll
        for (u32 k_block = 0; k_block < STAGE_K_BLOCKS; k_block++)
#pragma unroll
            for (u32 half = 0; half < 2; half++) XFragments::put(x, k_block, half, columns.chunk[k_block][half]);
#pragma unroll
        for (u32 step = 0; step < STEPS; step++) wgmma_fence_operand(x.a[step]);
        return x;
    }
};

struct XAddress {
    // offset: chunk of the first token in the first k-block; chunk
    // c of token r is at c ^ (r % 8).
    // second: bytes to the second token, eight rows further.
    // Missing tokens read other tokens instead.
    // Only their sums are affected; these are not stored.
    u32 offset, second;

    QG_DEVICE XAddress of(const LaneOffsets& place, u32 tokens, u32 lane) {
        constexpr u32 FURTHER = 8 * STAGE_K;
        constexpr bool HAS_ALL = (QG_EXPERT_TILES && X_BOX == QG_TILE_M) || IS_LARGEST;
        const bool has_first = HAS_ALL || place.token < tokens, has_second = HAS_ALL || place.token + 8 < tokens;
        const u32 token = has_first ? place.token : 0;
        return {token * STAGE_K + (lane % 4 ^ token % 8) * 16, has_second ? FURTHER : 0};
    }
    // Loads the lane's columns of a k-block.
    QG_DEVICE void load(XColumns& x, const u8* stage, const XAddress& place, u32 k_block) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const u8* chunk = stage + (place.offset ^ k_block * PACKED_K_BLOCK) + half * place.second;
            x.chunk[k_block][half] = ld_shared(reinterpret_cast<const u32x4*>(chunk));
        }
    }
};
