// Barriers, and the counter that finds the last CTA of a split tile.
#pragma once
#include "atoms/types.cuh"

QG_DEVICE void cta_barrier() {
    asm volatile("barrier.sync 0;" ::: "memory");
}

// barrier.sync and barrier.arrive: barrier `id`, 0 to 15, completes when `threads` threads, whole warps, have come to
// it. `barrier_arrive` does not wait. Barrier 0 is `cta_barrier`'s.
QG_DEVICE void barrier_sync(u32 id, u32 threads) {
    asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
QG_DEVICE void barrier_arrive(u32 id, u32 threads) {
    asm volatile("barrier.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// atom.add.acq_rel.gpu: releases this CTA's partial accumulators and acquires those of the CTAs before it.
QG_DEVICE u32 atomic_add_acq_rel(u32* address, u32 value) {
    u32 old;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(old) : "l"(address), "r"(value) : "memory");
    return old;
}
// atom.add.relaxed.gpu: orders nothing by itself. A fence before it releases, a fence after it acquires.
QG_DEVICE u32 atomic_add_relaxed(u32* address, u32 value) {
    u32 old;
    asm volatile("atom.add.relaxed.gpu.global.u32 %0, [%1], %2;" : "=r"(old) : "l"(address), "r"(value) : "memory");
    return old;
}
QG_DEVICE void st_global_relaxed_u32(u32* address, u32 value) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
// fence.acq_rel.gpu: what other launches have written is read from memory from here on.
QG_DEVICE void fence_gpu() {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

// Programmatic dependent launch (PTX ISA, "griddepcontrol"). `launch_dependents` lets the CTAs of the next kernel start
// as soon as all of ours have called it or ended. `wait` waits until the kernel before ours is complete and its writes
// are visible. Without it, as on older chips, kernels run one after another, and both do nothing.
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
