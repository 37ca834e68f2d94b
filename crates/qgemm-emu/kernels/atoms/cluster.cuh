// Clusters. Emulated CTAs run one after another.
// Each copies every share. It arrives on local
// barriers for every CTA.
// Races between the CTAs of a cluster are not detected.
#pragma once
#include "atoms/launch.cuh"
#include "atoms/mbarrier.cuh"
#include "atoms/sync.cuh"

#if QG_VARIANT >= 90
#define QG_CLUSTER_OF(ctas)

QG_DEVICE void cluster_barrier() { cta_barrier(); }
QG_DEVICE void mbarrier_arrive_at(u64* barrier, u32, QG_AT) { emu->mbarrier_arrive(barrier, 0, file, line); }
template <u32 CTAS, class Copy>
QG_DEVICE void copy_share(const Copy& copy) {
    for (u32 share = 0; share < CTAS; share++) copy(share);
}
#endif
