// Teams of a CTA's warps, each of which has row tiles of its own, and slices of K that the warps of a team share a row tile by.
#pragma once
#include "atoms/sync.cuh"

constexpr u32 WARPS = QG_THREADS / 32, TEAMS = WARPS / QG_SLICES, TEAM_THREADS = QG_SLICES * 32;
static_assert(TEAMS * QG_SLICES == WARPS, "every warp has a slice");

// The k-tiles of a row tile that are a warp's.
struct KSlice {
    u32 first, k_tiles;

    QG_DEVICE KSlice of_member(u32 k_tiles, u32 member) {
        const u32 first = member * k_tiles / QG_SLICES;
        return {first, (member + 1) * k_tiles / QG_SLICES - first};
    }
};

// Of the warps of a team.
QG_DEVICE void team_barrier(u32 team) {
    if constexpr (TEAMS == 1)
        cta_barrier();
    else
        barrier_sync(1 + team, TEAM_THREADS);
}
