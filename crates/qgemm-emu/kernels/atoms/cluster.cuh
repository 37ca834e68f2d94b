// Clusters. CTAs run one after another, so each does all that its cluster would do for it: it copies every share, and arrives for every
// CTA at its own barriers. What one CTA of a cluster could do wrong to another is not seen.
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
