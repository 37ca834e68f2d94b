// How the consumer warpgroups of a CTA that multiplies 8-bit codes share its tile.
#pragma once
#include "mainloop/sm90/fp8_pipeline.cuh"

// Features of an instruction, and instructions side by side of a warpgroup.
constexpr u32 PART_N = QG_PART_N, PARTS = QG_PARTS;
// Warpgroups side by side along tokens and along features.
constexpr u32 GROUPS_M = QG_TILE_M / 64, GROUPS_N = QG_CONSUMERS / 128 / GROUPS_M;
static_assert(GROUPS_N * PARTS * PART_N == QG_TILE_N, "warpgroups share the tile");

// Where a lane stands in its CTA's tile.
struct LanePlace {
    u32 group_n;
    // The lane's first token in the tile; its second is eight further.
    u32 token;

    QG_DEVICE LanePlace of(u32 warp, u32 lane) {
        const u32 group = warp / 4;
        return {GROUPS_N == 1 ? 0 : group / GROUPS_M, group % GROUPS_M * 64 + warp % 4 * 16 + token_of(lane / 4)};
    }
};
