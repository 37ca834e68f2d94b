// FP8 GEMM: split of a CTA's tile over its consumer warpgroups.
#pragma once
#include "mainloop/sm90/fp8_pipeline.cuh"

// Features per instruction, and instructions per warpgroup.
constexpr u32 PART_N = QG_PART_N, PARTS = QG_PARTS;
// Warpgroups along tokens and along features.
constexpr u32 GROUPS_M = QG_TILE_M / 64, GROUPS_N = QG_CONSUMERS / 128 / GROUPS_M;
static_assert(GROUPS_N * PARTS * PART_N == QG_TILE_N, "warpgroups share the tile");

// Position of a lane in the CTA's tile.
struct LaneOffsets {
    u32 group_n;
    // The lane's first token; the second is eight further.
    u32 token;

    QG_DEVICE LaneOffsets of(u32 warp, u32 lane) {
        const u32 group = warp / 4;
        return {GROUPS_N == 1 ? 0 : group / GROUPS_M, group % GROUPS_M * 64 + warp % 4 * 16 + token_of(lane / 4)};
    }
};
