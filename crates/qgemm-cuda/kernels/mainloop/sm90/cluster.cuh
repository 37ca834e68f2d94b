// Clusters of QG_CLUSTER CTAs along M, whose tiles have the same features: each CTA copies a share of their part of W, or of B, for
// all of them.
#pragma once
#include "atoms/cluster.cuh"
#include "atoms/sync.cuh"
#include "atoms/warp.cuh"
#include "sched/params.cuh"

// All CTAs of a cluster, as bits.
constexpr u32 ALL_CTAS = (1 << QG_CLUSTER) - 1;

// Meets the threads of all CTAs of the cluster. At the start, nobody uses what another CTA has not made ready. At the end, no CTA leaves
// while others copy to its memory or arrive there.
QG_DEVICE void meet_cluster() {
    if constexpr (QG_CLUSTER > 1)
        cluster_barrier();
    else
        cta_barrier();
}

// For a warp that has read all of a stage, which every CTA of the cluster fills: each learns of it.
QG_DEVICE void release_stage(u64* empty, u32 lane) {
    warp_barrier();
    if constexpr (QG_CLUSTER > 1) {
        if (lane < QG_CLUSTER) mbarrier_arrive_at(empty, lane);
    } else {
        if (lane == 0) mbarrier_arrive(empty);
    }
}
