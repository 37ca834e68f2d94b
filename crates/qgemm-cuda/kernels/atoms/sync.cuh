// Barriers, and the counter that tells the last block of a split tile.
#pragma once
#include "atoms/types.cuh"

QG_DEVICE void cta_barrier() {
    asm volatile("barrier.sync 0;" ::: "memory");
}

// barrier.sync and barrier.arrive: barrier `id`, 0 to 15, of which 0 is block_barrier's, completes when `threads`
// threads, whole warps, have come to it. Those that arrive do not wait.
QG_DEVICE void barrier_sync(u32 id, u32 threads) {
    asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
QG_DEVICE void barrier_arrive(u32 id, u32 threads) {
    asm volatile("barrier.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// atom.add.acq_rel.gpu: releases this block's partial sums and acquires those of the blocks before it.
QG_DEVICE u32 atomic_add_acq_rel(u32* address, u32 value) {
    u32 old;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(old) : "l"(address), "r"(value) : "memory");
    return old;
}
// atom.add.relaxed.gpu: orders nothing but with a fence before it, to release, or after it, to acquire.
QG_DEVICE u32 atomic_add_relaxed(u32* address, u32 value) {
    u32 old;
    asm volatile("atom.add.relaxed.gpu.global.u32 %0, [%1], %2;" : "=r"(old) : "l"(address), "r"(value) : "memory");
    return old;
}
QG_DEVICE void st_global_relaxed_u32(u32* address, u32 value) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
// fence.acq_rel.gpu: makes all threads' partial sums visible before the block's one arrival.
QG_DEVICE void fence_gpu() {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

// Programmatic dependent launch (PTX ISA, "griddepcontrol"): `launch_dependents` lets the blocks of the next kernel
// start as soon as all of ours have, and `wait` waits until the kernel before us is done and its writes are visible.
// Without it, as on older chips, kernels run one after another and neither does anything.
#if QG_VARIANT >= 90
QG_DEVICE void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
QG_DEVICE void griddepcontrol_wait() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}
#else
QG_DEVICE void griddepcontrol_launch_dependents() {}
QG_DEVICE void griddepcontrol_wait() {}
#endif
