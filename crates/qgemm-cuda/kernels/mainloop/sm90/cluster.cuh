// Clusters of QG_CLUSTER CTAs along M, with equal features.
// Each CTA multicasts a share of W (or B) to the cluster.
#pragma once
#include "atoms/cluster.cuh"
#include "atoms/sync.cuh"
#include "atoms/warp.cuh"
#include "sched/params.cuh"

// Bit mask of all CTAs of a cluster.
constexpr u32 ALL_CTAS = (1 << QG_CLUSTER) - 1;

// Barrier of all threads of the cluster.
// At the start: no CTA uses uninitialized
// barriers of another CTA.
// At the end: no CTA exits while other CTAs copy to its memory
// or arrive on its barriers.
QG_DEVICE void meet_cluster() {
    if constexpr (QG_CLUSTER > 1)
        cluster_barrier();
    else
        cta_barrier();
}

// A warp calls it after it has read all of a stage.
// Every CTA of the cluster fills the stage, so each is notified.
QG_DEVICE void release_stage(u64* empty, u32 lane) {
    warp_barrier();
    if constexpr (QG_CLUSTER > 1) {
        if (lane < QG_CLUSTER) mbarrier_arrive_at(empty, lane);
    } else {
        if (lane == 0) mbarrier_arrive(empty);
    }
}
