// Warp shuffles, votes and reductions. All 32 lanes take part.
#pragma once
#include "atoms/types.cuh"

// shfl.sync.bfly: the value of lane `lane ^ lane_mask`.
QG_DEVICE float shfl_xor(float value, u32 lane_mask) {
    float d;
    asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=f"(d) : "f"(value), "r"(lane_mask));
    return d;
}
QG_DEVICE u32 shfl_xor_u32(u32 value, u32 lane_mask) {
    u32 d;
    asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=r"(d) : "r"(value), "r"(lane_mask));
    return d;
}
// shfl.sync.idx: the value of lane `source_lane % 32`.
// Each lane chooses its source.
QG_DEVICE u32 shfl_idx_u32(u32 value, u32 source_lane) {
    u32 d;
    asm volatile("shfl.sync.idx.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=r"(d) : "r"(value), "r"(source_lane));
    return d;
}

// vote.sync.ballot: bit l is the vote of lane l.
QG_DEVICE u32 ballot(bool yes) {
    u32 d;
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; vote.sync.ballot.b32 %0, p, 0xffffffff; }"
                 : "=r"(d)
                 : "r"((u32)yes));
    return d;
}

// bar.warp.sync: joins the lanes; earlier writes become visible.
QG_DEVICE void warp_barrier() {
    asm volatile("bar.warp.sync 0xffffffff;" ::: "memory");
}

#if QG_VARIANT >= 80
// redux.sync: the sum (mod 2^32) or maximum over all lanes.
QG_DEVICE u32 redux_add(u32 value) {
    u32 d;
    asm volatile("redux.sync.add.u32 %0, %1, 0xffffffff;" : "=r"(d) : "r"(value));
    return d;
}
QG_DEVICE u32 redux_max_u32(u32 value) {
    u32 d;
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(d) : "r"(value));
    return d;
}
#endif
