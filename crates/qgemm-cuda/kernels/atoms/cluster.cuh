// Clusters: CTAs that run at once on multiprocessors beside each other, and reach one another's shared memory (PTX ISA, "Cluster of
// Cooperative Thread Arrays"). CTAs whose numbers along x follow one another are a cluster; a CTA's rank is its place among them.
#pragma once
#include "atoms/launch.cuh"
#include "atoms/mbarrier.cuh"

#if QG_VARIANT >= 90
// Stands before the name of a kernel whose clusters have CTAS CTAs.
#define QG_CLUSTER_OF(ctas) __cluster_dims__(ctas, 1, 1)

// barrier.cluster: meets all threads of all CTAs of the cluster, whole warps. What they wrote to shared memory before is visible behind it.
QG_DEVICE void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// mbarrier.arrive at the barrier that stands in the place of `barrier` in the shared memory of the CTA of rank `rank`, for a thread that
// has read what others write then. It releases no writes to that CTA: with `.release.cluster` the compiler has all memory of the GPU
// wait, and an H200 took 247 us for a bf16 product of 4096 cubed and not 197 us.
QG_DEVICE void mbarrier_arrive_at(u64* barrier, u32 rank) {
    asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; "
                 "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(shared_address(barrier)),
                 "r"(rank)
                 : "memory");
}
// Calls `copy(share)` for the share of a CTA in what all CTAs of its cluster get, one share a rank. The copies go to all of them
// (`cp_async_bulk_tensor_5d_multicast`).
template <u32 CTAS, class Copy>
QG_DEVICE void copy_share(const Copy& copy) {
    copy(cta_index().x % CTAS);
}
#endif
