// Thread block clusters.
// CTAs of a cluster run at once.
// They can access each other's shared memory.
// See PTX ISA, "Cluster of Cooperative Thread Arrays".
// CTAs with consecutive x indices form a cluster.
// The rank of a CTA is its index in the cluster.
#pragma once
#include "atoms/launch.cuh"
#include "atoms/mbarrier.cuh"

#if QG_VARIANT >= 90
// Cluster attribute of a kernel; precedes the kernel's name.
#define QG_CLUSTER_OF(ctas) __cluster_dims__(ctas, 1, 1)

// barrier.cluster: waits for all threads of all
// CTAs of the cluster.
// Whole warps take part. It makes earlier
// shared-memory writes visible.
QG_DEVICE void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Remote mbarrier.arrive: the barrier at the offset of
// `barrier` in the shared memory of the CTA with this rank.
// The thread signals that it has read the CTA's data.
// The arrival releases no writes, on purpose: with
// `.release.cluster` the compiler emits a fence over all GPU
// memory, which is slow.
QG_DEVICE void mbarrier_arrive_at(u64* barrier, u32 rank) {
    asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; "
                 "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(shared_address(barrier)),
                 "r"(rank)
                 : "memory");
}
// Calls `copy(share)` for this CTA's share of a multicast tile.
// Each rank copies one share to all CTAs of the cluster
// (`cp_async_bulk_tensor_5d_multicast`).
template <u32 CTAS, class Copy>
QG_DEVICE void copy_share(const Copy& copy) {
    copy(cta_index().x % CTAS);
}
#endif
